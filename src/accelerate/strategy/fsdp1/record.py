"""A wrapped model by the user's names: its values, whole or in parts, and loading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.module import _IncompatibleKeys

from accelerate.core.errors import PrepareError
from accelerate.strategy.fsdp1.flat import Slot, Unit, inside, places, units, walk
from accelerate.strategy.sharding.whole import distributed

# What torch calls a flat parameter in the module around which it stands.
_FLAT = "_flat_param"
Take = Callable[[torch.Tensor, torch.Tensor], Any]


class Record:
    """What is known of a wrapped model.

    Attributes:
        root: torch's wrapper.
        module: the user's model in it.
        mesh: the processes; its last dimension shares the shards.
        units: torch's flat parameters.
        order: the place of each name in the model's state, as it was before.
        formats: the types of its buffers then.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, order: Iterable[str], formats: Any) -> None:
        self.root, self.module, self.mesh = root, inside(root), mesh
        self.formats = dict(formats)
        self.order = {name: number for number, name in enumerate(order)}
        names: dict[tuple[nn.Module, str], list[str]] = {}
        for prefix, module in walk(self.module):
            names.setdefault((module, ""), []).append(prefix)
        self.units: list[Unit] = []
        self.owner: dict[torch.Tensor, Unit] = {}
        self.slot: dict[torch.Tensor, Slot] = {}
        for unit in units(root):
            self.units.append(unit)
            for pairs, start, shape in places(unit):
                called = [f"{prefix}{name}" for module, name in pairs for prefix in names[module, ""]]
                called.sort(key=self._rank)
                unit.slots.append(Slot(tuple(called), start, shape, self._stand_in(unit, shape)))
            self.owner.update(dict.fromkeys(unit.parameters, unit))
            if unit.keeps_originals:
                self.slot.update(zip(unit.parameters, unit.slots, strict=True))
            self.slot.update({slot.stand_in: slot for slot in unit.slots})

    def _rank(self, name: str) -> int:
        return self.order.get(name, len(self.order))

    def _stand_in(self, unit: Unit, shape: torch.Size) -> torch.Tensor:
        one = torch.empty((), dtype=unit.flat.dtype, device=unit.flat.device)
        if not unit.cut:
            return one.expand(shape)
        size, place = self.mesh.size(-1), self.mesh.get_local_rank(-1)
        rows = -(-shape[0] // size)
        mine = max(0, min(rows, shape[0] - place * rows))
        strides = torch.empty(shape, device="meta").stride()
        cut = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        local = one.expand(mine, *shape[1:])
        return DTensor.from_local(local, self.mesh, cut, run_check=False, shape=shape, stride=strides)

    # --- names

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, stand-in) of every parameter, and what is not wrapped as it is; ties have several names."""
        found = {name: slot.stand_in for unit in self.units for slot in unit.slots for name in slot.names}
        for prefix, module in walk(self.module):
            for name, own in module._parameters.items():
                if own is not None and not name.startswith(_FLAT):
                    found.setdefault(f"{prefix}{name}", own)
        yield from sorted(found.items(), key=lambda pair: self._rank(pair[0]))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer)."""
        for prefix, module in walk(self.module):
            yield from ((f"{prefix}{n}", b) for n, b in module._buffers.items() if b is not None)

    # --- values

    @torch.no_grad()
    def state(self, take: Take) -> dict[str, Any]:
        """The model's state; a collective.

        Args:
            take: ``part``, ``on_host`` or ``nothing``: makes of a parameter what the state has of it, from
                its whole value, which is gone afterwards, and its stand-in.
        """
        found: dict[str, Any] = {}
        for prefix, module in walk(self.module):
            module._save_to_state_dict(found, prefix, keep_vars=take is part)
            found.pop(f"{prefix}{_FLAT}", None)
        if take is on_host:
            found = {n: v.cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in found.items()}
        for unit in self.units:
            whole = unit.whole(unit.local())
            for slot in unit.slots:
                value = take(unit.view(slot, whole), slot.stand_in)
                found.update(dict.fromkeys(slot.names, value))
            del whole
        if take is nothing:
            return {}
        for prefix, module in reversed(list(walk(self.module))):
            for hook in module._state_dict_hooks.values():
                hook(module, found, prefix, {})
        for name, kind in self.formats.items():
            if name in found and found[name].dtype != kind:
                found[name] = found[name].to(kind)
        return dict(sorted(found.items(), key=lambda pair: self._rank(pair[0])))

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads a state whose values are whole or distributed; a collective.

        Returns:
            Missing and unexpected names.

        Raises:
            RuntimeError: with ``strict``, when there are some; and when a shape differs, as torch's own.
        """
        left: Any = dict(state)
        wrong, missing = [], []
        for unit in self.units:
            unit.settle()
            for slot in unit.slots:
                given = [left.pop(name, None) for name in slot.names]
                missing += [n for n, value in zip(slot.names, given, strict=True) if value is None]
                value = next((value for value in reversed(given) if value is not None), None)
                if value is not None and value.shape != slot.shape:
                    wrong.append(f"size mismatch for {slot.names[0]}: the state has shape "
                                 f"{tuple(value.shape)}, the model {tuple(slot.shape)}")  # fmt: skip
                elif value is not None:
                    copy(unit, slot, value, unit.local())
        unexpected = self._load_rest(left, getattr(state, "_metadata", {}), missing, wrong)
        if strict and (missing or unexpected):
            wrong += [f"Missing key(s) in state_dict: {missing}"] if missing else []
            wrong += [f"Unexpected key(s) in state_dict: {unexpected}"] if unexpected else []
        if wrong:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.module).__name__}:\n\t" + "\n\t".join(wrong)
            )
        return _IncompatibleKeys(missing, unexpected)

    def _load_rest(self, state: Any, versions: Any, missing: list[str], wrong: list[str]) -> list[str]:
        """Buffers, extra states and what is not wrapped, by the modules' own way; what nobody took."""
        wrapped = {name for unit in self.units for slot in unit.slots for name in slot.names}
        taken: set[str] = set()
        for prefix, module in walk(self.module):
            own = {n: v for n, v in state.items() if n.startswith(prefix)}
            lacks: list[str] = []
            told = dict(versions.get(prefix[:-1], {}))
            module._load_from_state_dict(own, prefix, told, False, lacks, [], wrong)
            missing += [n for n in lacks if n not in wrapped and n != f"{prefix}{_FLAT}"]
            names = {*module._parameters, *module._buffers, "_extra_state"}
            taken |= {n for n in own if n[len(prefix) :] in names}
        return [name for name in state if name not in taken]


@torch.no_grad()
def copy(unit: Unit, slot: Slot, value: Any, local: torch.Tensor) -> None:
    """Copies this process's part of a whole or distributed value into a piece."""
    low, high = unit.here(slot)
    full = value.full_tensor() if isinstance(value, DTensor) else value
    unit.piece(slot, local).copy_(full.reshape(-1)[low:high])


def part(value: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """A whole value as checkpoints in parts have it: cut by rows where its parameter is cut."""
    return distributed(value, stand_in) if isinstance(stand_in, DTensor) else value.clone()


def on_host(value: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """A copy of a whole value on the host."""
    return value.to("cpu", copy=True)


def nothing(value: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Of a rank that keeps nothing."""


class Named:
    """A wrapped model as checkpoints in parts see it: a module with the user's names."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def state_dict(self) -> dict[str, Any]:
        """In parts."""
        return self.record.state(part)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **more: Any) -> Any:
        """From parts or whole values."""
        if more:
            raise PrepareError(f"a wrapped model cannot be loaded with {', '.join(sorted(more))}")
        return self.record.load(state, strict=strict)

    def pieces(self) -> dict[str, torch.Tensor]:
        """What lies here: pieces of the parameters, each of one dimension, and saved buffers."""
        record = self.record
        found = {n: v for n, v in record.buffers() if n in record.order}
        for unit in record.units:
            found.update({s.names[0]: unit.piece(s, unit.local()).clone() for s in unit.slots})
        return {name: value.detach().cpu() for name, value in found.items()}

    def check_pieces(self, found: Mapping[str, torch.Tensor]) -> None:
        """Refuses pieces of another model, or of one that was wrapped in another way.

        Raises:
            PrepareError: names the first that does not fit.
        """
        own = {name: value.shape for name, value in self.pieces().items()}
        for name in sorted({*own, *found}):
            theirs = found[name].shape if name in found else None
            if own.get(name) != theirs:
                raise PrepareError(
                    f"the piece of {name} here has the shape {own.get(name)}, and the saved one {theirs}",
                    why="local states go back into a model that is wrapped in the same way only",
                    fix="wrap the model as it was, or save with SHARDED_STATE_DICT",
                )

    @torch.no_grad()
    def load_pieces(self, found: Mapping[str, torch.Tensor]) -> Any:
        """Puts pieces back that ``check_pieces`` let pass."""
        for unit in self.record.units:
            unit.settle()
            for slot in unit.slots:
                unit.piece(slot, unit.local()).copy_(found[slot.names[0]])
        for name, buffer in self.record.buffers():
            if name in found:
                buffer.copy_(found[name])
        return _IncompatibleKeys([], [])

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, stand-in)."""
        seen: set[int] = set()
        for name, stand_in in self.record.parameters():
            if not remove_duplicate or id(stand_in) not in seen:
                yield name, stand_in
            seen.add(id(stand_in))

    def parameters(self) -> Iterator[torch.Tensor]:
        """The stand-ins."""
        return (stand_in for _, stand_in in self.named_parameters())

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer)."""
        return self.record.buffers()


def named(record: Record) -> Any:
    """It, of a class that is called as the user's."""
    return type(type(record.module).__name__, (Named,), {})(record)
