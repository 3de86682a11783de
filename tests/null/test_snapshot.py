"""Copies of states: what they share, what they keep apart, and the memory that they lie in."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from accelerate.checkpoint import async_save, save
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.core.errors import CheckpointError


@pytest.fixture(autouse=True)
def staging() -> Iterator[async_save.SnapshotHostMemory]:
    async_save.staging.release()
    yield async_save.staging
    async_save.staging.release()


def copy_of(value: Any) -> Any:
    """``value`` as a snapshot has it."""
    states = [value]
    for wait in async_save.take_snapshot([states]):
        wait()
    return states[0]


def test_what_is_done_afterwards_does_not_reach_the_copy() -> None:
    """D10"""
    value = {"w": torch.ones(3), "list": [torch.zeros(2), {"n": [1, 2]}], "text": "a"}
    copy = copy_of(value)
    value["w"].add_(1)
    value["list"][0].fill_(7)
    value["list"][1]["n"].append(3)
    assert copy["w"].tolist() == [1, 1, 1]
    assert copy["list"][0].tolist() == [0, 0]
    assert copy["list"][1] == {"n": [1, 2]}


def test_shared_memory_stays_shared() -> None:
    """D6: ties, views of one another, and the same container twice."""
    base = torch.arange(12.0)
    one = base[:4]
    inner = [1]
    copy = copy_of(
        {"a": one, "again": one, "b": base.view(3, 4)[1:], "t": base.view(3, 4).t(), "l": [inner, inner]}
    )
    assert copy["a"] is copy["again"]
    copy["a"].fill_(-1)
    copy["b"].fill_(-2)
    assert copy["t"].t().flatten().tolist() == [-1] * 4 + [-2] * 8
    assert copy["t"].stride() == (1, 4)
    assert base.tolist() == list(range(12))
    assert copy["l"][0] is copy["l"][1]


def test_tensors_keep_their_kind() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.mark = "mine"  # type: ignore[attr-defined]
    values = [
        parameter,
        torch.ones(2, requires_grad=True),
        torch.tensor(3),
        torch.empty(0, 5),
        torch.ones(3).bool(),
    ]
    for value, copy in zip(values, copy_of(values), strict=True):
        assert type(copy) is type(value)
        assert copy.requires_grad == value.requires_grad
        assert (copy.dtype, copy.shape) == (value.dtype, value.shape)
        assert torch.equal(copy, value)
        assert vars(copy) == vars(value)


def test_tensors_of_other_classes_are_copied_by_what_they_hold() -> None:
    both = TwoTensor(torch.ones(2), torch.zeros(2))
    sparse = torch.eye(3).to_sparse()
    complex_ = torch.tensor([1 + 2j]).conj()
    nowhere = torch.empty(2, device="meta")
    copy = copy_of([both, sparse, complex_, nowhere])
    both.a.add_(5)
    assert isinstance(copy[0], TwoTensor)
    assert copy[0].a.tolist() == [1, 1]
    assert torch.equal(copy[1].to_dense(), torch.eye(3))
    assert copy[2].tolist() == [1 - 2j]
    assert copy[3].device.type == "meta"


class Placed(TwoTensor):
    """Says of its parts, as a DTensor does, one that is no tensor."""

    mesh = ("a", "mesh")

    def __tensor_flatten__(self) -> Any:
        return ["a", "b", "mesh"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        assert inner["mesh"] is Placed.mesh
        return Placed(inner["a"], inner["b"])


def test_parts_that_are_no_tensors_stay_as_they_are(staging: async_save.SnapshotHostMemory) -> None:
    value = Placed(torch.arange(4.0), torch.arange(4.0))
    staging.prepare(async_save.snapshot_sizes([value]))
    copy = copy_of(value)
    value.a.fill_(-1)
    assert type(copy) is Placed
    assert copy.a.tolist() == copy.b.tolist() == [0, 1, 2, 3]


def test_containers_keep_their_class_and_attributes() -> None:
    weights = torch.nn.Linear(2, 2).state_dict()
    copy = copy_of(weights)
    assert type(copy) is OrderedDict
    assert copy._metadata == weights._metadata  # type: ignore[attr-defined]


def test_a_copy_brings_no_more_than_its_own_memory_into_a_file(tmp_path: Path) -> None:
    copy = copy_of([torch.ones(4), torch.ones(100_000)])
    torch.save(copy[0], tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 10_000


def test_memory_is_used_again(staging: async_save.SnapshotHostMemory) -> None:
    values = [torch.ones(1000), torch.ones(20)]
    first = {one.data_ptr() for one in copy_of(values)}
    kept = staging.size
    assert kept >= 4080
    assert {one.data_ptr() for one in copy_of(values)} == first
    assert staging.size == kept
    copy_of([*values, torch.ones(5000)])
    assert kept + 20_000 <= staging.size < kept + 21_000
    staging.release()
    assert staging.size == 0


def test_memory_can_be_ready_before_it_is_needed(staging: async_save.SnapshotHostMemory) -> None:
    values = [torch.ones(50_000), torch.ones(20)]
    staging.prepare(async_save.snapshot_sizes(values))
    assert torch.equal(copy_of(values)[0], values[0])
    size = staging.size
    copy_of(values)
    assert staging.size == size  # whether or not it was ready in time
    staging.prepare(async_save.snapshot_sizes(values))
    assert staging.size == size


@pytest.mark.parametrize("ahead", [True, False])
def test_no_allocation_is_larger_than_a_slab(
    staging: async_save.SnapshotHostMemory, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Torch rounds pinned memory up to a power of two: a block of 70 GiB would take 128."""
    monkeypatch.setattr(async_save, "SLAB", 2**16)
    generator = torch.Generator().manual_seed(0)
    values = [torch.ones(int(n)) for n in torch.randint(1, 2**13, (60,), generator=generator)]
    values.append(torch.ones(2**15))  # larger than a slab
    total, ready = sum(value.nbytes for value in values), 0
    if ahead:
        staging.prepare(async_save.snapshot_sizes(values))
        assert staging._prepare_thread is not None
        staging._prepare_thread.join()
        ready = staging.size
    for copy, value in zip(copy_of(values), values, strict=True):
        assert torch.equal(copy, value)
    blocks = [block.numel() for each in staging._blocks.values() for block in each]
    assert max(blocks) == 2**17
    assert sorted(blocks)[-2] <= 2**16
    assert len(blocks) <= 2 + 1.25 * (total - 2**17) / 2**16
    assert staging.size < total + 64 * len(values)
    if ahead:
        assert staging.size == ready, "the storages lie where room was made for them"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_leaves_the_memory_alone(staging: async_save.SnapshotHostMemory) -> None:
    """Workers of a loader are forked at any time, also while a copy is written."""
    before = copy_of(torch.ones(1_000_000))
    pid = os.fork()
    if pid == 0:
        fine = async_save.staging.size == 0
        async_save.staging.release()
        fine = fine and copy_of(torch.ones(1000)).sum() == 1000
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert before.sum() == 1_000_000


def training(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, CheckpointContents]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return (
        model,
        optimizer,
        CheckpointContents([model], [optimizer], [scheduler], step=3, metadata={"epoch": 1}),
    )


def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_are_those_of_a_save_that_was_waited_for(tmp_path: Path, safe: bool) -> None:
    model, optimizer, parts = training(0)
    advance(model, optimizer)
    save.save(parts, tmp_path / "now", safe_serialization=safe)
    path = tmp_path / "later"
    assert save.save(parts, path, safe_serialization=safe, in_background=True) == path
    assert async_save.wait() == path
    assert async_save.wait() is None
    names = sorted(os.listdir(tmp_path / "now"))
    assert sorted(os.listdir(path)) == names
    for name in set(names) - {"manifest.json"}:
        assert (tmp_path / "now" / name).read_bytes() == (path / name).read_bytes(), name


def test_hooks_may_write_and_take_models_away(tmp_path: Path) -> None:
    def before(weights: Any, folder: Path) -> None:
        (folder / "extra.txt").write_text("mine")
        weights.pop()

    _, _, parts = training(0)
    save.save(parts, tmp_path / "c", before=before, in_background=True)
    async_save.wait()
    assert (tmp_path / "c/extra.txt").read_text() == "mine"
    assert not (tmp_path / "c/model.safetensors").exists()


class Uncopyable:
    def state_dict(self) -> Any:
        return {"file": open(os.devnull)}

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


def test_a_state_that_cannot_be_copied_is_an_error_at_the_call(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, TypeError), match="TextIOWrapper"):
        save.save(CheckpointContents(custom=[Uncopyable()]), tmp_path / "c", in_background=True)
    assert os.listdir(tmp_path) == []
    assert async_save.wait() is None
