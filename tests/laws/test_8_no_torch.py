"""Law 8: ``import accelerate``, the command line and the launcher never import torch in the parent process.

Each case runs in a fresh interpreter. When torch was imported, the error shows the stack that did it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.laws.source import sources
from tests.laws.test_1_back_ends import CLUSTERS, plugins
from tests.laws.test_2_imports import FACE, floor_of
from tests.support.command import Running

LAW = "law 8, the parent process never imports torch"

# Notes who asks for torch, then runs the case, then tells. It is asked for also by find_spec, which only
# looks whether it is there, so the verdict is by sys.modules.
PROLOGUE = """
import os, sys, traceback

class Witness:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            self.stack = traceback.format_stack()[:-1]
        return None

def verdict():
    if "torch" in sys.modules:
        sys.stderr.write("torch was imported by\\n" + "".join(witness.stack))
        sys.stderr.flush()
        os._exit(99)

def judged(function):
    def call(*args):
        verdict()  # a process that becomes another one does not come back
        function(*args)
    return call

witness = Witness()
sys.meta_path.insert(0, witness)
os.execv, os.execve = judged(os.execv), judged(os.execve)
code = 0
try:
    {body}
except SystemExit as leaving:
    code = leaving.code
verdict()
sys.exit(code)
"""
EVERY_HELP = """
    from accelerate.cli.main import main
    for name in {names!r}:
        sys.argv = ["accelerate", name, "--help"]
        try:
            main()
        except SystemExit as leaving:
            assert not leaving.code, name
"""
MAIN = "sys.argv = {argv!r}; from accelerate.cli.main import main; main()"


def run(body: str) -> str:
    """The output of ``body`` in a fresh interpreter that has not imported torch at its end."""
    __tracebackhide__ = True
    done = Running([sys.executable, "-c", PROLOGUE.format(body=body)]).wait()
    assert done.returncode != 99, f"{LAW}\n{done.stderr}"
    assert done.returncode == 0, done.output
    return done.stdout + done.stderr


def command(*args: str) -> str:
    """Likewise of ``accelerate ARGS``."""
    __tracebackhide__ = True
    return run(MAIN.format(argv=["accelerate", *args]))


def commands() -> list[str]:
    """The commands, by the files of cli/."""
    return sorted(source.inside[1].replace("_", "-") for source in plugins("cli"))


def torch_free() -> list[str]:
    """Modules that may be imported in a parent process."""
    free = (s for s in sources() if s.room in ("core", "device", "launch", "cli") or s.inside == CLUSTERS)
    return sorted(source.module for source in free)


def test_the_witness_sees_an_import_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net has no hole: a case that imports torch fails and shows where."""
    (tmp_path / "torch.py").touch()  # in place of the real one, which takes seconds
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = Running([sys.executable, "-c", PROLOGUE.format(body="import torch")]).wait()
    assert done.returncode == 99
    assert 'File "<string>"' in done.stderr
    becoming = "import torch; os.execv(sys.executable, [sys.executable, '-c', ''])"
    assert Running([sys.executable, "-c", PROLOGUE.format(body=becoming)]).wait().returncode == 99
    assert run("import importlib.util; print(importlib.util.find_spec('torch').name)") == "torch\n"


def test_importing_the_package_imports_no_torch() -> None:
    run("import accelerate; print(accelerate.__version__)")


def test_the_lower_rooms_import_no_torch() -> None:
    """core, device, launch, cli and the clusters: everything that a parent process may import."""
    modules = torch_free()
    assert len(modules) > 10
    run(f"import importlib; [importlib.import_module(name) for name in {modules!r}]")


def test_every_public_module_can_be_imported_without_torch() -> None:
    """The face only looks names up, so that ``import accelerate.utils`` costs nothing either."""
    face = [source.module for source in sources() if floor_of(source.room) == FACE]
    names = sorted(set(face) - {"accelerate.__main__"})
    switched_on = "import os; os.environ['ACCELERATE_ENABLE_RICH'] = '1'"  # accelerate.utils.rich needs it
    run(f"{switched_on}; import importlib; [importlib.import_module(name) for name in {names!r}]")


def test_help_imports_no_torch() -> None:
    assert "launch" in command("--help")


def test_the_help_of_every_command_imports_no_torch() -> None:
    names = commands()
    if not names:
        pytest.skip("the command line has no command yet")
    output = run(EVERY_HELP.format(names=names))
    for name in names:
        assert f"Usage: accelerate {name} " in output


@pytest.mark.parametrize("args", [("env",), ("config", "default")])
def test_commands_that_describe_import_no_torch(args: tuple[str, ...]) -> None:
    command(*args)


CHILD = """
import os, sys
print("rank", os.environ.get("RANK", "0"), "torch" in sys.modules, sys.argv[1:])
"""


@pytest.mark.parametrize("n", [1, 2])
def test_launching_imports_no_torch_in_the_parent(tmp_path: Path, n: int) -> None:
    """F10: the launcher only starts processes; its children may import what they like."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    output = command("launch", "--cpu", "--num_processes", str(n), str(script), "an argument")
    for rank in range(n):
        assert f"rank {rank} False ['an argument']" in output


TRAINING = """
import sys
import torch
before = {*sys.modules}
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.backward(model(torch.ones(1, 2)).sum())
print(*sorted({name for name in {*sys.modules} - before if name.startswith(SYMBOLIC)}))
# torch imports these itself for the first optimizer.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
before = {*sys.modules}
optimizer = accelerator.prepare(optimizer)
optimizer.step()
print(*sorted({name for name in {*sys.modules} - before if name.startswith(SLOW)}))
"""


def test_a_training_imports_no_library_that_it_does_not_use() -> None:
    """Symbolic shapes take half of the time of ``import torch``, libraries of checkpoints a fifth."""
    slow = (
        "torch.distributed.checkpoint",
        "torch.distributed.elastic",
        "huggingface_hub",
        "safetensors.torch",
    )
    symbolic = ("sympy", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", *slow)
    code = TRAINING.replace("SLOW", repr(slow)).replace("SYMBOLIC", repr(symbolic))
    done = Running([sys.executable, "-c", code]).wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n\n"
