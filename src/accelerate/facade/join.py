"""Training on inputs of different lengths per process."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from accelerate.core.errors import PrepareError
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.reading import shard_of
from accelerate.data.shard import BatchSamplerShard
from accelerate.data.stream import IterableDatasetShard, StepCollate


@contextmanager
def joined(
    joinables: Sequence[Any], loaders: Iterable[Any], even_batches: bool | None = None
) -> Generator[None]:
    """A loop whose processes may have different numbers of batches.

    A process that has no more takes part in the gradients of the others with nothing, by
    ``torch.distributed.algorithms.join.Join``; gradients are divided by the number of all processes.

    Args:
        joinables: prepared models, or torch's own joinable objects.
        loaders: the prepared loaders.
        even_batches: replaces the option of those loaders inside the block.

    Raises:
        PrepareError: a model is not replicated, so nobody can join for it.
    """
    replicas = [_joinable(item) for item in joinables]
    if not replicas:
        raise PrepareError("join_uneven_inputs was given no model", fix="give it the prepared models")
    holders = [] if even_batches is None else _holders(loaders)
    before = [holder.even_batches for holder in holders]
    try:
        for holder in holders:
            holder.even_batches = even_batches
        with Join(replicas):
            yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.even_batches = value


def _joinable(item: Any) -> Joinable:
    # A replicated model is the user's own; torch's object, which joins, stands behind it.
    found = getattr(item, "_replica", item)
    if not isinstance(found, Joinable):
        raise PrepareError(
            f"a {type(item).__name__} cannot join processes that have more inputs",
            why="it is no model that several processes hold as replicas",
            fix="give join_uneven_inputs models that accelerator.prepare has replicated",
        )
    return found


def _holders(loaders: Iterable[Any]) -> list[Any]:
    """What holds ``even_batches`` of prepared loaders."""
    parts = [
        part
        for loader in loaders
        for part in (
            loader,
            shard_of(loader.base_dataloader),
            loader.dataset,
            loader.base_dataloader.collate_fn,
        )
    ]
    kinds = (DataLoaderDispatcher, BatchSamplerShard, IterableDatasetShard, StepCollate)
    return [part for part in parts if isinstance(part, kinds)]
