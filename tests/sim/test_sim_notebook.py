"""A notebook that has used its accelerator before it starts ranks: fresh processes do not care."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.support import sim
from tests.support.environment import ROOT, clean

CELLS = {
    "setup": "import os, threading, torch\nfrom accelerate import Accelerator, notebook_launcher",
    "used": "model = torch.nn.Linear(2, 2)\nmodel = model.to('sim')",
    "fresh": """
        def train():
            accelerator = Accelerator()
            weight = next(accelerator.prepare(torch.nn.Linear(2, 2)).parameters())
            return str(weight.device), accelerator.reduce(torch.ones(1, device=accelerator.device))
        for device, total in notebook_launcher(train):
            print(device, total)
    """,
    "sent": """
        import warnings
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            print(notebook_launcher(lambda model: str(model.weight.device), (model,), num_processes=2))
        print(*(warning.message for warning in said))
    """,
    "copies": """
        lock = threading.Lock()
        def locked():
            with lock:
                return 1
        notebook_launcher(locked, num_processes=2)
    """,
    "on_cpu": """
        os.environ["ACCELERATE_USE_CPU"] = "true"
        print(notebook_launcher(locked, num_processes=2))
        del os.environ["ACCELERATE_USE_CPU"]
    """,
    "too_many": "notebook_launcher(train, num_processes=3)",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """(stdout, text of the error) of each cell of one notebook."""
    import nbformat
    from nbclient import NotebookClient

    code = [nbformat.v4.new_code_cell(textwrap.dedent(text).strip()) for text in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=code)
    client = NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120)
    client.execute(env=clean(sim.environment(), accelerators=False), cwd=str(ROOT))
    shown: dict[str, Any] = {}
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        outputs: list[Any] = cell.outputs
        out = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
        shown[name] = out, "".join(o.evalue for o in outputs if o.output_type == "error")
    return shown


def test_fresh_processes_train_on_both_devices(cells: dict[str, Any]) -> None:
    """F14: the kernel has used the device already."""
    out, error = cells["fresh"]
    assert error == ""
    assert out.endswith("sim:0 tensor([2.])\nsim:1 tensor([2.])\n")
    assert out.startswith("Launching training on 2 ")


def test_tensors_on_a_device_are_sent_with_a_warning(cells: dict[str, Any]) -> None:
    out, error = cells["sent"]
    assert error == ""
    assert "['sim:0', 'sim:0']" in out
    assert "what is sent to the ranks holds tensors on sim:0" in out


def test_copies_are_refused_once_the_device_is_used_and_the_object_is_named(cells: dict[str, Any]) -> None:
    """F14"""
    _, error = cells["copies"]
    assert "locked() cannot be sent to other processes" in error
    assert "the variable 'lock', which locked() uses, (lock) cannot be pickled" in error
    assert "it has used its sim device already" in error


def test_copies_that_leave_the_device_alone_are_made(cells: dict[str, Any]) -> None:
    out, error = cells["on_cpu"]
    assert error == ""
    assert out.endswith("[1, 1]\n")


def test_more_processes_than_devices_are_refused(cells: dict[str, Any]) -> None:
    _, error = cells["too_many"]
    assert "num_processes is 3, but there are 2 sim devices" in error
