"""The classes of ``accelerate.data_loader``: attributes, orders, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from accelerate import data_loader as dl
from accelerate.utils import DataLoaderConfiguration
from tests.clients.calls.training import fresh
from tests.clients.probe import Probe

ATTRIBUTES = (
    "device rng_types synchronized_generator skip_batches gradient_state _drop_last _non_blocking iteration "
    "use_stateful_dataloader end_of_dataloader remainder total_batch_size total_dataset_length batch_size "
    "drop_last num_workers pin_memory timeout collate_fn worker_init_fn generator prefetch_factor "
    "persistent_workers _is_accelerate_prepared nothing_like_this"
)


class Stream(IterableDataset[Any]):
    """So many numbers, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


def samplers(folder: Path) -> dict[str, Any]:
    """Every combination of sizes and options of the shards, computed by one process."""
    probe = Probe()
    for size in (1, 3, 8, 9, 16):
        for batch in (1, 4, 5):
            for drop in (False, True):
                _shards(probe, size, batch, drop)
    sampler = BatchSampler(range(9), 2, False)
    probe("skip batches", lambda: list(dl.SkipBatchSampler(sampler, 2)))
    probe("skip len", lambda: len(dl.SkipBatchSampler(sampler, 2)))
    probe("skip total", lambda: dl.SkipBatchSampler(sampler, 2).total_length)
    probe("skip loader", lambda: list(dl.SkipDataLoader(list(range(6)), skip_batches=1, batch_size=2)))
    probe("skip loader len", lambda: len(dl.SkipDataLoader(list(range(6)), skip_batches=1, batch_size=2)))
    probe(
        "skip first of a plain loader",
        lambda: list(dl.skip_first_batches(DataLoader(range(6), batch_size=2), 1)),
    )
    probe("skip first len", lambda: len(dl.skip_first_batches(DataLoader(range(6), batch_size=2), 1)))
    probe(
        "skip first of a stream", lambda: list(dl.skip_first_batches(DataLoader(Stream(6), batch_size=2), 1))
    )
    seeded = dl.SeedableRandomSampler(range(6), data_seed=3)
    probe("seeded", lambda: [sorted(seeded), list(seeded) == list(seeded), seeded.initial_seed])
    seeded.set_epoch(2)
    probe("seeded epoch", lambda: [list(seeded), seeded.epoch])
    probe("get_sampler", lambda: type(dl.get_sampler(DataLoader(range(6), batch_size=2))).__name__)
    return probe.notes


def _shards(probe: Probe, size: int, batch: int, drop: bool) -> None:
    for split in (False, True):
        for even in (True, False):
            for world in (2, 3):
                name = f"n={size} bs={batch} drop={drop} split={split} even={even} of {world}"
                if split and batch % world:
                    if size == 9 and not drop:
                        probe(name, _shard, size, batch, drop, world, 0, split, even)
                    continue
                every = [_shard(size, batch, drop, world, rank, split, even) for rank in range(world)]
                probe(name, lambda every=every: [list(s) for s in every])
                probe(f"len {name}", lambda every=every: [len(s) for s in every])
        if not (split and batch % 2):
            name = f"stream n={size} bs={batch} drop={drop} split={split}"
            probe(
                name, lambda split=split: [list(_stream(size, batch, drop, rank, split)) for rank in range(2)]
            )


def _shard(size: int, batch: int, drop: bool, world: int, rank: int, split: bool, even: bool) -> Any:
    return dl.BatchSamplerShard(
        BatchSampler(SequentialSampler(range(size)), batch, drop), world, rank, split, even
    )


def _stream(size: int, batch: int, drop: bool, rank: int, split: bool) -> Any:
    return dl.IterableDatasetShard(Stream(size), batch, drop, 2, rank, split)


def prepared(folder: Path) -> dict[str, Any]:
    """Attributes of prepared loaders, and what they give, epoch after epoch."""
    probe = Probe()
    data = TensorDataset(torch.arange(9))
    for name, (loader, given) in {
        "plain": (lambda: DataLoader(data, batch_size=2), {}),
        "drop": (lambda: DataLoader(data, batch_size=2, drop_last=True), {}),
        "uneven": (lambda: DataLoader(data, batch_size=2), {"even_batches": False}),
        "split": (lambda: DataLoader(data, batch_size=4), {"split_batches": True}),
        "stream": (lambda: DataLoader(Stream(9), batch_size=2), {"dispatch_batches": False}),
        "dispatched": (lambda: DataLoader(Stream(9), batch_size=2), {}),
        "dispatched map": (lambda: DataLoader(data, batch_size=2), {"dispatch_batches": True}),
        "no batches": (lambda: DataLoader(data, batch_size=None), {}),
    }.items():
        acc = fresh(dataloader_config=DataLoaderConfiguration(**given))
        made = acc.prepare(loader())
        probe(f"{name} kind", lambda made=made: type(made).__name__)
        probe(f"{name} is a loader", isinstance, made, DataLoader)
        probe.values(name, made, ATTRIBUTES)
        probe(f"{name} len", len, made)
        probe(
            f"{name} samplers",
            lambda made=made: [type(made.sampler).__name__, type(made.batch_sampler).__name__],
        )
        probe(f"{name} base", lambda made=made: type(made.base_dataloader).__name__)
        probe(f"{name} epoch", _epoch, acc, made)
        probe(f"{name} epoch 2", _epoch, acc, made)
        probe(f"{name} iteration", lambda made=made: made.iteration)
        probe(f"{name} skip", lambda acc=acc, made=made: _epoch(acc, acc.skip_first_batches(made, 1)))
        probe(f"{name} skip kind", lambda acc=acc, made=made: type(acc.skip_first_batches(made, 1)).__name__)
    _orders(probe)
    return probe.notes


def _epoch(acc: Any, loader: Any) -> Any:
    rows = []
    for batch in loader:
        state = acc.gradient_state
        rows.append([batch, state.end_of_dataloader, state.in_dataloader])
    return rows


def _orders(probe: Probe) -> None:
    for seed in (None, 3):
        acc = fresh(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed))
        torch.manual_seed(0)
        made = acc.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
        inner = acc.skip_first_batches(made, 0).batch_sampler
        while hasattr(inner, "batch_sampler"):
            inner = inner.batch_sampler
        probe(f"seedable {seed} sampler", lambda inner=inner: type(inner.sampler).__name__)
        for epoch in (0, 1):
            probe(f"seedable {seed} {epoch}", lambda made=made: list(made))
        made.set_epoch(5)
        probe(f"seedable {seed} at 5", lambda made=made: list(made))
    acc = fresh()
    made = acc.prepare(DataLoader(range(8), batch_size=2, sampler=RandomSampler(range(8))))
    probe("random complete", lambda: sorted(torch.cat([acc.gather(b) for b in made]).tolist()))
    probe("get_sampler of prepared", lambda: type(made.get_sampler()).__name__)


JOBS = {"samplers": samplers, "loaders": prepared}
