"""A model as a tree of module sizes, split into the units that a placement assigns to devices. No torch.

What is placed is a *unit*: a block of a class that is not split, a module without submodules, or a tensor
that a module with submodules holds itself. Units whose weights are tied form a *group*, which has one home.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from accelerate.core.errors import SettingError


class WeightSize(NamedTuple):
    """The size of a parameter or buffer.

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


class ModuleNode(NamedTuple):
    """A module: its path from the root (``""``), its class name, its own weights, its child modules."""

    name: str
    kind: str
    weights: tuple[WeightSize, ...]
    children: tuple[ModuleNode, ...]

    def all_weights(self) -> Iterator[WeightSize]:
        """Return the weights of the module and of all modules below it."""
        for part in self.walk():
            yield from part.weights

    def walk(self) -> Iterator[ModuleNode]:
        """Return the module and all modules below it, in order."""
        waiting: list[ModuleNode] = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting.extend(reversed(part.children))


class PlacementUnit(NamedTuple):
    """A module or tensor that is never split over devices. ``cache``: see ``PlacementRules``."""

    name: str
    weights: tuple[WeightSize, ...]
    cache: int

    @property
    def size(self) -> int:
        """The bytes of its distinct weights."""
        return _distinct_bytes(self.weights)


class TiedUnitGroup(NamedTuple):
    """Units that share weights, or one unit alone; all sizes in bytes.

    Attributes:
        units: in the order of the model.
        size: of the distinct weights, buffers among them.
        buffers: of the buffers.
        block: of the largest unit: what must fit at once where it is computed.
        cache: of all units.
    """

    units: tuple[PlacementUnit, ...]
    size: int
    buffers: int
    block: int
    cache: int


def _distinct_bytes(weights: Sequence[WeightSize]) -> int:
    if len(weights) == 1:
        return weights[0].size
    return sum({weight.tie: weight.size for weight in weights}.values())


def split_into_units(
    part: ModuleNode, no_split: Iterable[str] = (), cache: Mapping[str, int] | None = None
) -> list[PlacementUnit]:
    """Return the placement units of the module ``part``, in order.

    Args:
        part: the module.
        no_split: names of classes that are not divided.
        cache: name of a module -> bytes; what belongs to a divided module goes with its first unit.

    Raises:
        SettingError: ``cache`` names a module that is not there.
    """
    closed, cache_sizes = frozenset(no_split), cache or {}
    placement_units = _collect_units(part, closed, cache_sizes)
    if sum(unit.cache for unit in placement_units) != sum(cache_sizes.values()):
        names = cache_sizes.keys() - {each.name for each in part.walk()}
        raise SettingError(f"a cache is asked for modules that are not there: {', '.join(sorted(names))}")
    return placement_units


def _collect_units(part: ModuleNode, closed: frozenset[str], cache: Mapping[str, int]) -> list[PlacementUnit]:
    if not part.children or part.kind in closed:
        below = sum(cache.get(each.name, 0) for each in part.walk()) if cache else 0
        return [PlacementUnit(part.name, tuple(part.all_weights()) if part.children else part.weights, below)]
    collected = [PlacementUnit(weight.name, (weight,), 0) for weight in part.weights if not weight.buffer]
    for child in part.children:
        collected += _collect_units(child, closed, cache)
    collected += [PlacementUnit(weight.name, (weight,), 0) for weight in part.weights if weight.buffer]
    if part.name in cache:
        collected[0] = collected[0]._replace(cache=collected[0].cache + cache[part.name])
    return collected


def group_tied_units(units: Sequence[PlacementUnit]) -> list[TiedUnitGroup]:
    """Group units that share weights, in the order of the first unit of each group."""
    lead = list(range(len(units)))  # unit -> an earlier unit of its group, or itself

    def first(index: int) -> int:
        while lead[index] != index:
            lead[index] = index = lead[lead[index]]
        return index

    holder: dict[Hashable, int] = {}
    for index, unit in enumerate(units):
        for weight in unit.weights:
            owner = holder.setdefault(weight.tie, index)
            if owner != index:
                root, other_root = first(index), first(owner)
                lead[max(root, other_root)] = min(root, other_root)
    members: dict[int, list[PlacementUnit]] = {}
    for index, unit in enumerate(units):
        members.setdefault(first(index), []).append(unit)
    return [_make_group(tuple(each)) for each in members.values()]


def _make_group(members: tuple[PlacementUnit, ...]) -> TiedUnitGroup:
    alone = len(members) == 1
    weights = members[0].weights if alone else [weight for unit in members for weight in unit.weights]
    size = _distinct_bytes(weights)
    return TiedUnitGroup(
        members,
        size,
        sum([weight.size for weight in weights if weight.buffer]),  # buffers are never tied
        size if alone else max(unit.size for unit in members),
        members[0].cache if alone else sum(unit.cache for unit in members),
    )
