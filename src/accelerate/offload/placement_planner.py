"""The placement planner: a pure function from sizes and budgets to a placement. No torch, no side effects.

Groups of units (``size_tree.py``) are taken in the order of the model, and devices in the order of the
budgets: accelerators, then the CPU, then the disk.

Invariants of every plan that is returned:
- every tensor has exactly one home, and tied ones the same;
- no device is asked for more than its budget: weights, buffers, caches and the reserve together;
- when something is stored on the CPU or the disk beside accelerators, the one that computes it (the
  executor) has room for the largest of these blocks beside all that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from accelerate.core.errors import SettingError, nearest
from accelerate.core.units import parse_bytes
from accelerate.offload.placement import CPU, DISK, Device, ModelPlacement, format_size
from accelerate.offload.placement_search import CandidatePlacement, PlacementRules, PlacementSearch
from accelerate.offload.size_tree import ModuleNode, TiedUnitGroup, group_tied_units, split_into_units

__all__ = ["PlacementRules", "merge_names", "plan_placement", "read_budgets"]


def plan_placement(
    tree: ModuleNode, budgets: Mapping[Device, int | float | str], rules: PlacementRules | None = None
) -> ModelPlacement:
    """Plan a device for every unit of a model.

    Three plans are tried. The first keeps room for the largest block on the first accelerator, as long as
    more is to come; it is taken if the accelerators hold the model, because the room serves activations.
    The second uses the accelerators to their last byte, if that holds the model. The third stores the rest
    on the CPU, and on the disk what the CPU cannot hold.

    Args:
        tree: the sizes, from ``measure.tree``.
        budgets: device -> bytes, or a text such as ``"10GB"``. Accelerators (numbers, or ``"cuda:0"``) are
            filled in this order. A CPU that is not named is not used; the disk always is, without end
            unless it is named. A device with 0 bytes is not used.
        rules: see there.

    Raises:
        SettingError: a budget is no size; all are 0; a block that must not be split is larger than every
            accelerator; the devices together are too small.
    """
    rules = rules or PlacementRules()
    units = split_into_units(tree, rules.no_split, rules.cache)
    search = PlacementSearch(group_tied_units(units), _checked_budgets(budgets, rules), rules)
    trial = search.find_best()
    homes = _unit_homes(search, trial)
    ordered = {unit.name: homes[unit.name] for unit in units}
    return ModelPlacement(
        ordered,
        dict(merge_names(tree, ordered)),
        _unit_sizes(search.groups, ordered),
        search.device_budgets(trial),
        trial.executor if trial.offloaded else None,
        tuple(_tied_names(search.groups)),
        search.reasons(trial),
        (*_unknown_class_notes(tree, rules.no_split), *search.list_notes(trial)),
    )


def _checked_budgets(
    budgets: Mapping[Device, int | float | str], rules: PlacementRules
) -> dict[Device, int | float]:
    """Return the budgets, with the disk, checked against the reserve."""
    limits = read_budgets(budgets)
    if not any(limits.values()):
        raise SettingError(
            "no device may hold anything",
            why="every budget is 0" if limits else "no budget was given",
            fix="give sizes like max_memory={0: '10GB', 'cpu': '30GB'}",
        )
    limits.setdefault(DISK, math.inf)
    if strange := [str(device) for device in rules.reserve if device not in limits]:
        raise SettingError(f"a reserve is asked of {', '.join(strange)}, which has no budget")
    used = [d for d, limit in limits.items() if limit > 0 and d not in (CPU, DISK)] or [CPU]
    if all(limits.get(d, 0) <= rules.reserve.get(d, 0) > 0 for d in used):
        device, need = used[0], rules.reserve[used[0]]
        raise SettingError(
            f"device {device!r} may hold {format_size(limits.get(device, 0))}, "
            f"and {format_size(need)} of it are reserved",
            why="nothing is left for weights",
            fix="raise its budget, or ask for a smaller batch or a shorter length",
        )
    return limits


def _unit_homes(search: PlacementSearch, trial: CandidatePlacement) -> dict[str, Device]:
    """Map each unit to its device. A unit without bytes goes where the one before or after it is."""
    sized = [home for home in trial.homes if home is not None]
    idle = next(iter(device for device, limit in search.limits.items() if limit > 0))
    last = sized[0] if sized else idle
    homes: dict[str, Device] = {}
    for group, home in zip(search.groups, trial.homes, strict=True):
        last = last if home is None else home
        homes |= dict.fromkeys((unit.name for unit in group.units), last)
    return homes


def merge_names(part: ModuleNode, homes: Mapping[str, Device]) -> list[tuple[str, Device]]:
    """Return (name, device) with as few names as possible: a module's where all of it has one device.

    Args:
        part: a module.
        homes: unit -> device.
    """
    if part.name in homes:
        return [(part.name, homes[part.name])]
    pairs = [(weight.name, homes[weight.name]) for weight in part.weights]
    for child in part.children:
        pairs += merge_names(child, homes)
    if len({device for _, device in pairs}) == 1 and (len(pairs) > 1 or part.name):
        return [(part.name, pairs[0][1])]
    return pairs


def _unit_sizes(groups: Sequence[TiedUnitGroup], homes: Mapping[str, Device]) -> dict[str, int]:
    """Map each unit to its bytes; a tied weight counts at the first of its group."""
    sizes = dict.fromkeys(homes, 0)
    for group in groups:
        seen: set[object] = set()
        for unit in group.units:
            for weight in unit.weights:
                sizes[unit.name] += 0 if weight.tie in seen else weight.size
                seen.add(weight.tie)
    return sizes


def _tied_names(groups: Iterable[TiedUnitGroup]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        names: dict[object, list[str]] = {}
        for unit in group.units if len(group.units) > 1 else ():
            for weight in unit.weights:
                names.setdefault(weight.tie, []).append(weight.name)
        yield from (tuple(each) for each in names.values() if len(each) > 1)


def _unknown_class_notes(tree: ModuleNode, no_split: Iterable[str]) -> Iterator[str]:
    class_names = set(no_split)
    existing = {part.kind for part in tree.walk()} if class_names else set()
    for name in sorted(class_names - existing):
        near = nearest(name, existing)
        yield f"no module is of the class {name!r}" + (f"; did you mean {near!r}?" if near else "")


# --- budgets ------------------------------------------------------------------------------------------------


def read_budgets(budgets: Mapping[Device, int | float | str]) -> dict[Device, int | float]:
    """Return device -> bytes: numbered accelerators in order, others as they were given, the CPU, the disk.

    Raises:
        SettingError: a device or a size cannot be read.
    """
    sizes = {read_device(device): _read_size(device, value) for device, value in budgets.items()}
    numbers = sorted(device for device in sizes if isinstance(device, int))
    others = [device for device in sizes if device not in (CPU, DISK, *numbers)]
    return {device: sizes[device] for device in (*numbers, *others, CPU, DISK) if device in sizes}


def read_device(device: Device) -> Device:
    """Return a device as a key: ``"cpu:0"`` is ``"cpu"``, and digits are a number.

    Raises:
        SettingError: it is neither a number nor a name.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if isinstance(device, str) and device:
        return int(device) if device.isdecimal() else CPU if device == "cpu:0" else device
    raise SettingError(f"{device!r} is no device", fix="accelerators are 0, 1, ...; others are 'cpu', 'disk'")


def _read_size(device: Device, value: int | float | str) -> int | float:
    count = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(count, bool) or not isinstance(count, int | float) or math.isnan(count):
        raise SettingError(f"the budget of {device!r} is {value!r}, which is no size", fix="write '10GB'")
    if count < 0:
        raise SettingError(f"the budget of {device!r} is {value!r}", why="a size cannot be negative")
    return count if math.isinf(count) else int(count)
