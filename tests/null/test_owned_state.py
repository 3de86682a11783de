"""A load into a process that has an optimizer state already fills the memory of that state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are not mapped on this system")
SIZE = 2**17  # elements: a moment of a parameter has half a megabyte


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.checkpoint.mapped_state.LARGE", 1)
    # Wherever the tests' folder lies.
    monkeypatch.setattr("accelerate.checkpoint.mapped_state._file_system", lambda path: "ext4")


def training() -> tuple[Accelerator, torch.nn.Module, Any]:
    """Two layers of the same shape: their states could be mistaken for each other."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.ModuleList([torch.nn.Linear(SIZE, 1), torch.nn.Linear(SIZE, 1)])
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def step(accelerator: Accelerator, model: Any, optimizer: Any, scale: float = 1.0) -> None:
    rows = torch.linspace(0, scale, SIZE)[None]
    accelerator.backward(model[0](rows).sum() + 3 * model[1](rows).sum())
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def addresses(optimizer: Any) -> list[int]:
    return [value.data_ptr() for value in moments(optimizer) if value.numel() > 1]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Accelerator, Any, Any, Path, list[torch.Tensor]]:
    """A run that has saved, and gone on for a step."""
    accelerator, model, optimizer = training()
    step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state(tmp_path / "a"))
    values = [value.clone() for value in moments(optimizer)]
    step(accelerator, model, optimizer, 2.0)
    return accelerator, model, optimizer, folder, values


def check_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_tensors_that_are_there_take_the_values(saved: Any) -> None:
    accelerator, model, optimizer, folder, values = saved
    before, versions = addresses(optimizer), [each._version for each in moments(optimizer)]
    for _ in range(2):
        accelerator.load_state(folder)
        assert addresses(optimizer) == before
        check_equal(moments(optimizer), values)
    assert [each._version for each in moments(optimizer) if each.numel() > 1] > versions[1:3], (
        "autograd is told"
    )
    accelerator.wait_for_checkpoint()
    (folder / "optimizer.bin").write_bytes(b"")
    check_equal(moments(optimizer), values)
    step(accelerator, model, optimizer)


@pytest.mark.parametrize(
    "keep",
    [
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: [dict(values) for values in optimizer.state.values()],
        lambda optimizer: moments(optimizer),
        lambda optimizer: [value.detach() for value in moments(optimizer)],
        lambda optimizer: [value.view(value.shape) for value in moments(optimizer)],
    ],
    ids=["state_dict", "copies of its dicts", "the tensors", "the same memory", "views"],
)
def test_values_that_somebody_has_kept_stay(saved: Any, keep: Callable[[Any], Any]) -> None:
    """As ``backup = optimizer.state_dict(); load_state(best); ...; optimizer.load_state_dict(backup)``."""
    accelerator, _, optimizer, folder, values = saved
    latest = [value.clone() for value in moments(optimizer)]
    kept = keep(optimizer)
    accelerator.load_state(folder)
    check_equal(moments(optimizer), values)
    if isinstance(kept, dict):
        kept = [value for each in kept["state"].values() for value in each.values()]
    elif isinstance(kept[0], dict):
        kept = [value for each in kept for value in each.values()]
    check_equal(kept, latest)


def test_a_state_of_another_dtype_takes_new_memory(saved: Any, tmp_path: Path) -> None:
    accelerator, _, optimizer, folder, values = saved
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    accelerator.load_state(folder)
    check_equal(moments(optimizer), values)


def test_a_file_that_ends_early_is_an_error(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by somebody between its verification and the read."""
    accelerator, _, _, folder, _ = saved
    monkeypatch.setattr(
        "accelerate.checkpoint.mapped_state.read_at", lambda number, view, offset: len(view) - 1
    )
    with pytest.raises(CheckpointError, match=r"(?s)optimizer\.bin.*ends before"):
        accelerator.load_state(folder)
