"""Data, random numbers and counts under a mesh: processes that share layers read and draw the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.control_trees import count_received
from tests.support.long_run import select_cases
from tests.support.ranks import RankServer, same_on_all

SAMPLES = 23


class Noisy(Dataset[Any]):
    """A sample is its index and three random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()])


class Stream(IterableDataset[Any]):
    """The same, in an order that is drawn."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(SAMPLES).tolist():
            yield torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()])


def made(tp: int = 2, shards: int = 1, **more: Any) -> Any:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import TorchTensorParallelConfig

    handler = TorchTensorParallelConfig(plan={"up": "colwise", "down": "rowwise"})
    config = ParallelismConfig(tp_size=tp, dp_shard_size=shards, tp_handler=handler)
    return Accelerator(parallelism_config=config, **more)


class Net(nn.Module):
    """Two layers with something dropped in between, and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(torch.tanh(self.up(x))))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def rows(loader: Any) -> list[list[float]]:
    return [row for batch in loader for row in batch.tolist()]


def read(shards: int) -> dict[str, Any]:
    from accelerate.utils import set_seed

    accelerator = made(shards=shards)
    found: dict[str, Any] = {"share": accelerator.strategy.data_shard.index}
    loaders = {
        "ordered": lambda: DataLoader(Noisy(), batch_size=3),
        "shuffled": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
        "workers": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2),
        "stream": lambda: DataLoader(Stream(), batch_size=3),
        "stream_workers": lambda: DataLoader(Stream(), batch_size=3, num_workers=1),
    }
    for name, make in loaders.items():
        # Every rank is in another random state.
        set_seed(5, device_specific=True)
        data = accelerator.prepare(make())
        found[name] = [rows(data), rows(data)]
        torch.rand(accelerator.process_index + 1)  # the program draws, differently
        found[name].append(rows(data))
    own = DataLoader(Noisy(), batch_size=3, shuffle=True)
    data = accelerator.prepare_data_loader(own, shard=False)
    found["kept"] = [rows(data)]
    data = accelerator.prepare_data_loader(DataLoader(Stream(), batch_size=3), shard=False)
    found["kept_stream"] = [rows(data), rows(data)]
    set_seed(5)
    received = count_received()
    found["kept_stream"].append(rows(data))
    found["received"] = sum(received)
    return found


def test_processes_that_share_layers_read_the_same(ranks: RankServer) -> None:
    """A mesh of 2 x 2: seeds of order and augmentation are those of the part of the data, not of the rank."""
    every = ranks(4, read, 2)
    assert [found["share"] for found in every] == [0, 0, 1, 1]
    for name in ("ordered", "shuffled", "workers", "stream", "stream_workers", "kept", "kept_stream"):
        assert every[0][name] == every[1][name], name
        assert every[2][name] == every[3][name], name
        for mine, other in zip(every[0][name], every[2][name], strict=True):
            if "kept" not in name:
                seen = {row[0] for row in (*mine, *other)}
                assert seen == set(map(float, range(SAMPLES))), name
                # A few samples fill the last step.
                assert len(mine) == len(other) == 12
            drawn = {row[1] for row in mine} & {row[1] for row in other}
            assert len(drawn) <= 1 or "stream" in name, name
    assert max(found["received"] for found in every) < 500, "equal random states are not sent"
    epochs = every[0]["shuffled"]
    assert epochs[0] != epochs[1] != epochs[2]


def test_all_read_the_same_where_all_share_layers(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, read, 1))
    for epochs in (found["ordered"], found["shuffled"], found["stream"], found["kept"]):
        assert sorted(row[0] for row in epochs[0]) == list(map(float, range(SAMPLES)))


def counted() -> dict[str, Any]:
    accelerator = made(shards=2)
    torch.manual_seed(accelerator.process_index)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, data, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Noisy(), batch_size=3, shuffle=True), schedule
    )
    found: dict[str, Any] = {"length": len(data), "total": data.total_batch_size}
    indices, losses = [], []
    for batch in data:
        indices += accelerator.gather_for_metrics(batch[:, 0].int()).tolist()
        losses += accelerator.gather_for_metrics([f"{int(row[0])}" for row in batch], use_gather_object=True)
    found.update(indices=sorted(indices), objects=sorted(map(int, losses)))
    # Dropout behind the layers: equal where activations are, different where the data are.
    torch.manual_seed(accelerator.process_index)
    outputs = [model(torch.ones(2, 4)) for _ in range(2)]
    found["dropped"] = [(out == 0).tolist() for out in outputs]
    accelerator.backward(outputs[0].sum() + outputs[1].sum())
    optimizer.step()
    schedule.step()
    found["rate"] = schedule.get_last_lr()
    return found


def test_samples_and_steps_count_once(ranks: RankServer) -> None:
    every = ranks(4, counted)
    first = every[0]
    assert first["indices"] == first["objects"] == list(range(SAMPLES))
    for found in every:
        assert {k: v for k, v in found.items() if k != "dropped"} == {
            k: v for k, v in first.items() if k != "dropped"
        }
    assert every[0]["dropped"] == every[1]["dropped"]
    assert every[2]["dropped"] == every[3]["dropped"]
    assert every[0]["dropped"] != every[2]["dropped"]
    assert (first["length"], first["total"]) == (4, 6)
    # The schedule counts steps of one process: two see different data.
    assert first["rate"] == [1.0 / 3]


def weighted() -> dict[str, Any]:
    accelerator = made(shards=2, gradient_accumulation_steps=2)
    part = accelerator.strategy.data_shard.index
    model = net().eval()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data, norm = torch.arange(24.0).reshape(6, 4) / 24, 0.0
    # Unequal pieces of the six rows: 2 and 1 of the first, 1 and 2 of the second part.
    for piece in ((data[:2], data[2:3]), (data[3:4], data[4:]))[part]:
        with accelerator.accumulate(model):
            loss = (model(piece) ** 2).sum(1).mean()
            accelerator.backward(loss, num_items=len(piece))
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return {"norm": norm, "state": {name: value.tolist() for name, value in state.items()}}


def test_items_are_those_of_all_data(ranks: RankServer) -> None:
    """The mean over six rows, unequally spread; two processes each have counted the same."""
    found = ranks(4, weighted)
    model = net().eval()
    data = torch.arange(24.0).reshape(6, 4) / 24
    (model(data) ** 2).sum(1).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(abs(rank["norm"] - norm) < 1e-6 for rank in found)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(found[0]["state"][name]), value, rtol=0, atol=1e-6)


def cut_off(folder: str, workers: int) -> list[list[float]]:
    accelerator = made(shards=2)
    torch.manual_seed(accelerator.process_index)
    data = accelerator.prepare(DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers))
    found: list[list[float]] = []
    for step, batch in enumerate(data, 1):
        if step > 2:
            found += batch.tolist()
        if step == 2:
            accelerator.save_state(folder)
    return found


def cut_off_without_a_mesh(folder: str) -> list[float]:
    """The first samples of this rank, of a loader without workers."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    data = accelerator.prepare(DataLoader(Noisy(), batch_size=3, shuffle=True))
    found = rows(batch for _, batch in zip(range(2), data, strict=False))
    accelerator.save_state(folder)
    return [row[0] for row in found]


def gone_on(folder: str, workers: int, tp: int) -> list[list[float]]:
    from accelerate import Accelerator

    accelerator = made(tp) if tp > 1 else Accelerator()
    data = accelerator.prepare(DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers))
    with warnings.catch_warnings():
        # Other processes get the samples.
        warnings.simplefilter("ignore" if tp > 1 else "error")
        accelerator.load_state(folder)
        return rows(accelerator.skip_first_batches(data, None))


def test_a_run_goes_on_by_parts_of_the_data(ranks: RankServer, tmp_path: Path) -> None:
    """E1, E4: four processes that read two parts, then two that read two, and two that read one."""
    folder = str(tmp_path / "state")
    before = ranks(4, cut_off, folder, 1)
    assert before[0] == before[1]
    assert before[2] == before[3]
    after = ranks(2, gone_on, folder, 1, 1)
    assert after == [before[0], before[2]]
    alike = same_on_all(ranks(2, gone_on, folder, 1, 2))
    left = {row[0] for row in (*before[0], *before[2])}
    assert {row[0] for row in alike} <= left
    assert len(alike) == SAMPLES - 12


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mesh_goes_on_where_processes_without_one_were(
    ranks: RankServer, tmp_path: Path, workers: int
) -> None:
    """G9: nothing in such a checkpoint was drawn for processes that read the same, or for workers."""
    folder = str(tmp_path / "state")
    seen = [sample for part in ranks(2, cut_off_without_a_mesh, folder) for sample in part]
    rest = same_on_all(ranks(2, gone_on, folder, workers, 2))
    assert sorted(seen + [row[0] for row in rest]) == list(map(float, range(SAMPLES)))


class Sequences(Dataset[Any]):
    """A sample is a sequence of its index."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), index), "shift_labels": torch.full((4,), index)}


def part_of_an_epoch(kind: str, folder: str, workers: int, resumes: bool) -> list[int]:
    """The samples of this rank in two batches before a save, or in all that are left after a load."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    more: dict[str, Any] = {}
    if kind == "fsdp":
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    elif kind.endswith("_size"):
        more["parallelism_config"] = ParallelismConfig(**{kind: 2})
    accelerator = Accelerator(cpu=True, **more)
    data: Any = accelerator.prepare(DataLoader(Sequences(), batch_size=3, shuffle=True, num_workers=workers))
    found: list[int] = []
    if resumes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other processes get the samples
            accelerator.load_state(folder)
    batches = accelerator.skip_first_batches(data, None) if resumes else data
    for number, batch in enumerate(batches, 1):
        found += batch["input_ids"][: data.real, 0].tolist()
        if number == 2 and not resumes:
            break
    if not resumes:
        accelerator.save_state(folder)
    return found


@pytest.mark.parametrize(
    ("mesh", "workers"),
    select_cases(
        [(f"{kind}_size", workers) for kind in ("tp", "cp", "sp", "pp") for workers in ((0, 2), (2, 0))],
        [("tp_size", (0, 2)), ("cp_size", (2, 0)), ("sp_size", (0, 2)), ("pp_size", (2, 0))],
    ),
    ids=str,
)
def test_every_mesh_goes_on_where_there_was_none(
    ranks: RankServer, tmp_path: Path, mesh: str, workers: tuple[int, int]
) -> None:
    """G9: after one process, DDP and FSDP; shuffled, with other workers."""
    for kind, size in ("single", 1), ("ddp", 2), ("fsdp", 2):
        folder = str(tmp_path / kind)
        seen = ranks(size, part_of_an_epoch, kind, folder, workers[0], False)
        left = ranks(2, part_of_an_epoch, mesh, folder, workers[1], True)
        first, rest = ({sample for part in parts for sample in part} for parts in (seen, left))
        assert len(first) == 6 * size, kind
        assert rest == set(range(24)) - first, kind


def refused(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def misled() -> dict[str, str]:
    """Prepare data that would differ between the ranks of a tensor-parallel group."""
    from torch.utils.data import DistributedSampler

    accelerator = made()
    data = Noisy()
    sampled = DataLoader(data, batch_size=3, sampler=DistributedSampler(data))
    stream = DataLoader(Stream(), batch_size=3)
    found = {
        "sampler": refused(lambda: accelerator.prepare(sampled)),
        "stream": refused(lambda: accelerator.prepare(stream)),
    }
    accelerator.dataloader_config.dispatch_batches = True
    return {**found, "asked": refused(lambda: accelerator.prepare(stream))}


def test_what_would_read_different_data_is_refused(ranks: RankServer) -> None:
    """E9: data that are sharded by processes; rank 0 reading for a part of them."""
    for rank, found in enumerate(ranks(2, misled)):
        text = f"is sharded by processes (its DistributedSampler has num_replicas=2 and rank={rank})"
        assert text in found["sampler"]
        assert found["stream"] == ""
        assert "dispatch_batches=True needs all 2 processes" in found["asked"]


def read_by_own_meshes() -> dict[str, list[list[float]]]:
    from torch.distributed.device_mesh import init_device_mesh

    from accelerate import Accelerator
    from accelerate.core.errors import WorldError
    from accelerate.data_loader import prepare_data_loader

    rank = Accelerator().process_index
    read: dict[str, list[list[float]]] = {}
    for name in ("dp", "fsdp", "data", "dp_shard", "tp", "model"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            data = prepare_data_loader(DataLoader(list(range(8)), batch_size=2), torch_device_mesh=mesh)
        assert any("'model' of the device mesh" in str(each.message) for each in said) == (name == "model")
        read[name] = [batch.tolist() for batch in data]
        # As programs do that put a copy of 1.15's ``Accelerator.prepare_data_loader`` in its place.
        told = {"num_processes": 2, "process_index": rank, "torch_device_mesh": mesh}
        data = prepare_data_loader(DataLoader(list(range(8)), batch_size=2), **told)
        assert [batch.tolist() for batch in data] == read[name]
    with pytest.raises(WorldError, match="mesh_dim_names"):
        prepare_data_loader(
            DataLoader(list(range(8)), batch_size=2), torch_device_mesh=init_device_mesh("cpu", (2,))
        )
    return read


def test_the_names_of_a_mesh_say_which_ranks_read_different_data(ranks: RankServer) -> None:
    """1.15 knows dp_replicate and dp_shard: along ``dp`` all ranks trained on the same batches."""
    first, second = ranks(2, read_by_own_meshes)
    whole, parts = [[0, 1], [2, 3], [4, 5], [6, 7]], ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    for name in first:
        assert (first[name], second[name]) == ((whole, whole) if name in ("tp", "model") else parts), name
