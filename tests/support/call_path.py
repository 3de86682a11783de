"""Count what a call runs through: functions, files and code lines of the package, by ``sys.setprofile``.

``python -m tests.support.call_path`` prints the counts of the calls of law 9, measured on rank 0 of two; with
``-v``, the files and functions too.
"""

from __future__ import annotations

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
# What a body that only defines others has: counted where it runs, at import, and part of no call.
DEFINITIONS = ("<module>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


@dataclass
class CallPath:
    """The functions of the package that ran in a call.

    Attributes:
        codes: their code objects, in the order in which they first ran.
    """

    codes: dict[CodeType, None] = field(default_factory=dict)

    def counts(self) -> tuple[int, int, int]:
        """Return the number of functions, of files, and of lines with code in these functions."""
        lines = {(c.co_filename, line) for c in self.codes for *_, line in c.co_lines() if line}
        return len(self.codes), len({c.co_filename for c in self.codes}), len(lines)


@contextmanager
def record_calls() -> Iterator[CallPath]:
    """Record the functions that this thread calls inside the context."""
    path = CallPath()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in DEFINITIONS:
            path.codes[code] = None

    sys.setprofile(profile)
    try:
        yield path
    finally:
        sys.setprofile(None)


def measure_calls(steps: int = 3) -> dict[str, tuple[tuple[int, int, int], list[str]]]:
    """Train a few steps, save and load; return the counts and the functions of each call on this rank."""
    measured: dict[str, tuple[tuple[int, int, int], list[str]]] = {}

    def call(name: str, function: Callable[..., Any], *args: Any) -> Any:
        with record_calls() as path:
            result = function(*args)
        names = [f"{c.co_filename.removeprefix(PACKAGE)}: {c.co_name}" for c in path.codes]
        measured[name] = (path.counts(), names)
        return result

    accelerator: Any = call("Accelerator()", accelerate.Accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = call("prepare", accelerator.prepare, model, optimizer, loader)
    batches = iter(loader)
    for step in range(steps):
        (x,) = next(batches)
        with accelerator.autocast():
            pass
        loss = call("forward", model, x).mean()
        call("backward", accelerator.backward, loss)
        call("first optimizer.step" if step == 0 else "later optimizer.step", optimizer.step)
        optimizer.zero_grad()
    folder = tempfile.mkdtemp() if accelerator.is_main_process else ""
    (folder,) = accelerate.utils.broadcast_object_list([folder])
    call("save_state", accelerator.save_state, folder)
    call("load_state", accelerator.load_state, folder)
    return measured


def measure_on_two_ranks(ranks: RankServer) -> dict[str, tuple[tuple[int, int, int], list[str]]]:
    """Return the counts and functions of rank 0 of two, by strategy and call."""
    return {
        f"{call}, {name}": counts
        for name, env in {"DDP": {}, "FSDP2": FSDP2}.items()
        for call, counts in ranks(2, measure_calls, env=env)[0].items()
    }


def main() -> None:
    """Print the counts."""
    ranks = RankServer()
    for name, ((functions, files, lines), names) in measure_on_two_ranks(ranks).items():
        print(f"{name:32} {functions:4} functions {files:4} files {lines:6} lines")
        if "-v" in sys.argv:
            print(*(f"      {function}" for function in names), sep="\n")
    ranks.close()


if __name__ == "__main__":
    from tests.support import call_path  # by its name, by which ranks find what they call

    call_path.main()
