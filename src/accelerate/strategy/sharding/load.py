"""Where the values of a model come from when it is sharded: rank 0, files that all have mapped, or later.

A parameter that every rank has mapped from the same place of the same file is not sent: each rank copies its
own part out of the file. A parameter without values on any rank gets memory for its part, and its values by
``load_checkpoint_in_model`` or ``load_state``; a forward before that is refused. Both are sharded on the meta
device, so that they are never whole in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError
from accelerate.strategy.sharding.grads import groups
from accelerate.strategy.sharding.load_files import Files
from accelerate.strategy.sharding.whole import part_of

_EMPTY = b"no values"
Marks = tuple[bytes, ...]
Places = dict[tuple[nn.Module, str], torch.Tensor | None]


@dataclass(frozen=True)
class Told:
    """What a process tells the others of its model.

    Attributes:
        digest: of names, shapes and types.
        leader: the first process of its mesh, whose values count.
        marks: of each parameter and buffer: no values, a part of a file, or others (empty).
    """

    digest: str
    leader: int
    marks: Marks


def marks(model: nn.Module) -> Marks:
    """See ``Told``."""
    files = Files()
    plain = {id(p) for p in model.parameters() if type(p) is nn.Parameter}
    return tuple(_EMPTY if t.is_meta else files.mark(t) if id(t) in plain else b"" for t in _tensors(model))


def _tensors(model: nn.Module) -> tuple[torch.Tensor, ...]:
    return (*model.parameters(), *model.buffers())


def unlike(every: Sequence[Told]) -> int | None:
    """A leader without values that another leader of the same parameters has."""
    first: dict[str, int] = {}
    for told in every:
        other = first.setdefault(told.digest, told.leader)
        sides = [tuple(m == _EMPTY for m in every[leader].marks) for leader in (told.leader, other)]
        if sides[0] != sides[1]:
            return told.leader if any(sides[0]) else other
    return None


class Values:
    """Where the values of one model come from, while it is sharded.

    Args:
        model: the model.
        every: what each rank told; none: all values are here.
        rank: this one.
        initialized: a function makes values where the leader has none.

    Raises:
        PrepareError: a buffer that files never hold has no values.
    """

    def __init__(
        self, model: nn.Module, every: Sequence[Told] = (), rank: int = 0, *, initialized: bool = False
    ) -> None:
        # What does not come from the leader: the part of a file that it is, or None where values come later.
        self._sources: Any = WeakIdKeyDictionary()
        self._empty: list[torch.Tensor] = []
        if not every:
            return
        # Processes of other meshes too, for what is not distributed is the same there.
        mine = [told.marks for told in every if told.digest == every[rank].digest]
        for tensor, first, *found in zip(
            _tensors(model), every[every[rank].leader].marks, *mine, strict=True
        ):
            if first == _EMPTY and not initialized:
                self._sources[tensor] = None
            elif first not in (b"", _EMPTY) and len(set(found)) == 1:
                self._sources[tensor] = tensor
        _refuse_hollow(model, self._sources)

    def origin(self, tensor: torch.Tensor) -> str:
        """``"sent"`` by the leader; ``"here"`` on every rank, in a file; or to be filled ``"later"``."""
        if tensor not in self._sources:
            return "sent"
        return "later" if self._sources[tensor] is None else "here"

    def travels(self, tensor: torch.Tensor) -> bool:
        """Whether the leader sends it."""
        return not tensor.is_meta and tensor not in self._sources

    def stand_in(
        self, old: torch.Tensor, dtype: torch.dtype, device: torch.device, *, whole: bool
    ) -> torch.Tensor | None:
        """What takes the place of a tensor whose values do not come from the leader; None for any other.

        Args:
            old: the tensor.
            dtype: what it becomes.
            device: where this process computes.
            whole: it will not be sharded.
        """
        if old not in self._sources or (whole and self._sources[old] is not None):
            return None
        like: Any = old.detach()
        make = torch.zeros_like if whole else torch.empty_like
        made: Any = make(like, dtype=dtype, device=device if whole else "meta")
        if isinstance(old, nn.Parameter):
            made = nn.Parameter(made, requires_grad=old.requires_grad)
        if whole:
            self._empty.append(made)
        self._sources[made] = self._sources[old]
        return made

    def waiting(self, modules: Iterable[nn.Module]) -> Places:
        """The parameters of ``modules`` that are on the meta device now, and what fills them."""
        tables = ((module, name, p) for module in modules for name, p in module._parameters.items())
        hollow = ((m, name, p) for m, name, p in tables if p is not None and p.is_meta and p in self._sources)
        return {(module, name): self._sources[p] for module, name, p in hollow}

    @torch.no_grad()
    def fill(self, part: nn.Module, waiting: Places) -> None:
        """Gives parameters memory, after ``part`` has been sharded; and what the files hold of them."""
        for place in (place for group in groups(part) for place in group.fsdp_params) if waiting else ():
            key = place._module_info.module, place._module_info.param_name
            if key in waiting and place.sharded_param.is_meta:
                source = waiting[key]
                _give_memory(place, None if source is None else part_of(source, place.sharded_param))
                if source is None:
                    self._empty.append(place.sharded_param)

    def watch(self, model: nn.Module) -> None:
        """Refuses a forward of ``model``, and to save it, before everything has its values."""
        if self._empty:
            _GATES[model] = _Gate(model, self._empty)


def _give_memory(place: Any, values: torch.Tensor | None) -> None:
    """Gives this rank's part of a parameter memory, by torch's record of it; zeros if there are no values."""
    old, dim = place.sharded_param, place.fsdp_placement.dim
    size = place.padded_sharded_param_size
    length = old.to_local().shape[dim] if old.to_local().numel() else 0
    padded = torch.empty(
        size,
        dtype=old.dtype,
        device="cpu" if place.offload_to_cpu else place.device,
        pin_memory=place.pin_memory,
    )
    mine, rest = padded.narrow(dim, 0, length), padded.narrow(dim, length, size[dim] - length)
    # Each page is written to once: that is most of the time this takes.
    rest.zero_()
    _ = mine.zero_() if values is None else mine.copy_(values)
    # Not DTensor.from_local, which brings what rests on the host to the device.
    new = place.to_sharded_dtensor(mine)
    # The same object gets the memory: whoever holds the parameter has it.
    torch.utils.swap_tensors(old, nn.Parameter(new, requires_grad=old.requires_grad))
    place._sharded_param_data = padded.view(-1)
    place.reset_sharded_param()


class _Gate:
    """Lets nobody compute with a model before its tensors have been written to.

    Writing in place gives a tensor another version: the distributed one, or the part of it that is here. What
    is written past both counts is not zero.
    """

    def __init__(self, model: nn.Module, empty: Iterable[torch.Tensor]) -> None:
        self._empty = [(tensor, _versions(tensor)) for tensor in empty if _here(tensor).numel()]
        hook: Any = torch.compiler.disable(self._check)
        self._handle = model.register_forward_pre_hook(hook, prepend=True)

    @torch.no_grad()
    def names(self, model: nn.Module) -> list[str]:
        """Those of what has not been written to."""
        left = [_here(t) for t, versions in self._empty if _versions(t) == versions and not _here(t).any()]
        places = {tensor.data_ptr() for tensor in left}
        return [name for name, tensor in _named(model) if _here(tensor).data_ptr() in places]

    def _check(self, model: nn.Module, _: Any) -> None:
        refuse_hollow(self.names(model))
        self._handle.remove()
        _GATES.pop(model, None)


_GATES: weakref.WeakKeyDictionary[nn.Module, _Gate] = weakref.WeakKeyDictionary()


def hollow(model: nn.Module) -> list[str]:
    """Names of tensors of a sharded model whose parts on this process have no values yet."""
    gate = _GATES.get(model)
    return gate.names(model) if gate is not None else []


def refuse_hollow(names: Iterable[str]) -> None:
    """Refuses to use tensors without values.

    Raises:
        PrepareError: there are some.
    """
    found = list(dict.fromkeys(names))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise PrepareError(
            f"there are no values in {', '.join(found[:3])}{more}",
            why="the model was on the meta device when it was prepared, on rank 0 too, and nothing has been "
            "loaded into it since",
            fix="load_checkpoint_in_model(model, folder), before prepare or after it, or give the plugin a "
            "param_init_fn",
        )


def _named(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this process: of a distributed tensor the very part, which has a version of its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, _here(tensor)._version


def _refuse_hollow(model: nn.Module, sources: Mapping[torch.Tensor, Any]) -> None:
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer in sources:
                raise PrepareError(
                    f"the buffer {prefix}{'.' if prefix else ''}{name} is on the meta device, on rank 0 too",
                    why="it is not persistent, so no file holds it: the model would compute with zeros",
                    fix="make the model in 'with init_empty_weights():', which leaves buffers real",
                )
