"""The placement planner: a pure function from sizes and budgets to a placement, without side effects.

Groups of units (``module_sizes.py``) are taken in the order of the model, and devices in the order of the
budgets: accelerators, then the CPU, then the disk. They are filled by rules that are tried in turn.

Invariants of every plan that is returned:
- every tensor has exactly one home, and tied ones the same;
- no device is asked for more than its budget: weights, buffers, caches and the reserve together (but
  buffers that a CPU cannot hold stay there while all weights are on the disk, by ``oversized_blocks``);
- when something is stored on the CPU or the disk beside accelerators, the one that computes it (the
  executor) has room for the largest of these blocks beside all that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from accelerate.core.errors import SettingError, nearest
from accelerate.core.units import parse_bytes
from accelerate.offload.module_sizes import ModuleNode, TiedUnitGroup, group_tied_units, split_into_units
from accelerate.offload.placement import CPU, DISK, Device, DeviceBudget, ModelPlacement, format_size


@dataclass(frozen=True)
class PlacementRules:
    """The rules of a placement.

    Attributes:
        no_split: names of classes whose modules stay whole.
        offload_buffers: the buffers of a module on the CPU or the disk are brought in with its weights;
            otherwise they stay on the executor.
        fill: what does not fit an accelerator is left for the next device, and the accelerator goes on being
            filled; otherwise it counts as full from then on, and the order of the model is kept.
        reserve: device -> bytes that stay free on it, for activations.
        cache: name of a module -> bytes that lie on the device that computes it, for keys and values.
        oversized_blocks: where a block is larger than every accelerator, the CPU computes the model, and
            where the budgets hold nothing, all of it is on the disk, with a note; otherwise it is an error.
    """

    no_split: frozenset[str] = frozenset()
    offload_buffers: bool = False
    fill: bool = False
    reserve: Mapping[Device, int] = field(default_factory=dict)
    cache: Mapping[str, int] = field(default_factory=dict)
    oversized_blocks: bool = False


def plan_placement(
    tree: ModuleNode, budgets: Mapping[Device, int | float | str], rules: PlacementRules | None = None
) -> ModelPlacement:
    """Plan a device for every unit of a model.

    Three plans are tried. The first keeps room for the largest block on the first accelerator, as long as
    more is to come; it is taken if the accelerators hold the model, because the room serves activations.
    The second uses the accelerators to their last byte, if that holds the model. The third stores the rest
    on the CPU, and on the disk what the CPU cannot hold.

    Args:
        tree: the sizes, from ``build_module_tree``.
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
    if not any(limits.values()) and (DISK in limits or not rules.oversized_blocks):
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
    """Map each unit to its device. One without bytes follows the one before; the first is where inputs go."""
    sized = [home for home in trial.homes if home is not None]
    idle = next(iter(device for device, limit in search.limits.items() if limit > 0))
    last = [*trial.computing_devices, *sized, idle][0]
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


# --- the search ---------------------------------------------------------------------------------------------


@dataclass
class CandidatePlacement:
    """One candidate: a device for each group of units.

    Attributes:
        computing_devices: the devices that compute their own groups, in order.
        executor: the one of them that also computes offloaded groups.
        homes: a device for each group; None for a group without a byte, or one that fits nowhere.
        offloaded: the groups on the CPU or the disk that the executor computes.
        pinned: bytes of offloaded groups that stay on the executor: buffers and caches.
        unplaced: the first group that fits nowhere.
    """

    computing_devices: Sequence[Device]
    executor: Device | None
    homes: list[Device | None] = field(default_factory=list)
    offloaded: list[TiedUnitGroup] = field(default_factory=list)
    pinned: int = 0
    unplaced: TiedUnitGroup | None = None


class PlacementSearch:
    """The search for a placement of one model.

    Args:
        groups: the groups to place, in order.
        limits: device -> bytes, in the order in which devices are filled.
        rules: see there.
    """

    def __init__(
        self, groups: Sequence[TiedUnitGroup], limits: Mapping[Device, float], rules: PlacementRules
    ) -> None:
        self.groups, self.limits, self.rules = groups, limits, rules
        self.room = {device: limit - rules.reserve.get(device, 0) for device, limit in limits.items()}
        self.accelerators = [d for d in limits if d not in (CPU, DISK) and self.room[d] > 0]
        # The largest block of each group and all after it.
        self.largest_from = [*[*accumulate((g.block for g in reversed(groups)), max)][::-1], 0]

    # --- which way is taken

    def find_best(self) -> CandidatePlacement:
        """Return the best candidate (see ``plan_placement``).

        Raises:
            SettingError: there is none.
        """
        if not self.accelerators:
            return self._place_on_host()
        first, need = self.accelerators[0], sum(group.size + group.cache for group in self.groups)
        # A model larger than all of them together needs no trial.
        if need <= sum(self.room[device] for device in self.accelerators):
            for executor, fill in ((first, False), (None, False), (None, True)):
                trial = self._fill_devices(self.accelerators, executor, fill=fill)
                if not trial.offloaded:
                    return trial
        candidate = self._find_with_offload(fill=False)
        if self.rules.fill and (candidate is None or self._unused_devices(candidate)):
            candidate = self._find_with_offload(fill=True) or candidate
        if candidate is None and not self.rules.oversized_blocks:
            self._refuse_too_large_block()
        return candidate or self._place_on_host()

    def _find_with_offload(self, *, fill: bool) -> CandidatePlacement | None:
        """Try each accelerator as the executor of offloaded groups; it must also hold a group itself.

        A first group without bytes will do, with room for the largest block.
        """
        has_idle_start = bool(self.groups) and not self.groups[0].size + self.groups[0].cache
        for number, device in enumerate(self.accelerators):
            trial = self._fill_with_pinned(self.accelerators[number:], device, fill=fill)
            fits = has_idle_start and self.largest_from[0] + trial.pinned <= self.room[device]
            if trial.unplaced is None and (fits or device in trial.homes):
                return trial
        return None

    def _unused_devices(self, trial: CandidatePlacement) -> list[Device]:
        """Return the accelerators without any group."""
        return [device for device in self.accelerators if device not in trial.homes]

    def _place_on_host(self) -> CandidatePlacement:
        """Place the model on the CPU, which computes, and the disk, which stores what the CPU cannot hold."""
        if self.limits.get(CPU, 0) <= 0:
            trial = self._fill_devices([], None)
        else:
            trial = self._fill_with_pinned([CPU], CPU, fill=True)
            if trial.pinned > self.room[CPU] and self.rules.oversized_blocks:
                self.room[CPU] = 0  # buffers stay in memory anyhow: no weights beside them
                trial = self._fill_devices([], None)
            elif trial.pinned > self.room[CPU]:
                raise SettingError(
                    f"the CPU's budget of {format_size(self.limits[CPU])} is too small",
                    why=f"{format_size(trial.pinned)} of buffers and caches stay in memory",
                    fix="give it more, or pass offload_buffers=True",
                )
        if trial.unplaced is not None:
            total = sum(group.size for group in self.groups)
            budgets = ", ".join(f"{device}: {format_size(limit)}" for device, limit in self.limits.items())
            raise SettingError(
                f"the budgets are too small for the model: {self._group_name(trial.unplaced)} fits nowhere",
                why=f"the model has {format_size(total)}, and the budgets are {budgets}",
                fix="give more, or let the disk be without limit by not naming it",
            )
        return trial

    def _refuse_too_large_block(self) -> None:
        """Raise when the largest block fits no accelerator."""
        largest = max(self.groups, key=lambda group: group.block)
        widest = max(self.accelerators, key=lambda device: self.room[device])
        if largest.block <= self.room[widest]:
            return
        reserve = self.rules.reserve.get(widest, 0)
        raise SettingError(
            f"device {widest!r} may hold {format_size(self.limits[widest])}, less than the largest block "
            f"{self._group_name(largest)} ({format_size(largest.block)})"
            + (f" and the reserve of {format_size(reserve)}" if reserve else ""),
            why="a block is computed at once, and no accelerator has more room",
            fix="raise the budget; or name no accelerator, to compute on the CPU",
        )

    def _fill_with_pinned(
        self, computers: Sequence[Device], executor: Device, *, fill: bool = False
    ) -> CandidatePlacement:
        """Fill the devices so that the executor has room for the buffers and caches of offloaded groups."""
        trial, pinned = self._fill_devices(computers, executor, fill=fill), -1
        # The more is pinned, the more is stored, and the more is pinned: it grows, and it ends.
        while trial.pinned > pinned:
            pinned = trial.pinned
            trial = self._fill_devices(computers, executor, pinned, fill=fill)
        return trial

    # --- one way

    def _fill_devices(
        self, computers: Sequence[Device], executor: Device | None, pinned: int = 0, *, fill: bool = False
    ) -> CandidatePlacement:
        trial = CandidatePlacement(computers, executor)
        left = dict(self.room)
        if executor is not None:
            left[executor] -= pinned
        stores = [d for d in (CPU, DISK) if d not in computers and self.room.get(d, 0) > 0]
        full = largest_offloaded = 0  # computers that count as full; the largest block stored so far
        for number, group in enumerate(self.groups):
            need = group.size + group.cache
            ahead = max(largest_offloaded, self.largest_from[number + 1]) if executor != CPU else 0
            home = None
            for position in range(full if need else len(computers), len(computers)):
                device = computers[position]
                if need + (ahead if device == executor else 0) <= left[device]:
                    home = device
                    break
                # What could not fit an empty device either does not end the filling of this one.
                if not fill and position == full and need <= self.room[device]:
                    full += 1
            if home is not None:
                left[home] -= need
            elif need:
                home = self._offload_group(trial, group, stores, left)
                largest_offloaded = max(largest_offloaded, group.block)
            trial.homes.append(home)
        return trial

    def _offload_group(
        self,
        trial: CandidatePlacement,
        group: TiedUnitGroup,
        stores: Sequence[Device],
        left: dict[Device, float],
    ) -> Device | None:
        need = group.size - self._resident_buffer_bytes(group, trial.executor)
        trial.offloaded.append(group)
        trial.pinned += self._resident_buffer_bytes(group, trial.executor) + (
            group.cache if trial.executor is not None else 0
        )
        for device in stores:
            if need <= left[device]:
                left[device] -= need
                return device
        trial.unplaced = trial.unplaced or group
        return None

    def _resident_buffer_bytes(self, group: TiedUnitGroup, executor: Device | None) -> int:
        """Return the bytes of an offloaded group that stay on the executor."""
        return 0 if self.rules.offload_buffers or executor is None else group.buffers

    # --- what came of it

    def device_budgets(self, trial: CandidatePlacement) -> dict[Device, DeviceBudget]:
        """Return the use of each device's budget."""
        totals = {
            device: {"weights": 0, "pinned": 0, "cache": 0, "block_buffer": 0} for device in self.limits
        }
        stored = {id(group) for group in trial.offloaded}
        for group, home in zip(self.groups, trial.homes, strict=True):
            if home is None:
                continue
            is_offloaded = id(group) in stored
            stays = self._resident_buffer_bytes(group, trial.executor) if is_offloaded else 0
            totals[home]["weights"] += group.size - stays
            computer = trial.executor if is_offloaded else home
            if computer is not None:
                totals[computer]["pinned"] += stays
                totals[computer]["cache"] += group.cache
                if is_offloaded and computer != CPU:
                    totals[computer]["block_buffer"] = max(totals[computer]["block_buffer"], group.block)
        reserve = self.rules.reserve
        return {
            d: DeviceBudget(self.limits[d], reserve=reserve.get(d, 0), **each) for d, each in totals.items()
        }

    def reasons(self, trial: CandidatePlacement) -> dict[str, str]:
        """Return unit -> why it is not on the device of its neighbours."""
        offloaded_ids = {id(group) for group in trial.offloaded}
        texts = {
            CPU: self._describe_full(self.accelerators),
            DISK: self._describe_full([*self.accelerators, CPU]),
        }
        texts_by_unit: dict[str, str] = {}
        for group, home in zip(self.groups, trial.homes, strict=True):
            if home in texts and id(group) in offloaded_ids:
                for unit in group.units:
                    texts_by_unit[unit.name] = texts[home]
            elif len(group.units) > 1:
                for unit in group.units[1:]:
                    texts_by_unit[unit.name] = f"tied to {group.units[0].name}"
        return texts_by_unit

    def _describe_full(self, devices: Sequence[Device]) -> str:
        names = [str(device) for device in devices if self.room.get(device, 0) > 0]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} full" if names else ""

    def list_notes(self, trial: CandidatePlacement) -> Iterator[str]:
        """Return notes about the placement: accelerators that hold nothing, and why."""
        if trial.computing_devices == self.accelerators and not trial.offloaded:
            return
        homes = {home for home in trial.homes if home is not None}
        if self.rules.oversized_blocks and homes == {DISK}:
            yield "the budgets hold no part of the model: all of it is on the disk"
        buffers = 0 if self.rules.offload_buffers else sum(group.buffers for group in self.groups)
        for device in self._unused_devices(trial):
            yield (
                f"nothing is on {device}, of insufficient memory: {format_size(self.room[device])} "
                f"do not hold what comes first beside the largest block ({format_size(self.largest_from[0])})"
                + (f" and the buffers of others (up to {format_size(buffers)})" if buffers else "")
            )

    def _group_name(self, group: TiedUnitGroup) -> str:
        return max(group.units, key=lambda unit: unit.size).name or "the model"


# --- budgets ------------------------------------------------------------------------------------------------


def read_budgets(budgets: Mapping[Device, int | float | str]) -> dict[Device, int | float]:
    """Return device -> bytes: numbered accelerators in order, others as they were given, the CPU, the disk.

    Raises:
        SettingError: a device or a size cannot be read.
    """
    if not isinstance(budgets, Mapping):
        raise SettingError(
            f"max_memory is {budgets!r}, and no dict of budgets", fix='max_memory={0: "10GB", "cpu": "30GB"}'
        )
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
    count: Any = parse_bytes(value) if isinstance(value, str) else value
    if getattr(count, "shape", None) == ():  # a number of numpy or torch
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, int | float) or math.isnan(count):
        raise SettingError(f"the budget of {device!r} is {value!r}, which is no size", fix="write '10GB'")
    if count < 0:
        raise SettingError(f"the budget of {device!r} is {value!r}", why="a size cannot be negative")
    return count if math.isinf(count) else int(count)
