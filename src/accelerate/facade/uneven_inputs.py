"""``join_uneven_inputs``: a loop whose ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from accelerate.core.errors import PrepareError
from accelerate.data.batch_sampler_shard import BatchSamplerShard
from accelerate.data.batch_source import find_shard
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.iterable_dataset import GlobalBatchCollate, IterableDatasetShard


@contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any], loaders: Iterable[Any], even_batches: bool | None = None
) -> Generator[None]:
    """Run a loop whose ranks may have different numbers of batches.

    A rank that has no more batches joins the all-reduces of the others with zeros, by
    ``torch.distributed.algorithms.join.Join``; gradients are divided by the number of all processes.

    Args:
        joinables: prepared models, or torch's own joinable objects.
        loaders: the prepared loaders.
        even_batches: replaces the option of those loaders inside the block.

    Raises:
        PrepareError: a model is not replicated (DDP).
    """
    replicas = [_joinable_replica(item) for item in joinables]
    if not replicas:
        raise PrepareError("join_uneven_inputs was given no model", fix="give it the prepared models")
    holders = [] if even_batches is None else _even_batches_holders(loaders)
    before = [holder.even_batches for holder in holders]
    try:
        for holder in holders:
            holder.even_batches = even_batches
        with Join(replicas):
            yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.even_batches = value


def _joinable_replica(item: Any) -> Joinable:
    # A prepared model is the user's own; the DDP object, which is Joinable, is its attribute.
    replica = getattr(item, "_replica", item)
    if not isinstance(replica, Joinable):
        raise PrepareError(
            f"a {type(item).__name__} cannot join processes that have more inputs",
            why="it is no model that is replicated by DDP",
            fix="give join_uneven_inputs models that accelerator.prepare has replicated",
        )
    return replica


def _even_batches_holders(loaders: Iterable[Any]) -> list[Any]:
    """Return the objects that hold ``even_batches`` of prepared loaders."""
    parts = [
        part
        for loader in loaders
        for part in (
            loader,
            find_shard(loader.base_dataloader),
            loader.dataset,
            loader.base_dataloader.collate_fn,
        )
    ]
    kinds = (DataLoaderDispatcher, BatchSamplerShard, IterableDatasetShard, GlobalBatchCollate)
    return [part for part in parts if isinstance(part, kinds)]
