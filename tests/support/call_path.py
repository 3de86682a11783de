"""Count what a call runs through: functions, files and code lines of the package, by ``sys.setprofile``.

``python -m tests.support.call_path`` prints the counts of law 9's calls, on rank 0 of two and in the launcher
of two; with ``-v``, the files and functions too.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import accelerate
from tests.support.ranks import RankServer

PACKAGE = str(Path(accelerate.__file__).parent)
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
# Parts of a function, which are counted with it.
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


@dataclass
class CallPath:
    """The functions of the package that ran in a call.

    Attributes:
        codes: their code objects, in the order in which they first ran.
    """

    codes: dict[CodeType, None] = field(default_factory=dict)

    def counts(self) -> CallCounts:
        """Return the numbers, and the names of the functions."""
        lines = {(code.co_filename, line) for code in self.codes for *_, line in code.co_lines() if line}
        names = [f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_name}" for code in self.codes]
        return CallCounts(len(names), len({code.co_filename for code in self.codes}), len(lines), names)


@contextmanager
def record_calls() -> Iterator[CallPath]:
    """Record the functions that this thread calls inside the context."""
    path = CallPath()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name in INNER:
            return
        # The body of a module or a class defines others: it runs at an import, and is part of no call.
        if code.co_flags & inspect.CO_OPTIMIZED:
            path.codes[code] = None

    sys.setprofile(profile)
    try:
        yield path
    finally:
        sys.setprofile(None)


@dataclass
class CallCounts:
    """What one call ran through.

    Attributes:
        functions, files, lines: numbers of functions, of files, and of lines with code in these functions.
        names: ``file: function`` of each, in the order in which they first ran.
    """

    functions: int
    files: int
    lines: int
    names: list[str]


def measure_calls() -> dict[str, CallCounts]:
    """Train three steps, save and load; return what each call ran through on this rank."""
    measured: dict[str, CallCounts] = {}

    def call(name: str, function: Callable[..., Any], *args: Any) -> Any:
        with record_calls() as path:
            result = function(*args)
        measured[name] = path.counts()
        return result

    accelerator: Any = call("Accelerator()", accelerate.Accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = call("prepare", accelerator.prepare, model, optimizer, loader)
    batches = iter(loader)
    for number in range(3):
        (x,) = next(batches)
        loss = call("forward", model, x).mean()
        call("backward", accelerator.backward, loss)
        call("later optimizer.step" if number else "first optimizer.step", optimizer.step)
        optimizer.zero_grad()
    folder = tempfile.mkdtemp() if accelerator.is_main_process else ""
    (folder,) = accelerate.utils.broadcast_object_list([folder])
    call("save_state", accelerator.save_state, folder)
    call("load_state", accelerator.load_state, folder)
    return measured


def measure_launch() -> CallCounts:
    """Launch two processes of an empty script; return what the launcher ran through."""
    code = """if True:
        import json, sys
        from accelerate.cli.main import main
        from tests.support.call_path import record_calls
        sys.argv = ["accelerate", "launch", "--cpu", "--num_processes", "2", sys.argv[1]]
        with record_calls() as path:
            try:
                main()
            except SystemExit as end:
                assert not end.code, end.code
        print(json.dumps(vars(path.counts())))
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        done = subprocess.run(
            [sys.executable, "-c", code, script.name],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # or the launcher counts cores
        )
    assert done.returncode == 0, done.stderr
    return CallCounts(**json.loads(done.stdout.splitlines()[-1]))


LAUNCHED = {"TORCHELASTIC_RUN_ID": "1"}  # a script that nobody has launched looks for its ranks itself


def measure_all(ranks: RankServer) -> dict[str, CallCounts]:
    """Return what each call of law 9 runs through, by strategy and call."""
    measured = {
        f"{call}, {name}": counts
        for name, env in {"DDP": {}, "FSDP2": FSDP2}.items()
        for call, counts in ranks(
            2, measure_calls, env={**env, "TORCHELASTIC_RUN_ID": "as under a launcher"}
        )[0].items()
    }
    return {**measured, "launch of 2 processes": measure_launch()}


def main() -> None:
    """Print the counts."""
    ranks = RankServer()
    for call, counts in measure_all(ranks).items():
        print(f"{call:30} {counts.functions:4} functions {counts.files:4} files {counts.lines:6} lines")
        if "-v" in sys.argv:
            print(*(f"      {name}" for name in counts.names), sep="\n")
    ranks.close()


if __name__ == "__main__":
    from tests.support import call_path  # by its name, by which ranks find what they call

    call_path.main()
