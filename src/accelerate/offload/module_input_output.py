"""Moving the arguments and outputs of modules between devices.

``move_arguments`` brings the arguments of one call to one device. In a model that lies on several devices,
``ModuleInputOutputMover`` copies a tensor when a module on another device gets it, once for each device in a
forward of the model. A container is rebuilt only if something in it moved. One that a module writes to is a
cache: it is not searched any more, since its tensors belong to the modules that put them there.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.core import tree
from accelerate.core.lazy_names import get_override
from accelerate.offload.module_tensors import check_device_same
from accelerate.offload.offloaded_tensor import OffloadedTensor, version_of
from accelerate.world.local_tensor_trees import send_to_device

# Types without tensors; a lookup of the type is the cheapest test.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice})
Path = tuple[Any, ...]


Keys = str | list[str] | None
_SCALARS = (str, int, float, bool, type(None))


def send_values(values: Any, device: Any, skip_keys: Keys = None) -> Any:
    """Move values by ``accelerate.hooks.send_to_device``, also where a program has replaced it.

    Some do so where two devices cannot copy to each other: theirs goes by way of host memory.
    """
    send = get_override("accelerate.hooks", "send_to_device", send_to_device)
    return send(values, device, skip_keys=skip_keys)


def move_arguments(values: Any, device: torch.device, skip_keys: Keys = None) -> Any:
    """Return a tuple or dict of arguments with all tensors on ``device``; the same one where all are there.

    A list that a module is to change is one of these: it gets a copy only if something in it has to move.
    """
    if not isinstance(values, dict):
        for value in values:
            if not _is_on_device(value, device):
                return send_values(values, device, skip_keys)
        return values
    skipped = (skip_keys,) if isinstance(skip_keys, str) else skip_keys or ()
    for name, value in values.items():
        if name not in skipped and not _is_on_device(value, device):
            return send_values(values, device, skip_keys)
    return values


def _is_on_device(value: Any, device: torch.device) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device == device or check_device_same(value.device, device)
    if isinstance(value, _SCALARS):
        return True
    if isinstance(value, list | tuple):
        return all(_is_on_device(item, device) for item in value)
    if isinstance(value, dict) and not hasattr(value, "to"):
        return all(_is_on_device(item, device) for item in value.values())
    return not (hasattr(value, "to") or isinstance(value, Mapping))


# --------------------------------------------------------------------------------- between many devices


@dataclass
class _VersionedTensorCopy:
    """The copy of a tensor on another device, with the versions of both that belong together.

    It is used again while the tensor lives: a copy of what nobody has any more only takes up memory.
    """

    source: weakref.ref[torch.Tensor]
    source_version: int | None
    copy: torch.Tensor
    copy_version: int | None

    def is_current(self, source: torch.Tensor) -> bool:
        """Return True when neither was changed since; False for tensors without a version.

        A copy that was made without gradients, under ``no_grad`` for example, would cut those of its source.
        """
        cuts = torch.is_grad_enabled() and source.requires_grad and not self.copy.requires_grad
        return (
            not cuts
            and self.source_version is not None
            and self.source_version == version_of(source)
            and self.copy_version == version_of(self.copy)
        )


@dataclass
class _InputContainerCopy:
    """A container among a module's inputs: the caller's, the one passed to the module, and its content."""

    original: Any
    passed: Any
    content: Any
    path: Path


@dataclass
class _ActiveModuleForward:
    """One running call of a module.

    Attributes:
        device: its inputs are there.
        input_device: its output goes back there; None leaves it where it is.
    """

    module: nn.Module
    device: torch.device
    input_device: torch.device | None = None
    watched: list[_InputContainerCopy] = field(default_factory=list[_InputContainerCopy])
    copies: list[tuple[torch.Tensor, _VersionedTensorCopy]] = field(
        default_factory=list[tuple[torch.Tensor, _VersionedTensorCopy]]
    )


class _ThreadForwardCopies(threading.local):
    """The calls and copies of a thread's running forward of the model."""

    def __init__(self) -> None:
        self.calls: list[_ActiveModuleForward] = []
        self.copies: dict[tuple[int, torch.device], _VersionedTensorCopy] = {}
        self.caches: dict[int, Any] = {}


class ModuleInputOutputMover:
    """The moves of inputs and outputs between the devices of one model.

    Args:
        devices: where its modules compute.

    Attributes:
        caches: (class of a module, path of an argument) of the containers that it writes to.
        thread: the calls that are running in this thread, the innermost last, and their copies.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        self.devices = devices
        self.caches: set[tuple[type, Path]] = set()
        self.thread = _ThreadForwardCopies()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleInputOutputMover:
        twin = memo[id(self)] = ModuleInputOutputMover(set(self.devices))
        twin.caches = set(self.caches)
        return twin

    def move_inputs(
        self,
        module: nn.Module,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        skip: frozenset[str] = frozenset(),
        outermost: bool = False,
        returns: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the arguments of a call to the device of its module.

        Args:
            module: what is called.
            device: where it computes.
            args, kwargs: what it is called with.
            skip: names of arguments, at any depth, that are left alone.
            outermost: it is the model itself. What lies on one of its devices, inside of containers, is left
                there: the module that needs it will move it.
            returns: the output goes back to the device of the inputs.
        """
        call = _ActiveModuleForward(module, device)
        walk = _ArgumentWalk(self, call, device, skip, outermost)
        if returns:
            first = tree.find_leaf(lambda leaf: isinstance(leaf, torch.Tensor), (args, kwargs))
            call.input_device = None if first is None or first.device.type == "meta" else first.device
        args = tuple([walk.visit(value, (place,), 0) for place, value in enumerate(args)])
        kwargs = {
            name: value if name in skip else walk.visit(value, (name,), 0) for name, value in kwargs.items()
        }
        self.thread.calls.append(call)
        return args, kwargs

    def move_output(self, module: nn.Module, output: Any, skip: frozenset[str] = frozenset()) -> Any:
        """End a call, and move its output to the device of its inputs, if it ``returns``."""
        run = self.thread
        if not run.calls or run.calls[-1].module is not module:  # called by hand, without a beginning
            return output
        call = run.calls[-1]
        try:
            self._write_back_changes(call)
            if call.input_device is not None:
                walk = _ArgumentWalk(self, call, call.input_device, skip, outermost=True, result=True)
                output = walk.visit(output, (), 0)
        finally:
            self.drop_calls(len(run.calls) - 1)
        return output

    def drop_calls(self, depth: int) -> None:
        """Drop the records of calls deeper than ``depth``: they ended, or raised."""
        run = self.thread
        del run.calls[depth:]
        if not run.calls:
            run.copies.clear()
            run.caches.clear()

    def _write_back_changes(self, call: _ActiveModuleForward) -> None:
        """Apply the module's changes of copies to the caller's tensors and containers."""
        for watched in call.watched:
            if _is_changed(watched):
                for container in (watched.original, watched.passed):
                    self.thread.caches[id(container)] = container
                self.caches.add((type(call.module), watched.path))
                if watched.passed is not watched.original:
                    _write_back(watched)
        for source, moved in call.copies:
            version = version_of(moved.copy)
            with_grad = moved.copy.requires_grad and torch.is_grad_enabled()
            # autograd refuses to change a leaf, also where nothing is dispatched
            if version != moved.copy_version and not (with_grad and source.requires_grad and source.is_leaf):
                with torch.set_grad_enabled(with_grad):
                    source.copy_(moved.copy)
                moved.source_version, moved.copy_version = version_of(source), version


class _ArgumentWalk:
    """One walk over the arguments or the output of a call."""

    def __init__(
        self,
        mover: ModuleInputOutputMover,
        call: _ActiveModuleForward,
        device: torch.device,
        skip: frozenset[str],
        outermost: bool,
        result: bool = False,
    ) -> None:
        self.mover, self.call, self.device, self.skip = mover, call, device, skip
        self.outermost, self.is_output = outermost, result

    def visit(self, value: Any, path: Path, depth: int) -> Any:
        """Return ``value`` with its tensors on the device: the same object if nothing had to move."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, depth)
        kind = type(value)
        if kind in _ATOMS:
            return value
        if tree.is_mapping(value):
            # One with a `to` of its own: `send_to_device` calls it too, and its layers share what it changes.
            if not (depth or self.is_output or isinstance(value, dict)) and hasattr(value, "to"):
                mapping: Any = value
                return value if _is_on_device(dict(value), self.device) else mapping.to(self.device)
            return self._mapping(value, path, depth)
        if kind not in (list, tuple) and not isinstance(value, nn.Module | type):
            move = getattr(value, "to", None)
            if callable(move):  # the class knows best: the lengths in a PackedSequence stay on the CPU
                return move(self.device)
        return self._sequence(value, path, depth) if isinstance(value, list | tuple) else value

    def _tensor(self, tensor: torch.Tensor, depth: int) -> torch.Tensor:
        device = tensor.device
        if device == self.device or device.type == "meta" or isinstance(tensor, OffloadedTensor):
            return tensor
        # Nested containers of the model's inputs may be caches: what is on a device of the model stays there.
        if self.outermost and not self.is_output and depth > 0 and device in self.mover.devices:
            return tensor
        copies, key = self.mover.thread.copies, (id(tensor), self.device)
        if key not in copies or not copies[key].is_current(tensor):
            copy = _copy(tensor, self.device)
            source = weakref.ref(tensor, lambda _: copies.pop(key, None))
            copies[key] = _VersionedTensorCopy(source, version_of(tensor), copy, version_of(copy))
        self.call.copies.append((tensor, copies[key]))
        return copies[key].copy

    def _mapping(self, value: Any, path: Path, depth: int) -> Any:
        if self._is_cache(value, path):
            return value
        content = dict(value)
        moved = {
            key: item if key in self.skip else self.visit(item, (*path, key), depth + 1)
            for key, item in content.items()
        }
        same = all(map(operator.is_, moved.values(), content.values()))
        passed = value if same else tree.make_mapping_like(value, moved)
        self._watch_container(value, passed, dict(moved), path)
        return passed

    def _sequence(self, value: Any, path: Path, depth: int) -> Any:
        mutable = isinstance(value, list)
        if mutable and self._is_cache(value, path):
            return value
        moved = [self.visit(item, (*path, place), depth + 1) for place, item in enumerate(value)]
        passed = value if all(map(operator.is_, moved, value)) else tree.make_same_type(value, moved)
        if mutable:
            self._watch_container(value, passed, moved, path)
        return passed

    def _is_cache(self, container: Any, path: Path) -> bool:
        """Return True when the module writes to the container, or another one has in this forward."""
        caches = self.mover.thread.caches
        # What the caller gives to the model may be new each time; its caches are left in place by `_tensor`.
        if not self.outermost and (type(self.call.module), path) in self.mover.caches:
            caches[id(container)] = container
        return id(container) in caches

    def _watch_container(self, original: Any, passed: Any, content: Any, path: Path) -> None:
        if not self.is_output:
            self.call.watched.append(_InputContainerCopy(original, passed, content, path))


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that keeps a version, also under inference mode."""
    if not torch.is_inference_mode_enabled():
        return send_values(tensor, device)
    with torch.inference_mode(False), torch.no_grad():
        return send_values(tensor, device)


def _is_changed(watched: _InputContainerCopy) -> bool:
    """Return True when an item of a container was added, removed or replaced."""
    now, before = watched.passed, watched.content
    if len(now) != len(before):
        return True
    if isinstance(before, dict):
        return any(key not in now or now[key] is not item for key, item in before.items())
    return not all(map(operator.is_, now, before))


def _write_back(watched: _InputContainerCopy) -> None:
    """Copy the module's changes to the caller's container; items that were only moved stay as they were."""
    original, now, before = watched.original, watched.passed, watched.content
    if isinstance(before, dict):
        for key in [key for key in original if key not in now]:
            del original[key]
        for key, item in now.items():
            if key not in before or item is not before[key]:
                original[key] = item
        return
    came_from = {id(moved): original_item for moved, original_item in zip(before, original, strict=True)}
    original[:] = [came_from.get(id(item), item) for item in now]
