"""The order of an epoch, a new one or that of a saved checkpoint, and the random states behind it.

A sampler or a stream that draws while the program draws too (dropout, augmentation) cannot be reproduced: its
numbers depend on what ran in between. So its first draws use the global generators, as in torch's loader, and
all later ones use isolated generators that are seeded from the first state.
"""

from __future__ import annotations

import base64
import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate.data import sample_order as orders
from accelerate.data.sample_order import END, SeedableRandomSampler
from accelerate.world import collective
from accelerate.world.rng import derive

T = TypeVar("T")

# The two functions that exchange its generator are public, and missing in its stubs.
_numpy: Any = np.random

# Broadcasts a value that one rank draws; None: this process draws for itself.
Broadcast = Callable[[Any], Any] | None


@dataclass(frozen=True)
class RNGSnapshot:
    """The states of torch's CPU generator, Python's and numpy's at one moment."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RNGSnapshot:
        """Capture the current states."""
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Restore the states."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def digest(self) -> int:
        """Return 63 bits that depend on all three states."""
        text = hashlib.blake2b(self.torch.numpy().tobytes(), digest_size=8)
        text.update(array("Q", self.python[1]).tobytes())
        text.update(self.numpy[1].tobytes() + repr(self.numpy[2:]).encode())
        return int.from_bytes(text.digest(), "big") >> 1

    def is_same(self, other: RNGSnapshot) -> bool:
        """Return True if both would draw the same numbers."""
        return self.digest() == other.digest()

    def state_dict(self) -> dict[str, Any]:
        """Return the states as JSON types."""
        return {
            "torch": to_plain(self.torch),
            "python": to_plain([self.python[0], np.array(self.python[1], np.uint64), self.python[2]]),
            "numpy": to_plain(list(self.numpy)),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RNGSnapshot:
        """Restore the object from ``state_dict``."""
        version, state_words, gauss = from_plain(state["python"])
        return cls(
            from_plain(state["torch"]),
            (version, tuple(state_words.tolist()), gauss),
            tuple(from_plain(state["numpy"])),
        )


def torch_digest() -> int:
    """Return 63 bits that depend on the state of torch's CPU generator; draw nothing."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1


class IsolatedRNG:
    """Runs calls under isolated random generators, whose states persist between calls.

    numpy's generator is swapped as a whole, since reading and writing its state takes thirty times as long.
    That loses the cached second number of ``np.random.randn``, in every run alike.

    Args:
        snapshot: the states that seed the isolated generators.
    """

    def __init__(self, snapshot: RNGSnapshot) -> None:
        seed = derive(snapshot.digest(), "order")
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.MT19937(seed)

    def __call__(self, call: Callable[[], T]) -> T:
        cpu = torch.default_generator
        outside = cpu.get_state(), random.getstate(), _numpy.get_bit_generator()
        cpu.set_state(self._torch)
        random.setstate(self._python)
        _numpy.set_bit_generator(self._numpy)
        try:
            return call()
        finally:
            self._torch, self._python = cpu.get_state(), random.getstate()
            cpu.set_state(outside[0])
            random.setstate(outside[1])
            _numpy.set_bit_generator(outside[2])


def begin_order(
    call: Callable[[], T], start: RNGSnapshot | None, broadcast: Callable[[Any], Any] | None
) -> tuple[T, RNGSnapshot, IsolatedRNG]:
    """Make the first draws of an order; return ``call()``, its initial states, and the runner of later draws.

    Args:
        call: makes the draws.
        start: the states to begin with; the global generators then stay as they are. None: begin with the
            global generators, which advance.
        broadcast: makes all ranks begin with the same states, those of rank 0 for example. The generators of
            a rank that has these states advance, those of other ranks stay as they are.
    """
    local_states = RNGSnapshot.capture()
    first = start or local_states
    if broadcast and collective.world_size() > 1:
        first = broadcast(first)
    uses_other_state = start is not None or not first.is_same(local_states)
    if uses_other_state:
        first.restore()
    try:
        value = call()
        isolated_rng = IsolatedRNG(RNGSnapshot.capture())
    finally:
        if uses_other_state:
            local_states.restore()
    return value, first, isolated_rng


def inner_sampler(sampler: Any) -> Any:
    """Return the sampler of single indices at the bottom of a batch sampler."""
    return sampler_chain(sampler)[-1]


def sampler_chain(sampler: Any) -> list[Any]:
    """Return a batch sampler, or a loader, and every sampler below it, down to that of single indices."""
    seen: list[Any] = [sampler]
    while True:
        below = getattr(seen[-1], "batch_sampler", None)
        if below is None:  # not whether it is true: an empty one is false
            below = getattr(seen[-1], "sampler", None)
        if below is None or any(below is item for item in seen):
            return seen
        seen.append(below)


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of single indices at the bottom of a loader, or None."""
    sampler = orders.find_batch_sampler(dataloader)
    return sampler_chain(sampler)[-1] if sampler is not None else getattr(dataloader, "sampler", None)


def outer_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that gives a loader its batches of indices, or single indices."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def fetches_by_index(loader: DataLoader[Any]) -> bool:
    """Return True if torch's own loop fetches the indices of a sampler."""
    return uses_torch_iterator(loader) and not isinstance(loader.dataset, IterableDataset)


def uses_torch_iterator(loader: DataLoader[Any]) -> bool:
    """Return True if a loader uses torch's own iterator, or torchdata's for given indices."""
    kind: Any = type(loader)
    if getattr(kind, "fetches_given_indices", False):
        return True
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def find_generators(*holders: Any) -> list[Any]:
    """Find the generators that are attributes of ``holders``: torch's, Python's and numpy's, each once."""
    generators: list[Any] = []
    for holder in holders:
        for value in list(getattr(holder, "__dict__", {}).values()):
            kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
            if isinstance(value, kinds) and not any(value is other for other in generators):
                generators.append(value)
    return generators


def loader_generators(loader: DataLoader[Any]) -> list[Any]:
    """Return the generators that a loader's order may depend on: its own, its samplers', its stream's."""
    holders = sampler_chain(loader)
    # A loader with its own iteration may draw from its data, too.
    stream: Any = loader.dataset
    if isinstance(stream, IterableDataset) or not uses_torch_iterator(loader):
        while stream is not None and not any(stream is holder for holder in holders):
            holders.append(stream)
            stream = getattr(stream, "dataset", None)
    return find_generators(*holders)


def capture_generators(generators: Iterable[Any]) -> list[Any]:
    """Capture the state of each generator, as JSON types."""
    return [to_plain(_state(generator)) for generator in generators]


def restore_generators(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore the states of ``capture_generators``.

    Raises:
        ValueError: the number of generators differs from the saved one.
    """
    if len(generators) != len(states):
        raise ValueError(f"the loader has {len(generators)} random generators, but {len(states)} were saved")
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, from_plain(state))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, state_words, gauss = generator.getstate()
        return [version, np.array(state_words, np.uint64), gauss]
    if isinstance(generator, np.random.RandomState):
        return list(generator.get_state())
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1].tolist()), state[2]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(tuple(state))
    else:
        generator.bit_generator.state = state


def to_plain(value: Any) -> Any:
    """Convert ``value`` to JSON types: arrays become base64, and long integers text."""
    if isinstance(value, torch.Tensor):
        return {"dtype": "torch", "base64": _encode_base64(value.numpy())}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "base64": _encode_base64(value)}
    if isinstance(value, dict):
        return {"dict": {key: to_plain(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return {"int": str(value)} if isinstance(value, int) and abs(value) >= 2**53 else value


def from_plain(value: Any) -> Any:
    """Restore the value of ``to_plain``; tuples have become lists."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "int" in value:
        return int(value["int"])
    if "dict" in value:
        return {key: from_plain(item) for key, item in value["dict"].items()}
    data = base64.b64decode(value["base64"])
    if value["dtype"] == "torch":
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return np.frombuffer(data, dtype=value["dtype"]).copy()


def _encode_base64(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


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
        state = value.state_dict() if hasattr(value, "state_dict") else value
        digest = hashlib.blake2b(repr(state).encode(), digest_size=8).digest()
        # Mostly the ranks of a shard have the same states, of some KiB: then none are sent.
        sources = collective.combine_objects((self.index, digest), _find_sources, "broadcast_object")
        if not sources:
            return value
        sent = value if collective.rank() == sources[self.index] else None
        return collective.all_gather_object(sent, "broadcast_object")[sources[self.index]]


def _find_sources(digests: list[tuple[int, bytes]]) -> dict[int, int]:
    """Return the first rank of each data shard; none where all ranks of a shard have the same values."""
    indices = [index for index, _ in digests]
    are_same = len(set(digests)) == len(set(indices))
    return {} if are_same else {index: indices.index(index) for index in indices}


class LoaderDraws(NamedTuple):
    """The draws of a loader's own iteration, among which its sampler draws the order.

    Attributes:
        workers: of the loader; with some it opens its sampler twice.
        generator: the index of its generator among those of the order; None: the global one.
        is_late: the sampler is opened for the first batch, after the loader's draw for workers: a shard of
            several processes does so.
    """

    workers: int
    generator: int | None
    is_late: bool = False


@dataclass
class OrderState:
    """The state from which an epoch's order was drawn: enough to reproduce it.

    Attributes:
        worker_seed: the base of the seeds of fetches, whether this run needs them or only one that resumes.
        seed: seed of the order of one of torch's samplers, or None.
        rng_snapshot: the global generators when a sampler or stream of another kind began.
        generator_states: states of the generators that the loader and its samplers hold, as JSON types.
        loader: the draws of the loader's own iteration, where it drew the order; None where the sampler alone
            was iterated.
    """

    worker_seed: int
    seed: int | None = None
    rng_snapshot: RNGSnapshot | None = None
    generator_states: list[Any] = field(default_factory=list)
    loader: LoaderDraws | None = None

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
        loader = None if state["loader"] is None else LoaderDraws(*state["loader"])
        return cls(worker_seed, seed, rng_snapshot, state["own"], loader)


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
    """Iterate a sampler of any kind, or a loader; its first sample is drawn at once. See ``open_order``.

    Args:
        isolate: it draws in this process, so use isolated random numbers after its first item.
    """
    generator_states = capture_generators(generators) if order_state is None else order_state.generator_states
    if broadcast and generators and collective.world_size() > 1:
        generator_states = broadcast(generator_states)
    restore_generators(generators, generator_states)
    # Of torch's batch sampler the first sample is drawn, not the first batch: a sampler that draws for each
    # sample gives the same order to batches of any size.
    batches = items if orders.is_torch_batch_sampler(items) else None

    def open_iterator() -> tuple[Iterator[Any], Any]:
        iterator = iter(items if batches is None else batches.sampler)
        return iterator, next(iterator, END)

    saved_snapshot = None if order_state is None else order_state.rng_snapshot
    (iterator, first), rng_snapshot, isolated_rng = begin_order(open_iterator, saved_snapshot, broadcast)
    later_rng = isolated_rng if isolate else None
    if batches is None:
        walk = _iterate_items(first, iterator, later_rng)
    else:
        walk = _iterate_batches(batches, first, iterator, later_rng)
    return walk, OrderState(
        worker_seed=rng_snapshot.digest(),
        rng_snapshot=rng_snapshot,
        generator_states=generator_states,
        loader=None if order_state is None else order_state.loader,
    )


def _iterate_items(first: Any, samples: Iterator[Any], isolated_rng: IsolatedRNG | None) -> Iterator[Any]:
    """Yield the first item and the others."""
    item, fetch = first, partial(next, samples, END)
    while item is not END:
        yield item
        item = fetch() if isolated_rng is None else isolated_rng(fetch)


def _iterate_batches(
    sampler: BatchSampler, first: Any, samples: Iterator[Any], isolated_rng: IsolatedRNG | None
) -> Iterator[list[Any]]:
    """Yield what a batch sampler of torch yields, from the first sample and the others."""
    batch = [] if first is END else [first]
    while True:
        missing = sampler.batch_size - len(batch)
        fetch = partial(_take, samples, missing)
        batch += fetch() if isolated_rng is None else isolated_rng(fetch)
        if len(batch) == sampler.batch_size or (batch and not sampler.drop_last):
            yield batch
        if len(batch) < sampler.batch_size:
            return
        batch = []


def _take(items: Iterator[Any], count: int) -> list[Any]:
    return list(islice(items, count))


@dataclass(frozen=True)
class LoaderOpenedSampler:
    """A sampler that is opened as torch's loader opens it: with its draw for workers, twice if it has some.

    Attributes:
        sampler: of batches or of single indices.
        workers: of the loader.
        generator: of the loader.
        is_late: see ``LoaderDraws``.
    """

    sampler: Any
    workers: int
    generator: torch.Generator | None
    is_late: bool

    def __iter__(self) -> Iterator[Any]:
        iterator = None if self.is_late else iter(self.sampler)
        host = "cpu" if self.generator is None else self.generator.device
        torch.empty((), dtype=torch.int64, device=host).random_(generator=self.generator)
        return iter(self.sampler) if self.workers or iterator is None else iterator


def opened_by_loader(sampler: Any, generators: Sequence[Any], order_state: OrderState | None) -> Any:
    """Return a sampler that gives an order again which the loader's own iteration drew; else as it is."""
    if order_state is None or order_state.loader is None:
        return sampler
    workers, index, is_late = order_state.loader
    return LoaderOpenedSampler(sampler, workers, None if index is None else generators[index], is_late)


def has_known_seed(sampler: Any, order_state: OrderState | None) -> bool:
    """Return False if an order has to be reproduced whose seed the loader's own iteration drew."""
    drawn_inside = order_state is not None and order_state.loader is not None
    return not (drawn_inside and type(inner_sampler(sampler)) is RandomSampler)


def finish_at_end(
    steps: Iterator[orders.StepSampleIndices], sampler: Any, exhausted: bool, is_short: bool = False
) -> Iterator[orders.StepSampleIndices]:
    """Yield the same steps, and finish the sampler with the last one.

    Args:
        exhausted: its generators have the states after its end already.
        is_short: other processes have a step more. A loop that all leave before it does not end the order.
    """
    ended = False
    for step in steps:
        if step.last and not is_short:
            ended = True
            orders.finish(sampler, exhausted)
        yield step
    if not ended:
        orders.finish(sampler, exhausted)
