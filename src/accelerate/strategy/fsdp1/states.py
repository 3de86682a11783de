"""Optimizers of wrapped models: their state by the user's parameters, and parameters that were replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError
from accelerate.strategy.fsdp1.flat import Slot, Unit
from accelerate.strategy.fsdp1.record import Record, Take, part
from accelerate.world import collective

# Of each group: (what the optimizer holds, the stand-in of the user's parameter in it if it is flat).
Order = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor | None]]]


@dataclass(frozen=True)
class Entry:
    """A parameter of the user's as an optimizer has it.

    Attributes:
        held: what the optimizer holds: it, or the flat one that it lies in.
        unit, slot: where it lies; None for one of no wrapped model.
    """

    held: torch.Tensor
    unit: Unit | None = None
    slot: Slot | None = None


class Book:
    """The entries of an optimizer, in the user's order.

    Args:
        optimizer: the user's own.
        records: of the wrapped models.
        order: the user's, where flat parameters took the places of others.
    """

    def __init__(self, optimizer: Optimizer, records: Iterable[Record], order: Order = ()) -> None:
        self.optimizer, self.records = optimizer, list(records)
        self.units = [unit for record in self.records for unit in record.units]
        self.groups: list[list[Entry]] = []
        self._slots = {id(slot.stand_in): (unit, slot) for unit in self.units for slot in unit.slots}
        for number, group in enumerate(optimizer.param_groups):
            pairs = order[number] if number < len(order) else [(held, None) for held in group["params"]]
            self.groups.append([entry for held, one in pairs for entry in self._entries(held, one)])

    def _entries(self, held: torch.Tensor, stand_in: torch.Tensor | None) -> list[Entry]:
        if stand_in is not None:
            return [Entry(held, *self._slots[id(stand_in)])]
        record = next((r for r in self.records if held in r.owner), None)
        if record is None:
            return [Entry(held)]
        unit = record.owner[held]
        slots = [record.slot[held]] if unit.keeps_originals else unit.slots
        return [Entry(held, unit, slot) for slot in slots]

    @property
    def entries(self) -> list[Entry]:
        """Of all groups."""
        return [entry for group in self.groups for entry in group]

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with the numbers of the user's parameters."""
        found, count = [], 0
        for group, entries in zip(self.optimizer.param_groups, self.groups, strict=True):
            numbers = list(range(count, count + len(entries)))
            found.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            count += len(entries)
        return found

    def stand_ins(self) -> list[dict[str, Any]]:
        """The optimizer's groups with the stand-ins of the user's parameters."""
        return [
            {**group, "params": [e.held if e.slot is None else e.slot.stand_in for e in entries]}
            for group, entries in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]

    # --- out

    @torch.no_grad()
    def state(self, take: Take) -> dict[str, Any]:
        """The whole state as one process would have it; a collective. See ``Record.state``.

        Raises:
            PrepareError: a state is neither one number nor as large as its parameter.
        """
        own = [self._own(entry) for entry in self.entries]
        kinds = [_told(entry, values) for entry, values in zip(self.entries, own, strict=True)]
        states: dict[int, dict[str, Any]] = {}
        wanted: dict[tuple[int, str, torch.dtype], None] = {}
        for number, told in enumerate(
            zip(*collective.all_objects(kinds, "the optimizer's state"), strict=True)
        ):
            for name, value in ((n, v) for found in told for n, v in found.items()):
                values = states.setdefault(number, {})
                if isinstance(value, torch.dtype):
                    values.setdefault(name, None)
                    unit = self.entries[number].unit
                    assert unit is not None
                    wanted[self.units.index(unit), name, value] = None
                elif name not in values:
                    # Each parameter its own: optimizers count steps in place.
                    values[name] = value.clone() if isinstance(value, torch.Tensor) else value
        for number, entry in enumerate(self.entries):
            if entry.slot is None and own[number]:
                states[number] = {name: _kept(value, take) for name, value in own[number].items()}
        for place, name, dtype in sorted(wanted, key=lambda key: key[:2]):
            self._gather(self.units[place], name, dtype, own, states, take)
        return {**self._more(), "state": states, "param_groups": self.param_groups()}

    def _more(self) -> dict[str, Any]:
        """What else an optimizer says of itself."""
        return {k: v for k, v in self.optimizer.state_dict().items() if k not in ("state", "param_groups")}

    def _own(self, entry: Entry) -> dict[str, Any]:
        """The state here of one parameter: pieces, numbers."""
        held = self.optimizer.state.get(entry.held, {})
        if entry.unit is None or entry.slot is None or entry.unit.keeps_originals:
            return held
        slot, unit = entry.slot, entry.unit
        return {
            name: unit.piece(slot, value) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in held.items()
        }

    def _gather(
        self, unit: Unit, name: str, dtype: torch.dtype, own: Any, states: dict[int, Any], take: Take
    ) -> None:
        local = torch.zeros(unit.size, dtype=dtype, device=unit.handle.device)
        mine = [(n, e.slot) for n, e in enumerate(self.entries) if e.unit is unit and e.slot is not None]
        for number, slot in mine:
            value = own[number].get(name)
            if isinstance(value, torch.Tensor):
                unit.piece(slot, local).copy_(value.reshape(-1))
        whole = unit.whole(local)
        for number, slot in mine:
            if name in states.get(number, {}):
                states[number][name] = take(unit.view(slot, whole), slot.stand_in)

    # --- in

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Loads a state of the user's parameters, whole or in parts; a collective where it is in parts.

        Raises:
            PrepareError: it is of another number of parameters.
        """
        entries = self.entries
        saved = [index for group in state["param_groups"] for index in group["params"]]
        if len(saved) != len(entries):
            raise PrepareError(
                f"the state is of an optimizer of {len(saved)} parameters, and this one has {len(entries)}"
            )
        numbers = {
            id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])
        }
        made: dict[int, dict[str, Any]] = {}
        for index, entry in zip(saved, entries, strict=True):
            values = state["state"].get(index)
            if values is not None:
                _put(entry, values, made.setdefault(numbers[id(entry.held)], {}))
        groups = []
        for given, own in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            groups.append({**given, "params": [numbers[id(p)] for p in own["params"]]})
        held = {number: values for number, values in made.items() if values}
        self.optimizer.load_state_dict({**state, "state": held, "param_groups": groups})


def _told(entry: Entry, values: Mapping[str, Any]) -> dict[str, Any]:
    """What other ranks have to know: the types of what is cut, and the values of what is not."""
    found: dict[str, Any] = {}
    if entry.slot is None or entry.unit is None or _absent(entry):
        return found
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            found[name] = value.cpu() if isinstance(value, torch.Tensor) else value
            continue
        low, high = entry.unit.here(entry.slot)
        if value.numel() != high - low:
            raise PrepareError(
                f"the optimizer's state {name!r} of {entry.slot.names[0]} has the shape {tuple(value.shape)}",
                why=f"{high - low} elements of the parameter are here: only numbers and states of the "
                "parameter's own size can be gathered",
                fix="use fsdp_version=2, or an optimizer that keeps such states",
            )
        found[name] = value.dtype
    return found


def _absent(entry: Entry) -> bool:
    """Whether nothing of a parameter is here: the optimizer leaves it alone, and counts no steps."""
    if entry.unit is None or entry.slot is None or not entry.unit.keeps_originals:
        return False
    low, high = entry.unit.here(entry.slot)
    return low == high


def _kept(value: Any, take: Take) -> Any:
    """A state of a parameter that is not wrapped."""
    if not isinstance(value, torch.Tensor) or take is part:
        return value
    return value.to("cpu", copy=True)


def _put(entry: Entry, values: Mapping[str, Any], made: dict[str, Any]) -> None:
    """This process's part of the state of one parameter, into what the optimizer will have."""
    unit, slot = entry.unit, entry.slot
    for name, value in values.items():
        # All ranks gather, also those that have nothing of the parameter.
        full: Any = value.full_tensor() if isinstance(value, DTensor) else value
        if _absent(entry):
            continue
        if unit is None or slot is None or not isinstance(full, torch.Tensor) or full.shape != slot.shape:
            made.setdefault(name, full.clone() if isinstance(full, torch.Tensor) else full)
            continue
        low, high = unit.here(slot)
        piece = full.reshape(-1)[low:high]
        if unit.keeps_originals:
            made[name] = piece.to(entry.held.device, copy=True).view(entry.held.shape)
        else:
            if name not in made:
                made[name] = torch.zeros(unit.size, dtype=full.dtype, device=unit.flat.device)
            unit.piece(slot, made[name]).copy_(piece)


class NamedOptimizer:
    """An optimizer as checkpoints in parts see it: with the stand-ins of the user's parameters."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.state: dict[Any, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """With stand-ins."""
        return self.book.stand_ins()

    def state_dict(self) -> dict[str, Any]:
        """In parts."""
        return self.book.state(part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From parts or whole values."""
        self.book.load(state)


def named_optimizer(book: Book) -> Any:
    """It, of a class that is called as the user's."""
    return type(type(book.optimizer).__name__, (NamedOptimizer,), {})(book)
