"""A model as a tree of sizes, and what it is divided into to be placed. No torch.

What is placed is a *unit*: a block of a class that is not split, a module without submodules, or a tensor
that a module with submodules holds itself. Units whose weights are tied form a *group*, which has one home.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from accelerate.core.errors import SettingError


class Weight(NamedTuple):
    """A parameter or buffer.

    Attributes:
        name: from the root of the model.
        size: in bytes.
        tie: equal for weights that are one tensor.
        buffer: whether it is a buffer.
    """

    name: str
    size: int
    tie: Hashable
    buffer: bool


class Part(NamedTuple):
    """A module: its path from the root (``""``), the name of its class, what it holds, what is below it."""

    name: str
    kind: str
    weights: tuple[Weight, ...]
    parts: tuple[Part, ...]

    def all(self) -> Iterator[Weight]:
        """The weights of the module and of everything below it."""
        for part in self.walk():
            yield from part.weights

    def walk(self) -> Iterator[Part]:
        """The module and everything below it, in order."""
        waiting: list[Part] = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting.extend(reversed(part.parts))


class Unit(NamedTuple):
    """What is never divided. ``cache``: see ``Rules``."""

    name: str
    weights: tuple[Weight, ...]
    cache: int

    @property
    def size(self) -> int:
        """Bytes of its distinct weights."""
        return _distinct(self.weights)


class Group(NamedTuple):
    """Units that share weights, or one unit alone; all sizes in bytes.

    Attributes:
        units: in the order of the model.
        size: of the distinct weights, buffers among them.
        buffers: of the buffers.
        block: of the largest unit: what must fit at once where it is computed.
        cache: of all units.
    """

    units: tuple[Unit, ...]
    size: int
    buffers: int
    block: int
    cache: int


def _distinct(weights: Sequence[Weight]) -> int:
    if len(weights) == 1:
        return weights[0].size
    return sum({weight.tie: weight.size for weight in weights}.values())


def units(part: Part, no_split: Iterable[str] = (), cache: Mapping[str, int] | None = None) -> list[Unit]:
    """What the module ``part`` is divided into, in order.

    Args:
        part: the module.
        no_split: names of classes that are not divided.
        cache: name of a module -> bytes; what belongs to a divided module goes with its first unit.

    Raises:
        SettingError: ``cache`` names a module that is not there.
    """
    closed, own = frozenset(no_split), cache or {}
    found = _units(part, closed, own)
    if sum(unit.cache for unit in found) != sum(own.values()):
        names = own.keys() - {each.name for each in part.walk()}
        raise SettingError(f"a cache is asked for modules that are not there: {', '.join(sorted(names))}")
    return found


def _units(part: Part, closed: frozenset[str], cache: Mapping[str, int]) -> list[Unit]:
    if not part.parts or part.kind in closed:
        below = sum(cache.get(each.name, 0) for each in part.walk()) if cache else 0
        return [Unit(part.name, tuple(part.all()) if part.parts else part.weights, below)]
    found = [Unit(weight.name, (weight,), 0) for weight in part.weights if not weight.buffer]
    for child in part.parts:
        found += _units(child, closed, cache)
    found += [Unit(weight.name, (weight,), 0) for weight in part.weights if weight.buffer]
    if part.name in cache:
        found[0] = found[0]._replace(cache=found[0].cache + cache[part.name])
    return found


def groups(found: Sequence[Unit]) -> list[Group]:
    """Units joined by ties, in the order of the first of each."""
    lead = list(range(len(found)))  # unit -> an earlier unit of its group, or itself

    def first(index: int) -> int:
        while lead[index] != index:
            lead[index] = index = lead[lead[index]]
        return index

    holder: dict[Hashable, int] = {}
    for index, unit in enumerate(found):
        for weight in unit.weights:
            known = holder.setdefault(weight.tie, index)
            if known != index:
                one, other = first(index), first(known)
                lead[max(one, other)] = min(one, other)
    members: dict[int, list[Unit]] = {}
    for index, unit in enumerate(found):
        members.setdefault(first(index), []).append(unit)
    return [_group(tuple(each)) for each in members.values()]


def _group(members: tuple[Unit, ...]) -> Group:
    alone = len(members) == 1
    weights = members[0].weights if alone else [weight for unit in members for weight in unit.weights]
    size = _distinct(weights)
    return Group(
        members,
        size,
        sum([weight.size for weight in weights if weight.buffer]),  # buffers are never tied
        size if alone else max(unit.size for unit in members),
        members[0].cache if alone else sum(unit.cache for unit in members),
    )
