"""One order for all processes: each draws from its own random stream, so the order must be agreed.

The seed of an epoch's order is drawn where and as torch's ``RandomSampler`` draws it, and rank 0's is taken.
So the order on N processes is the order that rank 0 alone would see, whatever the other ranks' seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate.world import collective


def shared_order(sampler: Iterable[Any], num_processes: int) -> Iterator[Any]:
    """Iterates ``sampler`` in an order that all processes share; agreed on at the first item."""
    if num_processes == 1 or collective.size() == 1 or not _is_random(sampler):
        yield from sampler
        return
    inner = inner_sampler(sampler)
    generator = getattr(inner, "generator", None)
    if hasattr(inner, "initial_seed"):  # its order is a function of this seed and the epoch
        inner.initial_seed = collective.agree(inner.initial_seed)
        yield from sampler
    elif isinstance(generator, torch.Generator):
        generator.set_state(collective.broadcast(generator.get_state()))
        yield from sampler
    elif type(inner) is RandomSampler and type(sampler) in (BatchSampler, RandomSampler):
        yield from _with_generator(sampler, torch.Generator().manual_seed(_agreed_seed()))
    else:
        yield from _under_seed(sampler, _agreed_seed())


def inner_sampler(sampler: Any) -> Any:
    """The sampler of single indices at the bottom of a batch sampler."""
    seen: list[Any] = [sampler]
    while True:
        below = getattr(seen[-1], "batch_sampler", None) or getattr(seen[-1], "sampler", None)
        if below is None or any(below is item for item in seen):
            return seen[-1]
        seen.append(below)


def _is_random(sampler: Any) -> bool:
    return type(inner_sampler(sampler)) is not SequentialSampler


def _agreed_seed() -> int:
    """Drawn on every rank, so that all random streams advance alike; rank 0's draw counts."""
    return collective.agree(int(torch.empty((), dtype=torch.int64).random_().item()))


def _with_generator(sampler: Any, generator: torch.Generator) -> Iterator[Any]:
    """``sampler``, or its inner one, copied with a generator of its own; the user's objects stay."""
    inner = copy.copy(inner_sampler(sampler))
    inner.generator = generator
    if isinstance(sampler, RandomSampler):
        return iter(inner)
    outer = copy.copy(sampler)
    outer.sampler = inner
    return iter(outer)


def _under_seed(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterates a sampler of any kind while torch's global generator is a private, seeded one."""
    state = [torch.Generator().manual_seed(seed).get_state()]
    with _swapped(state):
        iterator = iter(sampler)
    while True:
        with _swapped(state):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


@contextmanager
def _swapped(state: list[torch.Tensor]) -> Generator[None]:
    outside = torch.get_rng_state()
    torch.set_rng_state(state[0])
    try:
        yield
    finally:
        state[0] = torch.get_rng_state()
        torch.set_rng_state(outside)
