"""An FSDP1 model by the user's names: its state dict, full or sharded, and loading it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.module import _IncompatibleKeys

from accelerate.core.errors import PrepareError
from accelerate.strategy.fsdp1.flat_parameter_layout import (
    FlatParam,
    FlatSlot,
    flat_params,
    param_locations,
    unwrap_module,
    walk_modules,
)
from accelerate.strategy.sharding.full_state import distribute, distribute_leaves, gather_whole

# The name of a flat parameter in torch's wrapper module.
_FLAT = "_flat_param"
TakeValue = Callable[[torch.Tensor, torch.Tensor], Any]


class FSDP1WrappedModel:
    """A model that FSDP1 has wrapped.

    Attributes:
        root: torch's root wrapper.
        module: the user's model in it.
        mesh: the device mesh; its last dimension shards.
        flat_params: the flat parameters.
        order: the position of each name in the model's state dict, as it was before.
        formats: the dtypes of its buffers then.
        flat_param_in: the flat parameter with the parameters of each module of the user.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, order: Iterable[str], formats: Any) -> None:
        self.root, self.module, self.mesh = root, unwrap_module(root), mesh
        self.formats = dict(formats)
        self.order = {name: number for number, name in enumerate(order)}
        names: dict[tuple[nn.Module, str], list[str]] = {}
        for prefix, module in walk_modules(self.module):
            names.setdefault((module, ""), []).append(prefix)
        self.flat_params: list[FlatParam] = []
        self.flat_param_in: dict[nn.Module, FlatParam] = {}
        for unit in flat_params(root):
            self.flat_params.append(unit)
            for pairs, start, shape in param_locations(unit):
                self.flat_param_in.update((module, unit) for module, _ in pairs)
                called = [f"{prefix}{name}" for module, name in pairs for prefix in names[module, ""]]
                called.sort(key=self._name_rank)
                unit.slots.append(FlatSlot(tuple(called), start, shape, self._stand_in(unit, shape)))

    def _name_rank(self, name: str) -> int:
        return self.order.get(name, len(self.order))

    def _stand_in(self, unit: FlatParam, shape: torch.Size) -> torch.Tensor:
        # On the device of the mesh, to which from_local would copy each element of one on the host.
        scalar = torch.empty((), dtype=unit.flat.dtype, device=unit.handle.device)
        if not unit.is_sharded:
            return scalar.expand(shape)
        size, place = self.mesh.size(-1), self.mesh.get_local_rank(-1)
        rows = -(-shape[0] // size)
        local_rows = max(0, min(rows, shape[0] - place * rows))
        strides = torch.empty(shape, device="meta").stride()
        cut = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        local = scalar.expand(local_rows, *shape[1:])
        return DTensor.from_local(local, self.mesh, cut, run_check=False, shape=shape, stride=strides)

    # --- names

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, stand-in) of every parameter; unwrapped ones as they are; ties have several names."""
        by_name = {
            name: slot.stand_in for unit in self.flat_params for slot in unit.slots for name in slot.names
        }
        for prefix, module in walk_modules(self.module):
            for name, parameter in module._parameters.items():
                if parameter is not None and not name.startswith(_FLAT):
                    by_name.setdefault(f"{prefix}{name}", parameter)
        yield from sorted(by_name.items(), key=lambda pair: self._name_rank(pair[0]))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, buffer) of every buffer."""
        for prefix, module in walk_modules(self.module):
            yield from ((f"{prefix}{n}", b) for n, b in module._buffers.items() if b is not None)

    # --- values

    @torch.no_grad()
    def gather_state(self, take: TakeValue | None) -> dict[str, Any]:
        """Return the model's state dict; collective, except with the stand-ins.

        Args:
            take: ``as_distributed``, ``to_host`` or ``discard_value``: makes the value of the state dict from
                the unsharded value, which is freed afterwards, and the stand-in. None takes the stand-in.
        """
        state: dict[str, Any] = {}
        for prefix, module in walk_modules(self.module):
            module._save_to_state_dict(state, prefix, keep_vars=take in (as_distributed, None))
            state.pop(f"{prefix}{_FLAT}", None)
        if take in (to_host, discard_value):  # a program's own DTensors, in ignored modules
            state = {n: gather_whole(v) if isinstance(v, DTensor) else v for n, v in state.items()}
        if take is to_host:
            state = {n: v.cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        for unit in self.flat_params:
            whole = None if take is None else unit.gather_flat(unit.local_values())
            for slot in unit.slots:
                value = slot.stand_in
                if take is not None and whole is not None:
                    value = take(unit.view_param(slot, whole), value)
                state.update(dict.fromkeys(slot.names, value))
            del whole
        if take is discard_value:
            return {}
        for prefix, module in reversed(list(walk_modules(self.module))):
            for hook in module._state_dict_hooks.values():
                hook(module, state, prefix, {})
        for name, kind in self.formats.items():
            if name in state and state[name].dtype != kind:
                state[name] = state[name].to(kind)
        return dict(sorted(state.items(), key=lambda pair: self._name_rank(pair[0])))

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a state dict whose values are unsharded or DTensors; collective.

        Returns:
            Missing and unexpected names.

        Raises:
            RuntimeError: with ``strict``, when there are some; and when a shape differs, as torch's own.
        """
        left: Any = dict(state)
        wrong, missing = [], []
        for unit in self.flat_params:
            unit.reshard()
            for slot in unit.slots:
                values = [left.pop(name, None) for name in slot.names]
                missing += [n for n, value in zip(slot.names, values, strict=True) if value is None]
                value = next((value for value in reversed(values) if value is not None), None)
                if value is not None and value.shape != slot.shape:
                    wrong.append(f"size mismatch for {slot.names[0]}: the state has shape "
                                 f"{tuple(value.shape)}, the model {tuple(slot.shape)}")  # fmt: skip
                elif value is not None:
                    copy_local_part(unit, slot, value, unit.local_values())
        unexpected = self._load_unwrapped(left, getattr(state, "_metadata", {}), missing, wrong)
        if strict and (missing or unexpected):
            wrong += [f"Missing key(s) in state_dict: {missing}"] if missing else []
            wrong += [f"Unexpected key(s) in state_dict: {unexpected}"] if unexpected else []
        if wrong:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.module).__name__}:\n\t" + "\n\t".join(wrong)
            )
        return _IncompatibleKeys(missing, unexpected)

    def _load_unwrapped(self, state: Any, versions: Any, missing: list[str], wrong: list[str]) -> list[str]:
        """Load buffers, extra states and unwrapped parameters; return unused names."""
        wrapped = {name for unit in self.flat_params for slot in unit.slots for name in slot.names}
        used_names: set[str] = set()
        for prefix, module in walk_modules(self.module):
            like = {f"{prefix}{name}": p for name, p in module._parameters.items()}
            module_state = distribute_leaves({n: v for n, v in state.items() if n.startswith(prefix)}, like)
            lacks: list[str] = []
            metadata = dict(versions.get(prefix[:-1], {}))
            # Torch lists what is missing only where it is told to be strict.
            module._load_from_state_dict(module_state, prefix, metadata, True, lacks, [], wrong)
            missing += [n for n in lacks if n not in wrapped and n != f"{prefix}{_FLAT}"]
            names = {*module._parameters, *module._buffers, "_extra_state"}
            used_names |= {n for n in module_state if n[len(prefix) :] in names}
        return [name for name in state if name not in used_names]


@torch.no_grad()
def copy_local_part(unit: FlatParam, slot: FlatSlot, value: Any, local: torch.Tensor) -> None:
    """Copy this rank's elements of an unsharded value or DTensor into its piece."""
    low, high = unit.local_range(slot)
    full = gather_whole(value).to(value.device) if isinstance(value, DTensor) else value
    unit.local_piece(slot, local).copy_(full.reshape(-1)[low:high])


def as_distributed(value: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """Return an unsharded value as sharded checkpoints have it: sharded by rows where its parameter is."""
    return distribute(value, stand_in) if isinstance(stand_in, DTensor) else value.clone()


def to_host(value: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """Return a copy of an unsharded value on the host."""
    return value.to("cpu", copy=True)


def discard_value(value: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Return None, on a rank that keeps nothing."""


class WrappedModelView:
    """A wrapped model as sharded checkpoints see it: a module with the user's names."""

    def __init__(self, wrapped_model: FSDP1WrappedModel) -> None:
        self.wrapped_model = wrapped_model

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return the sharded state dict; with ``keep_vars`` of the stand-ins, without any values."""
        return self.wrapped_model.gather_state(None if keep_vars else as_distributed)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **more: Any) -> Any:
        """Load a sharded or full state dict."""
        if more:
            raise PrepareError(f"a wrapped model cannot be loaded with {', '.join(sorted(more))}")
        return self.wrapped_model.load_state(state, strict=strict)

    def pieces(self) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of the parameters, each of one dimension, and the saved buffers."""
        wrapped_model = self.wrapped_model
        values = {n: v for n, v in wrapped_model.buffers() if n in wrapped_model.order}
        values.update({n: p.to_local() for n, p in self._ignored_dtensors()})
        for unit in wrapped_model.flat_params:
            values.update({s.names[0]: unit.local_piece(s, unit.local_values()).clone() for s in unit.slots})
        return {name: value.detach().cpu() for name, value in values.items()}

    def _ignored_dtensors(self) -> Iterator[tuple[str, DTensor]]:
        """Yield (name, parameter) of those that the program has sharded."""
        stand_ins = {id(slot.stand_in) for unit in self.wrapped_model.flat_params for slot in unit.slots}
        for name, parameter in self.wrapped_model.parameters():
            if isinstance(parameter, DTensor) and id(parameter) not in stand_ins:
                yield name, parameter

    def check_pieces(self, pieces: Mapping[str, torch.Tensor]) -> None:
        """Refuse pieces of another model, or of one that was wrapped in another way.

        Raises:
            PrepareError: names the first that does not fit.
        """
        shapes = {name: value.shape for name, value in self.pieces().items()}
        for name in sorted({*shapes, *pieces}):
            saved = pieces[name].shape if name in pieces else None
            if shapes.get(name) != saved:
                raise PrepareError(
                    f"the piece of {name} here has the shape {shapes.get(name)}, and the saved one {saved}",
                    why="local states go back into a model that is wrapped in the same way only",
                    fix="wrap the model as it was, or save with SHARDED_STATE_DICT",
                )

    @torch.no_grad()
    def load_pieces(self, pieces: Mapping[str, torch.Tensor]) -> Any:
        """Load pieces that ``check_pieces`` has accepted."""
        for unit in self.wrapped_model.flat_params:
            unit.reshard()
            for slot in unit.slots:
                unit.local_piece(slot, unit.local_values()).copy_(pieces[slot.names[0]])
        ignored = ((name, parameter.to_local()) for name, parameter in self._ignored_dtensors())
        for name, tensor in (*self.wrapped_model.buffers(), *ignored):
            if name in pieces:
                tensor.copy_(pieces[name])
        return _IncompatibleKeys([], [])

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, stand-in) of every parameter."""
        seen: set[int] = set()
        for name, stand_in in self.wrapped_model.parameters():
            if not remove_duplicate or id(stand_in) not in seen:
                yield name, stand_in
            seen.add(id(stand_in))

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return the stand-ins."""
        return (stand_in for _, stand_in in self.named_parameters())

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, buffer) of every buffer."""
        return self.wrapped_model.buffers()


def wrapped_model_view(wrapped_model: FSDP1WrappedModel) -> Any:
    """Return a view of a wrapped model whose class has the name of the user's class."""
    return type(type(wrapped_model.module).__name__, (WrappedModelView,), {})(wrapped_model)
