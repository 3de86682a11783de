"""Optimizers of FSDP1 models: remapped to the wrapped parameters; their state by the user's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import number_groups
from accelerate.strategy.fsdp1.flat_parameter_layout import FlatParam, FlatSlot
from accelerate.strategy.fsdp1.model_state_dict import TakeValue, as_distributed
from accelerate.strategy.sharding.full_state import distribute, gather_whole, saved_numbers
from accelerate.world import collective

# For each group: (the parameter that the optimizer holds, the stand-in of the user's in it if it is flat).
ParamOrder = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor | None]]]


@dataclass(frozen=True)
class OptimizerParam:
    """A user's parameter as an optimizer holds it.

    Attributes:
        param: the parameter that the optimizer holds: the user's, or the flat one.
        unit, slot: the flat parameter and the place in it; None for one of no wrapped model.
    """

    param: torch.Tensor
    unit: FlatParam | None = None
    slot: FlatSlot | None = None


class FSDP1Optimizer:
    """An optimizer of FSDP1 models, with its parameters in the user's order.

    Args:
        optimizer: the user's own.
        flat_params: the flat parameters of all models.
        order: the user's order, where flat parameters replace several.
    """

    def __init__(
        self, optimizer: Optimizer, flat_params: Sequence[FlatParam], order: ParamOrder = ()
    ) -> None:
        self.optimizer, self.flat_params = optimizer, flat_params
        self.groups: list[list[OptimizerParam]] = []
        # By stand-in, and by parameter that an optimizer holds.
        self._slots = {id(slot.stand_in): (unit, slot) for unit in flat_params for slot in unit.slots}
        self._slots |= {id(p): (unit, slot) for unit in flat_params for p, slot in unit.kept_params()}
        self._units = {id(unit.flat): unit for unit in flat_params}
        for number, group in enumerate(optimizer.param_groups):
            pairs = order[number] if number < len(order) else [(param, None) for param in group["params"]]
            self.groups.append(
                [entry for param, stand_in in pairs for entry in self._entries(param, stand_in)]
            )
        self.entries = [entry for group in self.groups for entry in group]
        # By the number of each flat parameter: the user's parameters in it, with their numbers.
        self._members: list[list[tuple[int, FlatSlot]]] = [[] for _ in flat_params]
        self._places = {id(unit): place for place, unit in enumerate(flat_params)}
        for number, entry in enumerate(self.entries):
            if entry.slot is not None:
                self._members[self._places[id(entry.unit)]].append((number, entry.slot))

    def _entries(self, param: torch.Tensor, stand_in: torch.Tensor | None) -> list[OptimizerParam]:
        unit = self._units.get(id(param)) if stand_in is None else None
        if unit is not None:
            return [OptimizerParam(param, unit, slot) for slot in unit.slots]
        unit, slot = self._slots.get(id(param if stand_in is None else stand_in), (None, None))
        return [OptimizerParam(param, unit, slot)]

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the numbers of the user's parameters."""
        return number_groups(self.optimizer.param_groups, map(len, self.groups))

    def stand_ins(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the stand-ins of the user's parameters."""
        return [
            {**group, "params": [e.param if e.slot is None else e.slot.stand_in for e in entries]}
            for group, entries in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]

    # --- out

    @torch.no_grad()
    def gather_state(self, take: TakeValue) -> dict[str, Any]:
        """Return the state as one process would have it; collective. See ``FSDP1WrappedModel.gather_state``.

        Raises:
            PrepareError: a state is neither one number nor of the parameter's size.
        """
        local_states = [self._local_state(entry) for entry in self.entries]
        kinds = [_local_info(entry, values) for entry, values in zip(self.entries, local_states, strict=True)]
        states: dict[int, dict[str, Any]] = {}
        flat_states: dict[tuple[int, str, torch.dtype], None] = {}
        for number, infos in enumerate(
            zip(*collective.all_gather_object(kinds, "the optimizer's state"), strict=True)
        ):
            for name, value in ((n, v) for info in infos for n, v in info.items()):
                values = states.setdefault(number, {})
                if isinstance(value, torch.dtype):
                    values.setdefault(name, None)
                    flat_states[self._places[id(self.entries[number].unit)], name, value] = None
                elif name not in values:
                    # Each parameter its own: optimizers count steps in place.
                    values[name] = value.clone() if isinstance(value, torch.Tensor) else value
        for number, entry in enumerate(self.entries):
            if entry.slot is None and local_states[number]:
                states[number] = {
                    name: _unwrapped_state(value, take) for name, value in local_states[number].items()
                }
        for place, name, dtype in sorted(flat_states, key=lambda key: key[:2]):
            self._gather(place, name, dtype, local_states, states, take)
        return {**self._extra_state(), "state": states, "param_groups": self.param_groups()}

    def _extra_state(self) -> dict[str, Any]:
        """Return the further entries of the optimizer's state dict."""
        return {k: v for k, v in self.optimizer.state_dict().items() if k not in ("state", "param_groups")}

    def _local_state(self, entry: OptimizerParam) -> dict[str, Any]:
        """Return this rank's state of one parameter: pieces and numbers."""
        param_state = self.optimizer.state.get(entry.param, {})
        if entry.unit is None or entry.slot is None or entry.unit.uses_orig_params:
            return param_state
        slot, unit = entry.slot, entry.unit
        return {
            name: unit.local_piece(slot, value) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in param_state.items()
        }

    def _gather(
        self,
        place: int,
        name: str,
        dtype: torch.dtype,
        own: Any,
        states: dict[int, Any],
        take: TakeValue,
    ) -> None:
        unit, members = self.flat_params[place], self._members[place]
        local = torch.zeros(unit.size, dtype=dtype, device=unit.handle.device)
        for number, slot in members:
            value = own[number].get(name)
            if isinstance(value, torch.Tensor):
                unit.local_piece(slot, local).copy_(value.reshape(-1))
        whole = unit.gather_flat(local)
        for number, slot in members:
            if name in states.get(number, {}):
                states[number][name] = take(unit.view_param(slot, whole), slot.stand_in)

    # --- in

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of the user's parameters, full or sharded; collective where it is sharded.

        Raises:
            PrepareError: it is of another number of parameters.
        """
        entries = self.entries
        saved = saved_numbers(state, len(entries))
        numbers = {
            id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])
        }
        local_states: dict[int, dict[str, Any]] = {}
        for index, entry in zip(saved, entries, strict=True):
            values = state["state"].get(index)
            if values is not None:
                _put_local_part(entry, values, local_states.setdefault(numbers[id(entry.param)], {}))
        groups = []
        for saved_group, local_group in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            groups.append({**saved_group, "params": [numbers[id(p)] for p in local_group["params"]]})
        states = {number: values for number, values in local_states.items() if values}
        self.optimizer.load_state_dict({**state, "state": states, "param_groups": groups})


def _local_info(entry: OptimizerParam, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other ranks have to know: the dtypes of sharded state, and the values of the rest."""
    info: dict[str, Any] = {}
    if entry.slot is None or entry.unit is None or _is_absent(entry):
        return info
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            info[name] = value.cpu() if isinstance(value, torch.Tensor) else value
            continue
        low, high = entry.unit.local_range(entry.slot)
        if value.numel() != high - low:
            raise PrepareError(
                f"the optimizer's state {name!r} of {entry.slot.names[0]} has the shape {tuple(value.shape)}",
                why=f"{high - low} elements of the parameter are here: only numbers and states of the "
                "parameter's own size can be gathered",
                fix="use fsdp_version=2, or an optimizer that keeps such states",
            )
        info[name] = value.dtype
    return info


def _is_absent(entry: OptimizerParam) -> bool:
    """Return whether this rank has no element of a parameter: the optimizer skips it, and counts no steps."""
    if entry.unit is None or entry.slot is None or not entry.unit.uses_orig_params:
        return False
    low, high = entry.unit.local_range(entry.slot)
    return low == high


def _unwrapped_state(value: Any, take: TakeValue) -> Any:
    """Return the state of a parameter that is not wrapped."""
    if not isinstance(value, torch.Tensor) or take is as_distributed:
        return value
    return (gather_whole(value) if isinstance(value, DTensor) else value).to("cpu", copy=True)


def _put_local_part(entry: OptimizerParam, values: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Put this rank's elements of the state of one parameter into ``made``, the new optimizer state."""
    unit, slot = entry.unit, entry.slot
    for name, value in values.items():
        # All ranks gather, also those that have nothing of the parameter.
        full: Any = gather_whole(value).to(value.device) if isinstance(value, DTensor) else value
        if _is_absent(entry):
            continue
        if isinstance(entry.param, DTensor):  # in an ignored module
            made[name] = distribute(full, entry.param)
            continue
        if unit is None or slot is None or not isinstance(full, torch.Tensor) or full.shape != slot.shape:
            made.setdefault(name, full.clone() if isinstance(full, torch.Tensor) else full)
            continue
        low, high = unit.local_range(slot)
        piece = full.reshape(-1)[low:high]
        if unit.uses_orig_params:
            made[name] = piece.to(entry.param.device, copy=True).view(entry.param.shape)
        else:
            if name not in made:
                made[name] = torch.zeros(unit.size, dtype=full.dtype, device=unit.flat.device)
            unit.local_piece(slot, made[name]).copy_(piece)


class FSDP1OptimizerState:
    """An optimizer as sharded checkpoints see it: with the stand-ins of the user's parameters."""

    def __init__(self, wrapped: FSDP1Optimizer) -> None:
        self.wrapped = wrapped
        self.state: dict[Any, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with stand-ins."""
        return self.wrapped.stand_ins()

    def state_dict(self) -> dict[str, Any]:
        """Return the sharded state dict."""
        return self.wrapped.gather_state(as_distributed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a sharded or full state dict."""
        self.wrapped.load_state(state)


def wrapped_optimizer_view(wrapped: FSDP1Optimizer) -> Any:
    """Return a view of a wrapped optimizer whose class has the name of the user's class."""
    return type(type(wrapped.optimizer).__name__, (FSDP1OptimizerState,), {})(wrapped)


# --- prepare


def check_param_groups(optimizer: Optimizer, parts: Iterable[Sequence[torch.Tensor]]) -> None:
    """Refuse optimizer groups that have only some parameters of a flat one.

    Args:
        optimizer: of the user's parameters.
        parts: the parameters of each flat one.

    Raises:
        PrepareError: there is one.
    """
    group = {p: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}
    for parameters in parts:
        if len({group.get(p) for p in parameters}) > 1:
            raise PrepareError(
                f"the {type(optimizer).__name__} has the parameters of one FSDP unit in several groups, "
                "or only some of them",
                why="with use_orig_params=False the parameters of a unit are one parameter",
                fix="use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)",
            )


def remap_optimizer(
    optimizer: Optimizer,
    renewed: Mapping[Any, tuple[Any, Any]],
    flat_params: Sequence[FlatParam],
    orders: MutableMapping[Any, ParamOrder],
    *,
    sync: bool,
) -> None:
    """Make an optimizer hold the new parameters, and shard its state.

    Args:
        optimizer: the user's own.
        renewed: (new parameter, stand-in or None) by the old ones.
        flat_params: the flat parameters of all models.
        orders: keeps the user's order, where flat parameters replace several.
        sync: whether its state becomes that of rank 0.
    """
    state = optimizer.state_dict() if _has_stale_state(optimizer, renewed, flat_params) else None
    _replace_params(optimizer, renewed, orders)
    if state is None:
        return
    for values in state["state"].values() if sync else ():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor):
                dist.broadcast(value, src=0)
    FSDP1Optimizer(optimizer, flat_params, orders.get(optimizer, ())).load_state(state)


def _has_stale_state(
    optimizer: Optimizer, renewed: Mapping[Any, tuple[Any, Any]], flat_params: Sequence[FlatParam]
) -> bool:
    """Return whether it has state for replaced parameters."""
    shapes = {p: slot.shape for unit in flat_params for p, slot in unit.kept_params()}
    for param, values in getattr(optimizer, "state", {}).items():
        if param in renewed:
            return True
        tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
        if any(v.shape == shapes.get(param) and v.shape != param.shape for v in tensors):
            return True
    return False


def _replace_params(
    optimizer: Optimizer, renewed: Mapping[Any, tuple[Any, Any]], orders: MutableMapping[Any, ParamOrder]
) -> None:
    before = orders.get(optimizer) or [[(p, None) for p in g["params"]] for g in optimizer.param_groups]
    after = [
        [
            renewed[param] if param in renewed and stand_in is None else (param, stand_in)
            for param, stand_in in group
        ]
        for group in before
    ]
    for param, _ in (pair for group in before for pair in group):
        if param in renewed:
            getattr(optimizer, "state", {}).pop(param, None)
    for group, pairs in zip(optimizer.param_groups, after, strict=False):
        if any(param in renewed for param in group["params"]):
            group["params"] = list(dict.fromkeys(param for param, _ in pairs))
    if any(stand_in is not None for group in after for _, stand_in in group):
        orders[optimizer] = after
