"""Map-style data fetched by index.

Torch's loader gets its batches of indices from a ``PresetIndexSampler``, which knows the last one, so no
batch is fetched before it is requested.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from accelerate.data.batch_sampler_shard import BatchSamplerShard, copy_loader, shards_batches, slicer_for
from accelerate.data.batches import FetchedBatch
from accelerate.data.epoch_order import (
    Broadcast,
    OrderState,
    RNGSnapshot,
    capture_generators,
    finish_at_end,
    has_known_seed,
    inner_sampler,
    loader_generators,
    open_order,
    open_walk,
    opened_by_loader,
    outer_sampler,
    restore_generators,
    sampler_chain,
)
from accelerate.data.position import Epoch
from accelerate.data.sample_order import (
    END,
    RankSampleOrderSlicer,
    StepSampleIndices,
    count_samples,
    find_batch_sampler,
    is_known,
    is_torch_batch_sampler,
    mark_last,
    single_steps,
    skip_items,
)
from accelerate.data.sharding_detection import check_first_batch
from accelerate.world import collective
from accelerate.world.local_tensor_trees import ignorant_find_batch_size
from accelerate.world.rng import derive, seed_host

_logger = logging.getLogger(__name__)

StepsOpener = Callable[[Any, list[Any], Epoch], Iterator[StepSampleIndices]]


def copy_in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader with ``in_order=False`` that gives its batches in order, and say so.

    Fillers, the last batch and the position of a checkpoint are matched with the batches by their order.
    """
    if collective.rank() == 0:
        _logger.warning(
            "DataLoader(in_order=False): prepared, it gives its batches in order all the same, or fillers "
            "would count as samples and a resumed run would leave out others"
        )
    return copy_loader(loader, in_order=True)


def with_index_sampler(loader: DataLoader[Any]) -> tuple[DataLoader[Any], PresetIndexSampler]:
    """Return a copy of the loader with an index sampler in place of its own, and that sampler."""
    index_sampler = PresetIndexSampler(outer_sampler(loader))
    return copy_loader(loader, batch_sampler=index_sampler), index_sampler


class PresetIndexSampler(Sampler[Any]):
    """Replaces a loader's sampler; its indices are set anew for every epoch.

    Args:
        replaced_sampler: the sampler that it replaces.
    """

    def __init__(self, replaced_sampler: Any) -> None:
        self.replaced_sampler = replaced_sampler
        self.upcoming: Iterable[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "replaced_sampler":
            raise AttributeError(name)
        return getattr(self.replaced_sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which takes no part in the epoch that this one is in."""
        return {"replaced_sampler": self.replaced_sampler, "upcoming": None}

    def __iter__(self) -> Iterator[Any]:
        # Torch asks twice for one epoch when it has workers.
        return iter(self.replaced_sampler if self.upcoming is None else self.upcoming)

    def __len__(self) -> int:
        return len(self.replaced_sampler)

    # For torchdata: its indices are set where the epoch begins, so torchdata need not step over any.
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position of the loader says where it is."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Leave the indices, which begin at the position of the loader."""


@dataclass(frozen=True)
class WorkerSeedingIndices:
    """Indices for a worker; unpickling them there seeds the worker for this fetch."""

    indices: Any
    seed: int

    def __reduce__(self) -> Any:
        return _begin_fetch, (self.indices, self.seed)


def _begin_fetch(indices: Any, seed: int) -> Any:
    seed_host(seed)
    return indices


def fetch_batches(
    base: DataLoader[Any],
    indexed: DataLoader[Any],
    index_sampler: PresetIndexSampler,
    epoch: Epoch,
    opener: StepsOpener | None = None,
) -> Iterator[FetchedBatch]:
    """Fetch the batches of map-style data, from the position where ``epoch`` begins.

    Args:
        base: the sharded loader.
        indexed: the same with ``index_sampler`` in place of its sampler.
        epoch: what to skip, and the order to resume; a new order state is recorded there.
        opener: opens the steps instead of ``open_steps``.
    """
    pending_steps: deque[StepSampleIndices] = deque()
    snapshots: list[RNGSnapshot] = []
    generators = loader_generators(base)
    outside = torch.default_generator.get_state()
    # Processes that read the same shard use the same random numbers, also without workers; and one that reads
    # ahead for all draws none of those that a checkpoint records.
    seeds_workers = base.num_workers > 0 and not epoch.keeps_torch_numbers
    seeds_here = not seeds_workers and (epoch.data_shard is not None or opener is not None)
    # Torch draws a seed when it starts workers: it does so here, but did not where the epoch began.
    started = base.persistent_workers and epoch.workers_started and indexed._iterator is None
    epoch.later_states = capture_generators(generators) if epoch.is_resumed or started else None
    single = find_batch_sampler(base) is None
    opener = opener or partial(open_steps, single=single)

    def issue_indices() -> Iterator[Any]:
        if started and not epoch.is_resumed:
            torch.default_generator.set_state(outside)
            restore_generators(generators, epoch.later_states or [])
            epoch.later_states = None
        steps = opener(outer_sampler(base), generators, epoch)
        if not seeds_workers and not seeds_here:
            yield from _record_steps(epoch, steps, pending_steps)
            return
        indices = _seed_indices(base, epoch, steps, pending_steps)
        yield from indices if seeds_workers else _seed_fetches(indices, snapshots)

    index_sampler.upcoming = issue_indices()
    restore_loader_state(indexed, epoch)
    # Torch draws a seed and starts workers: on the host, also where another default device is set. Workers
    # that are forked inside of the context keep it, and each of their calls of torch then costs more.
    device = torch.device("cpu") if base.generator is None else base.generator.device
    with nullcontext() if device == torch.empty(0).device else device:
        iterator = iter(indexed)
    if epoch.is_resumed:
        torch.default_generator.set_state(outside)
    for batch in _restore_after_fetch(iterator, snapshots) if seeds_here else iterator:
        step = pending_steps.popleft()
        fetched = describe_batch(batch, step.last, step)
        yield single_item(fetched) if single else fetched


def describe_batch(batch: Any, last: bool, step: StepSampleIndices) -> FetchedBatch:
    """Describe a batch of the samples of ``step``."""
    size = count_samples(step.indices)
    return FetchedBatch(batch, last, step.samples, step.remainder, step.real, size, step.indices)


def single_item(fetched: FetchedBatch) -> FetchedBatch:
    """Describe an item of a loader that does not collate: of its any number of rows all count, or none."""
    remainder, size = -1 if fetched.remainder else 0, ignorant_find_batch_size(fetched.batch) or 1
    return fetched._replace(remainder=remainder, real=0 if fetched.real == 0 else None, size=size)


def _record_steps(
    epoch: Epoch, steps: Iterator[StepSampleIndices], pending_steps: deque[StepSampleIndices]
) -> Iterator[Any]:
    """Yield the indices of each step, and record the step in ``pending_steps``."""
    for step in steps:
        pending_steps.append(step)
        if step.last:
            epoch.exhausted = True
        yield step.indices


def _seed_indices(
    base: DataLoader[Any],
    epoch: Epoch,
    steps: Iterator[StepSampleIndices],
    pending_steps: deque[StepSampleIndices],
) -> Iterator[Any]:
    """Yield the indices of each step with the seed of its fetch."""
    data_shard = epoch.data_shard
    own_index = (
        collective.rank() if data_shard is None else data_shard.index if data_shard.has_own_order else 0
    )
    part = 0 if find_shard(base) is not None else own_index
    for indices in _record_steps(epoch, steps, pending_steps):
        assert epoch.order_state is not None
        # The seed depends on the position in the order, not on what was skipped or the number of workers.
        seed = derive(epoch.order_state.worker_seed, "data", epoch.number, part, pending_steps[-1].offset)
        yield WorkerSeedingIndices(indices, seed)


def _seed_fetches(
    seeded_indices: Iterator[WorkerSeedingIndices], snapshots: list[RNGSnapshot]
) -> Iterator[Any]:
    """Seed each fetch in this process and yield its indices; store the earlier states in ``snapshots``."""
    for item in seeded_indices:
        snapshots.append(RNGSnapshot.capture())
        yield _begin_fetch(item.indices, item.seed)


def _restore_after_fetch(batches: Iterator[Any], snapshots: list[RNGSnapshot]) -> Iterator[Any]:
    """Yield the same batches; restore the global generators after each fetch."""
    while True:
        try:
            batch = next(batches, END)
        finally:
            if snapshots:
                snapshots.pop().restore()
        if batch is END:
            return
        yield batch


def agree_on_order(
    epoch: Epoch, shared: bool, is_uneven: bool, generators: list[Any], sampler: Any = None
) -> Broadcast:
    """Return the function that broadcasts the order of this process; None where nothing is to be sent.

    Where ranks may have more steps than others, one may be in a backward of the epoch before, for which those
    that begin this one must run theirs. So only the first epoch exchanges anything: the order of each other
    one follows from that of the epoch before, which all ranks have, and is set here.

    Args:
        epoch: the epoch that begins.
        shared: the ranks share out one order.
        is_uneven: they may have different numbers of steps.
        generators: see ``open_steps``.
        sampler: one of torch's whose order is drawn; None: the order is walked.
    """
    if epoch.data_shard is not None:
        broadcast: Broadcast = epoch.data_shard.broadcast
    else:
        broadcast = collective.broadcast_object if shared else None
    if broadcast is not None and is_uneven and epoch.previous_order is not None and not epoch.is_resumed:
        epoch.order_state = _next_order_state(epoch.previous_order, generators, sampler)
    return broadcast if epoch.order_state is None or epoch.is_resumed else None


def _next_order_state(previous: OrderState, generators: list[Any], sampler: Any) -> OrderState | None:
    """Return the state of the order after ``previous``, alike on all ranks; None: that is of another kind."""
    # Not of the number of the epoch: where all leave a loop at the last batch of one rank, only its own ends.
    number = derive(previous.worker_seed, "order")
    # The order before has advanced the generators alike.
    state = OrderState(number, generator_states=capture_generators(generators))
    if sampler is None:
        cpu, numpy_bits = torch.Generator().manual_seed(number), np.random.MT19937(number)
        numpy_state: Any = np.random.RandomState(numpy_bits).get_state()
        state.rng_snapshot = RNGSnapshot(cpu.get_state(), random.Random(number).getstate(), numpy_state)
        return None if previous.rng_snapshot is None else state
    needs_seed = type(sampler) is RandomSampler and sampler.generator is None
    state.seed = number if needs_seed else previous.seed
    return None if needs_seed and previous.seed is None else state


def find_shard(base: DataLoader[Any]) -> BatchSamplerShard | None:
    """Return the sampler that shards a loader's batches over several processes, or None."""
    for item in sampler_chain(base)[1:3]:
        if shards_batches(item):
            return item
    return None


def restore_loader_state(loader: Any, epoch: Epoch) -> bool:
    """Let torchdata restore the states of the data, if there are any; return whether there are."""
    state, epoch.restored_state = epoch.restored_state, None
    if state is not None:
        loader.load_state_dict(state)
    return state is not None


def read_loader_state(loader: Any) -> dict[str, Any] | None:
    """Return the state of a loader of torchdata that is being iterated; None of any other."""
    if hasattr(loader, "next_iter_state") and loader._iterator is not None:
        return loader._iterator.state_dict()
    return None


def open_steps(
    sampler: Any,
    generators: list[Any],
    epoch: Epoch,
    opened: Iterator[Any] | None = None,
    single: bool = False,
) -> Iterator[StepSampleIndices]:
    """Open this process's steps of an epoch; its order is drawn, or reproduced, at once.

    Args:
        sampler: a batch sampler, one of single indices, or a shard of either.
        generators: the generators of the loader and its samplers.
        epoch: see ``fetch_batches``.
        opened: the iterator over a sampler that is no known one, if it is open already.
        single: what the sampler gives is a sample, also if it has a length.
    """
    below = getattr(sampler, "batch_sampler", None)
    is_wrapped = isinstance(below, BatchSamplerShard) and not isinstance(sampler, BatchSamplerShard)
    holder: Any = below if is_wrapped else sampler
    if single and not (is_wrapped or is_known(sampler)):
        holder, is_wrapped = BatchSampler(holder, 1, drop_last=False), True
    shard = holder if shards_batches(holder) else None
    order_state = epoch.order_state if epoch.is_resumed else None
    slicer = slicer_for(holder) if has_known_seed(holder, order_state) else None
    if slicer is not None:
        sampler = inner_sampler(holder)
        is_uneven = slicer.lacks_step(len(sampler), slicer.size - 1)
        broadcast = agree_on_order(epoch, shard is not None, is_uneven, generators, sampler)
        _, steps = slice_steps(slicer, holder, generators, epoch, broadcast)
    else:
        items = opened or opened_by_loader(
            holder if shard is None else shard.batch_sampler, generators, order_state
        )
        steps = _walk_steps(items, holder, shard, generators, epoch)
    return (step._replace(indices=step.indices[0]) for step in steps) if is_wrapped else steps


def slice_steps(
    slicer: RankSampleOrderSlicer,
    holder: Any,
    generators: list[Any],
    epoch: Epoch,
    broadcast: Broadcast,
) -> tuple[torch.Tensor | range, Iterator[StepSampleIndices]]:
    """Return the order of an epoch, that one of torch's samplers gives, and its steps.

    Args:
        slicer: makes the steps.
        holder: the sampler, or one of batches over it.
        generators, epoch: see ``open_steps``.
        broadcast: see ``open_order``.
    """
    sampler, skip = inner_sampler(holder), epoch.skip
    order, epoch.order_state = open_order(
        sampler,
        generators,
        broadcast=broadcast,
        order_state=epoch.order_state,
        later_states=epoch.later_states,
        always=epoch.data_shard is not None,
    )
    offset = skip.count_samples(slicer.step_samples)
    if epoch.is_resumed and epoch.length not in (None, len(order)):
        warnings.warn(
            f"the data has {len(order)} samples, but the checkpoint was saved with {epoch.length}: the order "
            "of the samples is another one, so some are repeated and others are left out",
            stacklevel=2,
        )
    epoch.length, epoch.samples = len(order), min(offset, len(order))
    steps = slicer.steps(order, offset)
    is_short = slicer.lacks_step(len(order) - offset)
    return order, finish_at_end(steps, sampler, epoch.is_resumed and epoch.exhausted, is_short)


def _walk_steps(
    items: Any,
    holder: Any,
    shard: BatchSamplerShard | None,
    generators: list[Any],
    epoch: Epoch,
) -> Iterator[StepSampleIndices]:
    shared = isinstance(holder, BatchSamplerShard) and holder.num_processes > 1
    is_uneven = shared and not (holder.even_batches or holder.drop_last)
    broadcast = agree_on_order(epoch, shared, is_uneven, generators)
    batches, epoch.order_state = open_walk(
        items, generators, broadcast=broadcast, order_state=epoch.order_state
    )
    if shard is not None and shard.unverified is not None:
        batches, shard.unverified = check_first_batch(batches, shard.unverified), None
    group = 1 if shard is None or shard.split_batches else shard.num_processes
    skip = epoch.skip
    rest, epoch.samples, head = skip_items(
        batches, skip.batches * group, skip.samples, group, skip.further * group
    )
    if shard is not None:
        return mark_last(shard.steps(rest, epoch.samples, head))
    steps = single_steps(rest, epoch.samples, getattr(holder, "batch_size", None) or 1)
    if shared:
        if epoch.samples:
            holder.taken_steps.clear()  # they were skipped
        steps = _mark_fillers(steps, holder.taken_steps)
    return _mark_padding(mark_last(steps), holder)


def _mark_padding(steps: Iterator[StepSampleIndices], holder: Any) -> Iterator[StepSampleIndices]:
    """Mark the sample that a ``DistributedSampler`` repeats on some ranks, their last one."""
    sampler = inner_sampler(holder)
    if (
        not isinstance(sampler, DistributedSampler)
        or type(sampler).__iter__ is not DistributedSampler.__iter__
        or not (holder is sampler or is_torch_batch_sampler(holder))
        or sampler.drop_last
        or sampler.total_size == len(sampler.dataset)  # pyright: ignore[reportArgumentType]
        or (getattr(holder, "drop_last", False) and sampler.num_samples % holder.batch_size)
    ):
        return steps
    is_repeated = sampler.rank >= len(sampler.dataset) % sampler.num_replicas  # pyright: ignore[reportArgumentType]
    return (
        step._replace(remainder=step.remainder or -1, real=step.real - is_repeated) if step.last else step
        for step in steps
    )


def _mark_fillers(
    steps: Iterator[StepSampleIndices], taken_steps: deque[StepSampleIndices]
) -> Iterator[StepSampleIndices]:
    """Mark the fillers of steps that a program's own iteration takes from that of ``BatchSamplerShard``."""
    for step in steps:
        while taken_steps and taken_steps[0].indices != step.indices:
            taken_steps.popleft()
        if taken_steps:
            taken = taken_steps.popleft()
            step = step._replace(remainder=taken.remainder, real=taken.real)
        yield step
