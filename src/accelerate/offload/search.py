"""The search for a placement: devices are filled with groups in order, under rules that are tried in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from accelerate.core.errors import SettingError
from accelerate.offload.parts import Group
from accelerate.offload.placement import CPU, DISK, Account, Device, size


@dataclass(frozen=True)
class Rules:
    """What a plan must respect.

    Attributes:
        no_split: names of classes whose modules stay whole.
        offload_buffers: the buffers of a module on the CPU or the disk are brought in with its weights;
            otherwise they stay on the executor.
        fill: what does not fit an accelerator is left for the next device, and the accelerator goes on being
            filled; otherwise it counts as full from then on, and the order of the model is kept.
        reserve: device -> bytes that stay free on it, for activations.
        cache: name of a module -> bytes that lie on the device that computes it, for keys and values.
    """

    no_split: frozenset[str] = frozenset()
    offload_buffers: bool = False
    fill: bool = False
    reserve: Mapping[Device, int] = field(default_factory=dict)
    cache: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Trial:
    """One way to fill the devices.

    Attributes:
        computers: the devices that compute what they hold, in order.
        executor: the one of them that also computes what is stored elsewhere.
        homes: a device for each group; None for a group without a byte, or one that fits nowhere.
        stored: the groups on the CPU or the disk that are computed elsewhere.
        pinned: bytes of stored groups that lie on the executor: buffers and caches.
        lost: the first group that fits nowhere.
    """

    computers: Sequence[Device]
    executor: Device | None
    homes: list[Device | None] = field(default_factory=list)
    stored: list[Group] = field(default_factory=list)
    pinned: int = 0
    lost: Group | None = None


class Search:
    """The search for one model.

    Args:
        groups: what is placed, in order.
        limits: device -> bytes, in the order in which devices are filled.
        rules: see there.
    """

    def __init__(self, groups: Sequence[Group], limits: Mapping[Device, float], rules: Rules) -> None:
        self.groups, self.limits, self.rules = groups, limits, rules
        self.room = {device: limit - rules.reserve.get(device, 0) for device, limit in limits.items()}
        self.accelerators = [d for d in limits if d not in (CPU, DISK) and self.room[d] > 0]
        # The largest block of each group and all after it.
        self.later = [*[*accumulate((g.block for g in reversed(groups)), max)][::-1], 0]

    # --- which way is taken

    def best(self) -> Trial:
        """The plan (see ``place``).

        Raises:
            SettingError: there is none.
        """
        if not self.accelerators:
            return self._on_host()
        first, need = self.accelerators[0], sum(group.size + group.cache for group in self.groups)
        # What is more than all of them together needs no trial.
        if need <= sum(self.room[device] for device in self.accelerators):
            for executor, fill in ((first, False), (None, False), (None, True)):
                trial = self._try(self.accelerators, executor, fill=fill)
                if not trial.stored:
                    return trial
        found = self._with_stores(fill=False)
        if self.rules.fill and (found is None or self._idle(found)):
            found = self._with_stores(fill=True) or found
        if found is None:
            self._refuse_blocks()
        return found or self._on_host()

    def _with_stores(self, *, fill: bool) -> Trial | None:
        """The first accelerator that can compute what is stored elsewhere, and hold something besides."""
        for number, device in enumerate(self.accelerators):
            trial = self._settled(self.accelerators[number:], device, fill=fill)
            if trial.lost is None and device in trial.homes:
                return trial
        return None

    def _idle(self, trial: Trial) -> list[Device]:
        """The accelerators that nothing is on."""
        return [device for device in self.accelerators if device not in trial.homes]

    def _on_host(self) -> Trial:
        """No accelerator computes: the CPU does, and the disk stores what it cannot hold."""
        if self.limits.get(CPU, 0) <= 0:
            trial = self._try([], None)
        else:
            trial = self._settled([CPU], CPU, fill=True)
            if trial.pinned > self.room[CPU]:
                raise SettingError(
                    f"the CPU's budget of {size(self.limits[CPU])} is too small",
                    why=f"{size(trial.pinned)} of buffers and caches stay in memory",
                    fix="give it more, or pass offload_buffers=True",
                )
        if trial.lost is not None:
            total = sum(group.size for group in self.groups)
            raise SettingError(
                f"the budgets are too small for the model: {self._name(trial.lost)} fits nowhere",
                why=f"the model has {size(total)}, and the budgets are {self._budgets()}",
                fix="give more, or let the disk be without limit by not naming it",
            )
        return trial

    def _refuse_blocks(self) -> None:
        """Raises if what is stored elsewhere could not be computed on any accelerator."""
        largest = max(self.groups, key=lambda group: group.block)
        widest = max(self.accelerators, key=lambda device: self.room[device])
        if largest.block > self.room[widest]:
            reserve = self.rules.reserve.get(widest, 0)
            raise SettingError(
                f"device {widest!r} may hold {size(self.limits[widest])}, less than the largest block "
                f"{self._name(largest)} ({size(largest.block)})"
                + (f" and the reserve of {size(reserve)}" if reserve else ""),
                why="a block is computed at once, and no accelerator has more room",
                fix="raise the budget; or name no accelerator, to compute on the CPU",
            )

    def _settled(self, computers: Sequence[Device], executor: Device, *, fill: bool = False) -> Trial:
        """A trial in which the executor has room for the buffers and caches of what is stored elsewhere."""
        trial, pinned = self._try(computers, executor, fill=fill), -1
        # The more is pinned, the more is stored, and the more is pinned: it grows, and it ends.
        while trial.pinned > pinned:
            pinned = trial.pinned
            trial = self._try(computers, executor, pinned, fill=fill)
        return trial

    # --- one way

    def _try(
        self, computers: Sequence[Device], executor: Device | None, pinned: int = 0, *, fill: bool = False
    ) -> Trial:
        trial = Trial(computers, executor)
        left = dict(self.room)
        if executor is not None:
            left[executor] -= pinned
        stores = [d for d in (CPU, DISK) if d not in computers and self.room.get(d, 0) > 0]
        full = brought = 0  # computers that count as full; the largest block stored so far
        for number, group in enumerate(self.groups):
            need = group.size + group.cache
            ahead = max(brought, self.later[number + 1]) if executor != CPU else 0
            home = None
            for place in range(full if need else len(computers), len(computers)):
                device = computers[place]
                if need + (ahead if device == executor else 0) <= left[device]:
                    home = device
                    break
                # What could not fit an empty device either does not end the filling of this one.
                if not fill and place == full and need <= self.room[device]:
                    full += 1
            if home is not None:
                left[home] -= need
            elif need:
                home = self._store(trial, group, stores, left)
                brought = max(brought, group.block)
            trial.homes.append(home)
        return trial

    def _store(
        self, trial: Trial, group: Group, stores: Sequence[Device], left: dict[Device, float]
    ) -> Device | None:
        need = group.size - self._stays(group, trial.executor)
        trial.stored.append(group)
        trial.pinned += self._stays(group, trial.executor) + (
            group.cache if trial.executor is not None else 0
        )
        for device in stores:
            if need <= left[device]:
                left[device] -= need
                return device
        trial.lost = trial.lost or group
        return None

    def _stays(self, group: Group, executor: Device | None) -> int:
        """Bytes of a stored group that lie on the executor all the time."""
        return 0 if self.rules.offload_buffers or executor is None else group.buffers

    # --- what came of it

    def accounts(self, trial: Trial) -> dict[Device, Account]:
        """What is done with each budget."""
        totals = {device: {"weights": 0, "pinned": 0, "cache": 0, "kept": 0} for device in self.limits}
        stored = {id(group) for group in trial.stored}
        for group, home in zip(self.groups, trial.homes, strict=True):
            if home is None:
                continue
            away = id(group) in stored
            stays = self._stays(group, trial.executor) if away else 0
            totals[home]["weights"] += group.size - stays
            computer = trial.executor if away else home
            if computer is not None:
                totals[computer]["pinned"] += stays
                totals[computer]["cache"] += group.cache
                if away and computer != CPU:
                    totals[computer]["kept"] = max(totals[computer]["kept"], group.block)
        reserve = self.rules.reserve
        return {d: Account(self.limits[d], reserve=reserve.get(d, 0), **each) for d, each in totals.items()}

    def reasons(self, trial: Trial) -> dict[str, str]:
        """Unit -> why it is not with its neighbours."""
        away = {id(group) for group in trial.stored}
        texts = {CPU: self._full(self.accelerators), DISK: self._full([*self.accelerators, CPU])}
        found: dict[str, str] = {}
        for group, home in zip(self.groups, trial.homes, strict=True):
            if home in texts and id(group) in away:
                for unit in group.units:
                    found[unit.name] = texts[home]
            elif len(group.units) > 1:
                for unit in group.units[1:]:
                    found[unit.name] = f"tied to {group.units[0].name}"
        return found

    def _full(self, devices: Sequence[Device]) -> str:
        names = [str(device) for device in devices if self.room.get(device, 0) > 0]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} full" if names else ""

    def notes(self, trial: Trial) -> Iterator[str]:
        """What is worth knowing about the plan."""
        if trial.computers == self.accelerators and not trial.stored:
            return
        buffers = 0 if self.rules.offload_buffers else sum(group.buffers for group in self.groups)
        for device in self._idle(trial):
            yield (
                f"nothing is on {device}, of insufficient memory: {size(self.room[device])} do not hold what "
                f"comes first beside the largest block ({size(self.later[0])})"
                + (f" and the buffers of others (up to {size(buffers)})" if buffers else "")
            )

    def _name(self, group: Group) -> str:
        return max(group.units, key=lambda unit: unit.size).name or "the model"

    def _budgets(self) -> str:
        return ", ".join(f"{device}: {size(limit)}" for device, limit in self.limits.items())
