"""Tensors that cross from one device to another while a model that is spread over several runs.

A tensor moves when a module on another device is given it, once for each device in a forward of the model. A
container is rebuilt only if something in it moved. One that a module writes to is a cache: it is not looked
into any more, since what is in it belongs to the modules that put it there.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.core import tree
from accelerate.offload.tensor import OffloadedTensor

# What is never looked into; asking for the type is the cheapest question.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice})
Path = tuple[Any, ...]


@dataclass
class _Moved:
    """A tensor and its copy on another device, with the versions that belong together."""

    source: torch.Tensor
    source_version: int | None
    copy: torch.Tensor
    copy_version: int | None

    def is_current(self) -> bool:
        """Whether neither was changed since; of tensors that keep no version that cannot be told."""
        return (
            self.source_version is not None
            and self.source_version == _version(self.source)
            and self.copy_version == _version(self.copy)
        )


@dataclass
class _Watched:
    """A container that a module was given: what the caller has, what the module got, and what was in it."""

    original: Any
    given: Any
    content: Any
    path: Path


@dataclass
class _Call:
    """One running call of a module."""

    module: nn.Module
    input_device: torch.device | None
    watched: list[_Watched] = field(default_factory=list[_Watched])
    copies: list[_Moved] = field(default_factory=list[_Moved])


class _Run(threading.local):
    """What a thread's forward of the model has moved so far."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.moved: dict[tuple[int, torch.device], _Moved] = {}
        self.objects: dict[tuple[int, torch.device], tuple[Any, Any]] = {}
        self.caches: dict[int, Any] = {}


class Crossing:
    """The borders of one model.

    Args:
        devices: where its modules compute.

    Attributes:
        moves: how many tensors were moved, since the model was dispatched.
        caches: (class of a module, path of an argument) of the containers that it writes to.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        self.devices = devices
        self.moves = 0
        self.caches: set[tuple[type, Path]] = set()
        self._run = _Run()

    def __deepcopy__(self, memo: dict[int, Any]) -> Crossing:
        twin = memo[id(self)] = Crossing(set(self.devices))
        twin.caches = set(self.caches)
        return twin

    @property
    def depth(self) -> int:
        """How many calls are running in this thread."""
        return len(self._run.calls)

    def arrive(
        self,
        module: nn.Module,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        skip: frozenset[str] = frozenset(),
        outermost: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call on the device of its module.

        Args:
            module: what is called.
            device: where it computes.
            args, kwargs: what it is called with.
            skip: names of arguments, at any depth, that are left alone.
            outermost: it is the model itself. What lies on one of its devices, inside of containers, is left
                there: the module that needs it will move it.
        """
        call = _Call(module, None)
        walk = _Walk(self, call, device, skip, outermost)
        if outermost:
            call.input_device = walk.first_device((args, kwargs))
        args = tuple([walk.look(value, (place,), 0) for place, value in enumerate(args)])
        kwargs = {
            name: value if name in skip else walk.look(value, (name,), 0) for name, value in kwargs.items()
        }
        if walk.others and (walk.crossed or outermost):
            args = tuple([walk.by_method(value) for value in args])
            kwargs = {n: value if n in skip else walk.by_method(value) for n, value in kwargs.items()}
        self._run.calls.append(call)
        return args, kwargs

    def depart(self, module: nn.Module, output: Any, skip: frozenset[str] = frozenset()) -> Any:
        """Ends a call. The output of the model itself goes to where its inputs were."""
        run = self._run
        if not run.calls or run.calls[-1].module is not module:  # called by hand, without a beginning
            return output
        call = run.calls[-1]
        try:
            self._settle(call)
            if call.input_device is not None:
                walk = _Walk(self, call, call.input_device, skip, outermost=True, result=True)
                output = walk.look(output, (), 0)
        finally:
            self.shorten(len(run.calls) - 1)
        return output

    def shorten(self, depth: int) -> None:
        """Forgets the calls that began after there were ``depth`` of them: they ended, or raised."""
        run = self._run
        del run.calls[depth:]
        if not run.calls:
            run.moved.clear()
            run.objects.clear()
            run.caches.clear()

    def _settle(self, call: _Call) -> None:
        """What the module changed in copies is changed in what the caller has."""
        for watched in call.watched:
            if _is_changed(watched):
                self._run.caches[id(watched.original)] = watched.original
                self.caches.add((type(call.module), watched.path))
                if watched.given is not watched.original:
                    _write_back(watched)
        for moved in call.copies:
            version = _version(moved.copy)
            if version != moved.copy_version and not moved.source.requires_grad:
                with torch.no_grad():
                    moved.source.copy_(moved.copy)
                moved.source_version, moved.copy_version = _version(moved.source), version

    def move(self, tensor: torch.Tensor, device: torch.device, call: _Call) -> torch.Tensor:
        """The tensor on ``device``: the copy of this forward, or a new one."""
        key = id(tensor), device
        known = self._run.moved.get(key)
        if known is None or not known.is_current():
            copy = _copy(tensor, device)
            self.moves += 1
            known = _Moved(tensor, _version(tensor), copy, _version(copy))
            self._run.moved[key] = known
        call.copies.append(known)
        return known.copy

    def by_method(self, value: Any, device: torch.device) -> Any:
        """An object with a ``to`` of its own on ``device``, moved once in a forward."""
        known = self._run.objects.get((id(value), device))
        if known is None:
            known = self._run.objects[id(value), device] = value, value.to(device)
        return known[1]

    def is_cache(self, container: Any, path: Path, call: _Call) -> bool:
        """Whether the module writes to the container, or another one has in this forward."""
        return id(container) in self._run.caches or (type(call.module), path) in self.caches


class _Walk:
    """One look through the arguments or the output of a call."""

    def __init__(
        self,
        crossing: Crossing,
        call: _Call,
        device: torch.device,
        skip: frozenset[str],
        outermost: bool,
        result: bool = False,
    ) -> None:
        self.crossing, self.call, self.device, self.skip = crossing, call, device, skip
        self.outermost, self.result = outermost, result
        self.crossed = self.others = False

    def first_device(self, values: Any) -> torch.device | None:
        """Where the first tensor lies."""
        found = tree.find(lambda leaf: isinstance(leaf, torch.Tensor), values)
        return None if found is None or found.device.type == "meta" else found.device

    def look(self, value: Any, path: Path, depth: int) -> Any:
        """``value`` with its tensors on the device: the very same if nothing had to move."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, depth)
        kind = type(value)
        if kind in _ATOMS:
            return value
        if tree.is_mapping(value):
            return self._mapping(value, path, depth)
        if isinstance(value, list | tuple):
            return self._sequence(value, path, depth)
        self.others = self.others or (hasattr(value, "to") and not isinstance(value, nn.Module | type))
        return value

    def _tensor(self, tensor: torch.Tensor, depth: int) -> torch.Tensor:
        here = tensor.device
        if here == self.device or here.type == "meta" or isinstance(tensor, OffloadedTensor):
            return tensor
        # Deep inside of what the model is given or gives lie caches: what is on a device of its own stays,
        # unless it is given to somebody who has none of these devices.
        own = self.crossing.devices
        deep = self.outermost and depth > self.result
        if deep and here in own and (not self.result or self.device in own):
            return tensor
        self.crossed = True
        return self.crossing.move(tensor, self.device, self.call)

    def _mapping(self, value: Any, path: Path, depth: int) -> Any:
        if self.crossing.is_cache(value, path, self.call):
            return value
        content = dict(value)
        moved = {
            key: item if key in self.skip else self.look(item, (*path, key), depth + 1)
            for key, item in content.items()
        }
        same = all(map(_is, moved.values(), content.values()))
        given = value if same else tree.like_mapping(value, moved)
        self._watch(value, given, dict(moved), path)
        return given

    def _sequence(self, value: Any, path: Path, depth: int) -> Any:
        mutable = isinstance(value, list)
        if mutable and self.crossing.is_cache(value, path, self.call):
            return value
        moved = [self.look(item, (*path, place), depth + 1) for place, item in enumerate(value)]
        given = value if all(map(_is, moved, value)) else tree.same_type(value, moved)
        if mutable:
            self._watch(value, given, moved, path)
        return given

    def _watch(self, original: Any, given: Any, content: Any, path: Path) -> None:
        if not self.result:
            self.call.watched.append(_Watched(original, given, content, path))

    def by_method(self, value: Any) -> Any:
        """An argument that moves by its own ``to``."""
        if isinstance(value, torch.Tensor | nn.Module | type | list | tuple) or not hasattr(value, "to"):
            return value
        return self.crossing.by_method(value, self.device)


def _is(one: Any, other: Any) -> bool:
    return one is other


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that keeps a version, also under inference mode."""
    if not torch.is_inference_mode_enabled():
        return tensor.to(device)
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(device)


def _is_changed(watched: _Watched) -> bool:
    """Whether something was put into a container, taken out, or replaced."""
    now, before = watched.given, watched.content
    if len(now) != len(before):
        return True
    if isinstance(before, dict):
        return any(key not in now or now[key] is not item for key, item in before.items())
    return not all(map(_is, now, before))


def _write_back(watched: _Watched) -> None:
    """Gives the caller's container what the module's has now; what was only moved stays as it was."""
    original, now, before = watched.original, watched.given, watched.content
    if isinstance(before, dict):
        for key in [key for key in original if key not in now]:
            del original[key]
        for key, item in now.items():
            if key not in before or item is not before[key]:
                original[key] = item
        return
    came_from = {id(moved): own for moved, own in zip(before, original, strict=True)}
    original[:] = [came_from.get(id(item), item) for item in now]
