"""The order of an epoch: a new one, or the one of a saved checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import RandomSampler

from accelerate.data import sample_order as orders
from accelerate.data.data_order_rng import (
    RNGSnapshot,
    capture_generators,
    from_plain,
    restore_generators,
    to_plain,
    torch_digest,
)
from accelerate.data.sample_order import SeedableRandomSampler
from accelerate.world import collective
from accelerate.world.rng import derive

# Broadcasts a value that one rank draws; None: this process draws for itself.
Broadcast = Callable[[Any], Any] | None


@dataclass(frozen=True)
class DataShard:
    """The data shard that this process reads, where several processes read the same one.

    Attributes:
        num_shards, index: number of data shards, and the index of this process's.
        has_own_order: each shard has an order of its own; otherwise all are sliced from that of rank 0.
    """

    num_shards: int
    index: int
    has_own_order: bool = False

    def broadcast(self, value: Any) -> Any:
        """Broadcast the value of rank 0, or of the first rank that reads the same shard. Collective."""
        if not self.has_own_order:
            return collective.broadcast_object(value)
        rank_values = collective.all_gather_object((self.index, value), "broadcast_object")
        return next(other for index, other in rank_values if index == self.index)


@dataclass
class OrderState:
    """The state from which an epoch's order was drawn: enough to reproduce it.

    Attributes:
        seed: seed of the order of one of torch's samplers, or None.
        worker_seed: the base of the seeds of fetches, whether this run needs them or only one that resumes.
        rng_snapshot: the global generators when a sampler or stream of another kind began.
        generator_states: states of the generators that the loader and its samplers hold, as JSON types.
        loader: where the loader's own iteration drew the order, the number of its workers, and the index of
            its generator among those; None where the sampler alone was iterated.
    """

    seed: int | None = None
    worker_seed: int | None = None
    rng_snapshot: RNGSnapshot | None = None
    generator_states: list[Any] = field(default_factory=list)
    loader: tuple[int, int | None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        rng_snapshot = None if self.rng_snapshot is None else self.rng_snapshot.state_dict()
        return {
            "seed": to_plain(self.seed),
            "data": to_plain(self.worker_seed),
            "hosts": rng_snapshot,
            "own": self.generator_states,
            "loader": None if self.loader is None else list(self.loader),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> OrderState:
        """Restore the object from ``state_dict``."""
        rng_snapshot = None if state["hosts"] is None else RNGSnapshot.from_state_dict(state["hosts"])
        seed, worker_seed = from_plain(state["seed"]), from_plain(state["data"])
        if worker_seed is None:  # of an older checkpoint, which recorded it for loaders with workers alone
            worker_seed = derive(seed or 0, "data")
        loader = state.get("loader")
        return cls(seed, worker_seed, rng_snapshot, state["own"], None if loader is None else tuple(loader))


def open_order(
    sampler: Any,
    generators: Sequence[Any] = (),
    *,
    broadcast: Broadcast,
    order_state: OrderState | None = None,
    later_states: list[Any] | None = None,
    always: bool = False,
) -> tuple[torch.Tensor | range, OrderState]:
    """Draw the order of one of torch's samplers.

    Args:
        sampler: one for which ``sample_order.is_known`` is true.
        generators: those that the loader and its samplers hold.
        broadcast: makes all ranks use the same random order; then the call is collective.
        order_state: reproduce this order; None draws the next one.
        later_states: generator states to restore after it; None leaves them as they are.
        always: broadcast also if only the seed of fetches needs it.
    """
    generator_states = capture_generators(generators)
    current_state = order_state or OrderState(
        worker_seed=torch_digest(),
        seed=orders.draw_seed(sampler),
        generator_states=generator_states,
    )
    if broadcast and collective.world_size() > 1 and (always or orders.is_random(sampler)):
        current_state = broadcast(current_state)
    if current_state.generator_states is not generator_states:
        restore_generators(generators, current_state.generator_states)
    if type(sampler) is SeedableRandomSampler and current_state.seed is not None:
        sampler.initial_seed = current_state.seed
    order = orders.draw(sampler, current_state.seed)
    if later_states is not None:
        restore_generators(generators, later_states)
    return order, current_state


def open_walk(
    items: Any,
    generators: Sequence[Any] = (),
    *,
    broadcast: Broadcast,
    order_state: OrderState | None = None,
    isolate: bool = True,
) -> tuple[Iterator[Any], OrderState]:
    """Iterate a sampler of any kind, or a loader; the arguments are those of ``open_order``.

    Args:
        isolate: it draws in this process, so use isolated random numbers after its first item.
    """
    generator_states = capture_generators(generators) if order_state is None else order_state.generator_states
    if broadcast and generators and collective.world_size() > 1:
        generator_states = broadcast(generator_states)
    restore_generators(generators, generator_states)
    iterator, rng_snapshot = orders.walk_sampler(
        items, None if order_state is None else order_state.rng_snapshot, broadcast, isolate
    )
    return iterator, OrderState(
        worker_seed=rng_snapshot.digest(),
        rng_snapshot=rng_snapshot,
        generator_states=generator_states,
        loader=None if order_state is None else order_state.loader,
    )


@dataclass(frozen=True)
class LoaderOpenedSampler:
    """A sampler that is opened as torch's loader opens it: with its draw for workers, twice if it has some.

    Attributes:
        sampler: of batches or of single indices.
        workers: of the loader.
        generator: of the loader.
    """

    sampler: Any
    workers: int
    generator: torch.Generator | None

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.sampler)
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return iter(self.sampler) if self.workers else iterator


def opened_by_loader(sampler: Any, generators: Sequence[Any], order_state: OrderState | None) -> Any:
    """Return a sampler that gives an order again which the loader's own iteration drew; else as it is."""
    if order_state is None or order_state.loader is None:
        return sampler
    workers, index = order_state.loader
    return LoaderOpenedSampler(sampler, workers, None if index is None else generators[index])


def has_known_seed(sampler: Any, order_state: OrderState | None) -> bool:
    """Return False if an order has to be reproduced whose seed the loader's own iteration drew."""
    drawn_inside = order_state is not None and order_state.loader is not None
    return not (drawn_inside and type(orders.inner_sampler(sampler)) is RandomSampler)


def finish_at_end(
    steps: Iterator[orders.StepSampleIndices], sampler: Any, exhausted: bool
) -> Iterator[orders.StepSampleIndices]:
    """Yield the same steps, and finish the sampler with the last one.

    Args:
        exhausted: its generators have the states after its end already.
    """
    ended = False
    for step in steps:
        if step.last:
            ended = True
            orders.finish(sampler, exhausted)
        yield step
    if not ended:
        orders.finish(sampler, exhausted)
