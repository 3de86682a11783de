"""The beginning of an epoch's order: new, or again as it was when a checkpoint was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate.data import order as orders
from accelerate.data.order import SeedableRandomSampler
from accelerate.data.states import Hosts, pack, put_back, states_of, torch_digest, unpack
from accelerate.world import collective

# How this process takes over what another one draws; None: it goes its own way.
Agree = Callable[[Any], Any] | None


@dataclass(frozen=True)
class Readers:
    """Which part of the data this process reads, where several processes read the same.

    Attributes:
        parts, index: into how many parts the data are shared out, and which one is read here.
        apart: each part has an order of its own; otherwise all are cut out of that of rank 0.
    """

    parts: int
    index: int
    apart: bool = False

    def agree(self, value: Any) -> Any:
        """The value of rank 0, or of the first rank that reads the same part. All ranks must call it."""
        if not self.apart:
            return collective.agree(value)
        every = collective.all_objects((self.index, value), "agree")
        return next(found for index, found in every if index == self.index)


@dataclass
class Start:
    """What an epoch's order was made of: enough to make it again.

    Attributes:
        seed: of the order of one of torch's samplers, or None.
        data: the random numbers of workers are a function of it.
        hosts: the program's generators when a sampler or stream of another kind began.
        own: states of the generators that the loader and its samplers hold, as plain values.
    """

    seed: int | None = None
    data: int | None = None
    hosts: Hosts | None = None
    own: list[Any] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        hosts = None if self.hosts is None else self.hosts.state_dict()
        return {"seed": pack(self.seed), "data": pack(self.data), "hosts": hosts, "own": self.own}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Start:
        """From ``state_dict``."""
        hosts = None if state["hosts"] is None else Hosts.of(state["hosts"])
        return cls(unpack(state["seed"]), unpack(state["data"]), hosts, state["own"])


def open_order(
    sampler: Any,
    generators: Sequence[Any] = (),
    *,
    agree: Agree,
    start: Start | None = None,
    now: list[Any] | None = None,
    data: bool = False,
    always: bool = False,
) -> tuple[torch.Tensor | range, Start]:
    """The order of one of torch's samplers.

    Args:
        sampler: of a kind that ``order.is_known``.
        generators: those that the loader and its samplers hold.
        agree: all ranks are here and take over this order, if it is random.
        start: make the order that began so; None: the next one.
        now: states that the generators have after it; None: what making it leaves them in.
        data: also find a seed for workers.
        always: the ranks agree on that seed too.
    """
    own = states_of(generators)
    begun = start or Start(data=torch_digest() if data else None, seed=orders.seed_for(sampler), own=own)
    if agree and collective.size() > 1 and (always or orders.is_drawn(sampler)):
        begun = agree(begun)
    if begun.own is not own:
        put_back(generators, begun.own)
    if type(sampler) is SeedableRandomSampler and begun.seed is not None:
        sampler.initial_seed = begun.seed
    order = orders.draw(sampler, begun.seed)
    if now is not None:
        put_back(generators, now)
    return order, begun


def open_walk(
    items: Any,
    generators: Sequence[Any] = (),
    *,
    agree: Agree,
    start: Start | None = None,
    aside: bool = True,
) -> tuple[Iterator[Any], Start]:
    """What a sampler of any kind, or a loader, yields; the arguments are those of ``open_order``.

    Args:
        aside: it draws in this process, so it gets random numbers of its own after its first item.
    """
    own = states_of(generators) if start is None else start.own
    if agree and generators and collective.size() > 1:
        own = agree(own)
    put_back(generators, own)
    iterator, hosts = orders.walk(items, None if start is None else start.hosts, agree, aside)
    return iterator, Start(data=hosts.digest(), hosts=hosts, own=own)


def ending(steps: Iterator[orders.Step], sampler: Any, exhausted: bool) -> Iterator[orders.Step]:
    """The same steps; with the last one the sampler comes to its end.

    Args:
        exhausted: its generators are those of after the end already.
    """
    ended = False
    for step in steps:
        if step.last:
            ended = True
            orders.finish(sampler, exhausted)
        yield step
    if not ended:
        orders.finish(sampler, exhausted)
