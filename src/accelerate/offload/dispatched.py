"""The hook of a dispatched model: inputs cross to the module's device, and its block of weights is brought.

To others it is an ``AlignDevicesHook``: it has its attributes, and does by hand what that one does.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from accelerate.offload.align import AlignDevicesHook, Keys
from accelerate.offload.assign import as_device, table_of
from accelerate.offload.block import Block, moved
from accelerate.offload.crossing import Crossing
from accelerate.offload.hooks import _hooked_forward, add_hook_to_module
from accelerate.offload.pager import Pager
from accelerate.offload.source import OffloadError
from accelerate.offload.tensor import OffloadedTensor
from accelerate.offload.values import real


class DispatchedHook(AlignDevicesHook):
    """What ``dispatch_model`` puts on a module.

    Args:
        device: where the module computes.
        weights_map: the weights of the module that are offloaded, by their names in it.
        crossing: the borders of the model, if the inputs of this module may come across one.
        root: it is the model itself: its outputs go back to where its inputs were.
        pager: what brings weights, if a forward of this module is one around blocks.

    Attributes:
        block: the weights that are needed while the module runs.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        weights_map: Mapping[str, Any] | None = None,
        offload: bool = False,
        offload_buffers: bool = False,
        skip_keys: Keys = None,
        crossing: Crossing | None = None,
        root: bool = False,
        pager: Pager | None = None,
    ) -> None:
        super().__init__(
            device,
            offload=offload,
            io_same_device=root,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
        )
        self._crossing, self._root, self._pager = crossing, root, pager
        self._watched: list[tuple[dict[str, Any], str, nn.Module]] = []
        self.block: Block | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchedHook:
        twin = memo[id(self)] = copy.copy(self)
        for name, value in vars(self).items():
            if name in self.__getstate__():
                setattr(twin, name, copy.deepcopy(value, memo))
        twin._begin()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused.

        Raises:
            OffloadError: always: what a hook works with belongs to this process.
        """
        raise OffloadError(
            "a dispatched model cannot be pickled",
            why="its hooks hold streams, threads and memory of this process",
            fix="save its values, torch.save(model.state_dict(), ...), or take the hooks off first: "
            "remove_hook_from_submodules(model)",
        )

    def __copy__(self) -> DispatchedHook:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    # --- on and off

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Remembers where the offloaded tensors belong; they have been offloaded already."""
        owned = [tensor for _, _, _, tensor in self._offloadable(module)]
        if self.offload and not any(isinstance(tensor, OffloadedTensor) for tensor in owned):
            return super().init_hook(module)  # it comes back, or goes to another module: they have real ones
        self._module = weakref.ref(module)
        if self.offload:
            self.original_devices = {key: _home(tensor) for key, _, _, tensor in self._tensors(module)}
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Puts real tensors back: those in memory as they lie there, those in files mapped from them."""
        for _, owner, name, tensor in list(self._offloadable(module)):
            if isinstance(tensor, OffloadedTensor):
                table_of(owner, name)[name] = restored(tensor)
        _send_home(module)
        self.block = self._pager = self._crossing = None
        self._watched = []
        for name in ("to", "_apply"):
            vars(module).pop(name, None)
        return module

    # --- around a forward

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Inputs to the device; weights that no block has brought are brought one by one."""
        if self.offload:
            self._enter(module, bool(args or kwargs))
        if self._crossing is not None and (args or kwargs):
            device = as_device(self.execution_device or 0)
            try:
                return self._crossing.arrive(module, device, args, kwargs, self._skip, self._root)
            except BaseException:
                self.abort(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Drops what ``pre_forward`` has brought; the output of the model goes to where its inputs were."""
        if self.offload:
            self._leave()
        return output if self._crossing is None else self._crossing.depart(module, output, self._skip)

    def abort(self, module: nn.Module) -> None:
        """The forward raised: drops what ``pre_forward`` has brought."""
        if self.offload:
            self._leave()

    @property
    def _skip(self) -> frozenset[str]:
        keys = self.skip_keys
        return frozenset((keys,) if isinstance(keys, str) else keys or ())

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the module with its block brought, whatever hooks others have added to it."""
        pager, block, crossing = self._pager, self.block, self._crossing
        if pager is not None and as_device(self.execution_device or 0) != pager.device:
            pager = None  # somebody has assigned another device: weights go there one by one
        depth = 0 if crossing is None else crossing.depth
        for place, (table, key, watched) in enumerate(self._watched):
            if table.get(key) is not watched:
                self._watched[place] = table, key, follow(watched, table.get(key))
        if pager is not None:
            pager.enter()
        try:
            if pager is None or block is None:
                return _hooked_forward(module, *args, **kwargs)
            pager.open(block)
            try:
                if not torch.is_grad_enabled():
                    return _hooked_forward(module, *args, **kwargs)
                if not block.armed:
                    arm(block)
                with pager.saving():
                    return _hooked_forward(module, *args, **kwargs)
            finally:
                pager.close(block)
        finally:
            if crossing is not None:
                crossing.shorten(depth)
            if pager is not None:
                pager.leave()


# Clients look a hook's class up in accelerate.hooks by this name, and make another from its attributes.
DispatchedHook.__name__ = AlignDevicesHook.__name__


def _home(tensor: torch.Tensor) -> torch.device:
    """Where a tensor belongs, as clients are told: meta for those in checkpoints."""
    if isinstance(tensor, OffloadedTensor):
        return torch.device("cpu" if tensor.source.in_memory else "meta")
    return tensor.device


def _send_home(module: nn.Module) -> None:
    """What stood on the device beside offloaded weights goes back, here and in parts that have no hook."""
    parts = [part for part in module.modules() if part is module or hook_of(part) is None]
    tables: list[dict[str, Any]] = [table for part in parts for table in (part._parameters, part._buffers)]
    for table in tables:
        for key, tensor in table.items():
            if hasattr(tensor, "_belongs"):
                sent = moved(tensor, tensor._belongs)
                del tensor._belongs
                if sent is not tensor:
                    tensor._sent = sent
            if hasattr(tensor, "_sent"):  # it may stand in several places
                table[key] = tensor._sent


def restored(stand_in: Any) -> torch.Tensor:
    """The real tensor of a stand-in; the same one for all places where it stands."""
    known = vars(stand_in).get("_restored")
    if known is None:
        known = real(stand_in, stand_in.source.host(), stand_in.source)
        stand_in._restored = known
    return known


# ------------------------------------------------------------------------------------------------ attached


def attach(module: nn.Module, hook: DispatchedHook) -> None:
    """Runs the hook around the forward of ``module``, around the hooks that it has already."""
    add_hook_to_module(module, hook, append=True)
    forward = functools.partial(_dispatched_forward, module)
    module.forward = functools.update_wrapper(forward, vars(module)["_old_forward"])


def mark(module: Any, hook: DispatchedHook) -> None:
    """Shows the hook to those who look for it. The forward stays as it is: a block brings the weights."""
    if "_hf_hook" in vars(module):
        add_hook_to_module(module, hook, append=True)
        return
    hook.init_hook(module)
    module._hf_hook = hook
    module._old_forward = module.forward


def arm(block: Block) -> None:
    """From now on parts of a block that run while it is closed bring their own weights.

    What is checkpointed inside a block runs again in the backward pass, when its forward is over.
    """
    block.armed = True
    for module in block.modules():
        if hook_of(module) is not None and "forward" not in vars(module):
            forward = functools.partial(_dispatched_forward, module)
            module.forward = functools.update_wrapper(forward, vars(module)["_old_forward"])


def watch(model: nn.Module) -> None:
    """From now on a module that somebody replaces hands its part on to the new one at the next forward."""
    root = hook_of(model)
    assert root is not None
    for module in model.modules():
        for key, child in module._modules.items():
            hook = None if child is None else hook_of(child)
            if child is not None and hook is not None and (hook.block or hook._crossing):
                root._watched.append((module._modules, key, child))


def follow(old: nn.Module, new: nn.Module | None) -> Any:
    """Gives a module that took the place of another one its hook and its block."""
    before = hook_of(old)
    if new is None or before is None or hook_of(new) is not None:
        return new
    device = as_device(before.execution_device or 0)
    hook = DispatchedHook(device, skip_keys=before.skip_keys, crossing=before._crossing, pager=before._pager)
    hook.block = before.block
    if hook.block is None:
        new.to(device)
    else:
        hook.block.take(new)
    attach(new, hook)
    return new


def hook_of(module: nn.Module) -> DispatchedHook | None:
    """The hook that dispatching has put on a module."""
    found = vars(module).get("_hf_hook")
    for hook in getattr(found, "hooks", (found,)):
        if isinstance(hook, DispatchedHook):
            return hook
    return None


def _dispatched_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module of a dispatched model: to a compiler one call, which it does not follow."""
    if not _Compiler.knows and "torch._dynamo" in sys.modules:
        _tell_compiler()
    hook = hook_of(module)
    if hook is None:
        return _hooked_forward(module, *args, **kwargs)
    return hook.run(module, args, kwargs)


_dispatched_forward._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


class _Compiler:
    """Whether the compiler was told."""

    knows = False


@_disable_dynamo
def _tell_compiler() -> None:
    """The files that move weights are not compiled; the forwards that they call are, each on its own."""
    import torch._dynamo.trace_rules as rules

    _Compiler.knows = True
    for room in ("accelerate.offload", "accelerate.device", "accelerate.core"):
        rules.add(room)
