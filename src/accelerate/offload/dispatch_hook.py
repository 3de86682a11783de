"""The hook of a dispatched model: it moves inputs to the module's device and fetches its block of weights.

Clients see an ``AlignDevicesHook``: it has the same attributes, and works like one when called by hand.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo

from accelerate.core.errors import OffloadError
from accelerate.offload.align_hook import AlignDevicesHook
from accelerate.offload.hooks import _hooked_forward, add_hook_to_module, attributes_of
from accelerate.offload.module_input_output import ModuleInputOutputMover
from accelerate.offload.module_tensors import as_device, table_of, tensor_slots, with_values
from accelerate.offload.offloaded_tensor import MappingSource, OffloadedTensor
from accelerate.offload.pager import Pager
from accelerate.offload.weight_block import WeightBlock, move_tensor

_PRE_FORWARD = AlignDevicesHook.pre_forward


class DispatchHook(AlignDevicesHook):
    """The hook that ``dispatch_model`` adds to a module.

    Args:
        device: where the module computes.
        mover: moves inputs, if those of this module may come from another device.
        root: it is the model itself: its outputs go back to where its inputs were.
        pager: fetches weights, if this module is a block or around one.
        options: others of ``AlignDevicesHook``. ``weights_map`` are the offloaded weights of the module;
            ``tied_params_map`` is for clients, which expect one: tied weights are copied once without it.

    Attributes:
        block: the weights that are needed while the module runs.
        enclosing_block: the block that this module is a part of.
        is_inner: it has nothing to do while a module around it runs.
        is_compiled: a program compiles the model, or a part of it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        mover: ModuleInputOutputMover | None = None,
        root: bool = False,
        pager: Pager | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device, io_same_device=root, **options)
        self._mover, self._is_root, self._pager = mover, root, pager
        self._was_offloaded = self.offload
        self._watched_children: list[tuple[dict[str, Any], str, nn.Module]] = []
        self.block: WeightBlock | None = None
        self.enclosing_block: WeightBlock | None = None
        self.is_inner = self.is_compiled = False
        self._backends = _count_backends()

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchHook:
        twin = memo[id(self)] = copy.copy(self)
        for name, value in vars(self).items():
            if name in self.__getstate__() and name != "enclosing_block":
                vars(twin)[name] = copy.deepcopy(value, memo)
        if self.enclosing_block is not None:  # not where a part of the block is copied alone
            is_copied = id(self.enclosing_block.module) in memo
            twin.enclosing_block = copy.deepcopy(self.enclosing_block, memo) if is_copied else None
        twin._reset_forward_state()
        if twin.block is not None and twin._pager is not None:
            twin._pager.blocks.append(twin.block)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle a hook that moves anything.

        Raises:
            OffloadError: what it works with belongs to this process.
        """
        if self.is_inner and not self.offload:  # of a resident module, which is pickled without the others
            rest = (False, False, None, self.offload_buffers, False, self.skip_keys)
            return AlignDevicesHook, (self.execution_device, *rest)
        if self._mover is None and self._pager is None and not self.offload:
            return super().__reduce_ex__(protocol)
        raise OffloadError(
            "a dispatched model cannot be pickled",
            why="its hooks hold streams, threads and memory of this process",
            fix="save its values, torch.save(model.state_dict(), ...), or take the hooks off first: "
            "remove_hook_from_submodules(model)",
        )

    def __copy__(self) -> DispatchHook:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    @property
    def weights_map(self) -> Mapping[str, Any] | None:
        """Sources of the offloaded weights, by name; one that a client sets has their values from then on."""
        return vars(self)["weights_map"]  # under its name, for clients that give the hook another class

    @weights_map.setter
    def weights_map(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, weights: Mapping[str, Any] | None
    ) -> None:
        vars(self)["weights_map"] = weights
        recorded = vars(self).get("_module")
        module = None if recorded is None else recorded()
        if module is None or not self.offload or not weights:
            return
        blocks = [block for block in (self.block, self.enclosing_block) if block is not None]
        for key, owner, name, tensor in list(self._offloadable(module)):
            if key in weights:
                source = MappingSource(self._full_name(key), weights, key, tensor)
                stand_in = self._make_stand_in(tensor, source)
                if isinstance(tensor, OffloadedTensor):
                    table_of(owner, name)[name] = stand_in
                for block in blocks:
                    block.use_stand_in(tensor, stand_in)

    # --- on and off

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Record the original devices of the offloaded tensors; they have been offloaded already."""
        owned = [tensor for _, _, _, tensor in self._offloadable(module)]
        if self.offload and not any(isinstance(tensor, OffloadedTensor) for tensor in owned):
            return super().init_hook(module)  # it comes back, or goes to another module: they have real ones
        self._record_module(module)
        self._used_map = self.weights_map
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put real tensors back: those in memory as they are, those in files mapped from the files.

        Where a client has set ``offload`` to False all tensors stay as they are.
        """
        if self.offload or not self._was_offloaded:
            for _, owner, name, tensor in list(self._offloadable(module)):
                if isinstance(tensor, OffloadedTensor):
                    table_of(owner, name)[name] = restore_tensor(tensor)
            _return_tensors(module)
        self.block = self.enclosing_block = self._pager = self._mover = None
        self._watched_children = []
        return module

    # --- around a forward

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move inputs to the device; weights that no block has fetched are materialized one by one."""
        mover = self._mover
        # One that was taken off and put back works as its base class does, and so do all where a program
        # has replaced the method of that class.
        if mover is None or AlignDevicesHook.pre_forward is not _PRE_FORWARD:
            return super().pre_forward(module, *args, **kwargs)
        if self.offload:
            self._begin_forward(module, bool(args or kwargs))
        if args or kwargs:
            device = as_device(self.execution_device or 0)
            try:
                args, kwargs = mover.move_inputs(
                    module, device, args, kwargs, self._skipped_names, self._is_root, self.io_same_device
                )
            except BaseException:
                self.abort(module)
                raise
            if self.io_same_device:
                self.input_device = mover.thread.calls[-1].input_device
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Drop materialized weights; with ``io_same_device`` move the output to the device of the inputs."""
        if self._mover is None or AlignDevicesHook.pre_forward is not _PRE_FORWARD:
            return super().post_forward(module, output)
        if self.offload:
            self._end_forward()
        return self._mover.move_output(module, output, self._skipped_names)

    def abort(self, module: nn.Module) -> None:
        """Drop materialized weights after a forward that raised."""
        if self._mover is None:
            super().abort(module)
        elif self.offload:
            self._end_forward()

    def is_prepared(self, *values: Any) -> bool:
        """Return True while a module around this one has inputs and weights on the device of this one.

        Args:
            values: the arguments; a tensor that the model has made on another device has to be moved.
        """
        mover, block, device = self._mover, self.enclosing_block, self.execution_device
        calls = None if mover is None else mover.thread.calls
        if not calls or calls[-1].device != device:
            return False
        for value in values:
            if isinstance(value, torch.Tensor) and value.device != device:
                return False
        if self.offload if block is None else not block.users:
            return False
        own = self.__dict__  # clients set methods on a hook, and on the class
        if "pre_forward" in own or "post_forward" in own or AlignDevicesHook.pre_forward is not _PRE_FORWARD:
            return False
        return not (self.io_same_device or self.no_grad)

    @property
    def _skipped_names(self) -> frozenset[str]:
        keys = self.skip_keys
        return frozenset((keys,) if isinstance(keys, str) else keys or ())

    def run_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of the module with its block fetched, whatever hooks others have added to it."""
        pager, block, mover = self._pager, self.block, self._mover
        if pager is not None and as_device(self.execution_device or 0) != pager.device:
            pager = None  # somebody has assigned another device: weights go there one by one
        depth = 0 if mover is None else len(mover.thread.calls)
        for place, (table, key, watched) in enumerate(self._watched_children):
            if table.get(key) is not watched:
                self._watched_children[place] = table, key, transfer_hook(watched, table.get(key))
        if pager is not None:
            pager.begin_forward()
        try:
            if pager is None or block is None:
                return _hooked_forward(module, *args, **kwargs)
            pager.open_block(block)
            try:
                if not torch.is_grad_enabled():
                    return _hooked_forward(module, *args, **kwargs)
                with pager.saved_tensor_hooks():
                    return _hooked_forward(module, *args, **kwargs)
            finally:
                pager.close_block(block)
        finally:
            if mover is not None:
                mover.drop_calls(depth)
            if pager is not None:
                pager.end_forward()


# Clients look a hook's class up in accelerate.hooks by this name, and make another from its attributes.
DispatchHook.__name__ = AlignDevicesHook.__name__


def _return_tensors(module: nn.Module) -> None:
    """Move resident tensors back to their original device, here and in submodules without a hook."""
    parts = [part for part in module.modules() if part is module or hook_of(part) is None]
    for table, name, tensor in tensor_slots(parts):
        if hasattr(tensor, "_original_device"):
            device = tensor._original_device
            del tensor._original_device  # torch may swap the attributes of a parameter that it moves
            returned = move_tensor(tensor, device)
            if returned is not tensor:
                tensor._returned = returned
        if hasattr(tensor, "_returned"):  # it may stand in several places
            table[name] = tensor._returned


def restore_tensor(stand_in: Any) -> torch.Tensor:
    """Return the real tensor of a stand-in; the same one for all its slots."""
    tensor = vars(stand_in).get("_restored")
    if tensor is None:
        source, device = stand_in.source, vars(stand_in).get("_original_device")
        if device is None:
            tensor = with_values(stand_in, source.host_tensor(), source)
        else:
            tensor = with_values(stand_in, source.read(device))
        stand_in._restored = tensor
    return tensor


# ------------------------------------------------------------------------------------------------ attached


def attach_hook(module: nn.Module, hook: DispatchHook) -> None:
    """Run the hook around the forward of ``module``, outside of the hooks that it has already."""
    add_hook_to_module(module, hook, append=True)
    forward = functools.partial(_dispatched_forward, module)
    module.forward = functools.update_wrapper(forward, attributes_of(module)["_old_forward"])


def show_hook(module: Any, hook: DispatchHook) -> None:
    """Set the hook as ``_hf_hook``, and leave the forward as it is: a block fetches the weights."""
    if "_hf_hook" in attributes_of(module):
        add_hook_to_module(module, hook, append=True)
        return
    hook.init_hook(module)
    module._hf_hook = hook
    module._old_forward = module.forward


def watch_replacements(model: nn.Module) -> None:
    """Watch for replaced modules: at the next forward their hooks are transferred to the new ones."""
    root = hook_of(model)
    assert root is not None
    for module in model.modules():
        for key, child in module._modules.items():
            hook = None if child is None else hook_of(child)
            if child is not None and hook is not None and not hook.is_inner and (hook.block or hook._mover):
                root._watched_children.append((module._modules, key, child))


def transfer_hook(old: nn.Module, new: nn.Module | None) -> Any:
    """Transfer the hook and the block of a replaced module to the new one."""
    before = hook_of(old)
    if new is None or before is None or getattr(new, "_hf_hook", None) is not None:
        return new  # a wrapper shows the hook of the module in it, which works inside of it
    device = as_device(before.execution_device or 0)
    hook = DispatchHook(device, skip_keys=before.skip_keys, mover=before._mover, pager=before._pager)
    hook.block = before.block
    if hook.block is None:
        new.to(device)
    else:
        hook.block.replace_module(new)
    attach_hook(new, hook)
    return new


def hook_of(module: nn.Module) -> DispatchHook | None:
    """Return the hook that a dispatch has added to a module, or None."""
    attached = attributes_of(module).get("_hf_hook")
    for hook in getattr(attached, "hooks", (attached,)):
        if isinstance(hook, DispatchHook):
            return hook
    return None


def _dispatched_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a dispatched module; ``torch.compile`` does not trace into it."""
    hook = hook_of(module)
    if "torch._dynamo" in sys.modules:
        _skip_in_compiler()
        if hook is not None and not hook.is_compiled:
            # The compiler takes what this thread calls now, or will take parts of the model, one by one.
            hook.is_compiled = bool(get_eval_frame_callback()) or _count_backends() != hook._backends
            if hook.is_compiled:
                _share_forwards(module)
    if hook is None:
        return _hooked_forward(module, *args, **kwargs)
    return hook.run_forward(module, args, kwargs)


_dispatched_forward._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


# Of this package all files that run in a forward, but for dispatch_steps.py.
_SKIPPED_IN_COMPILER = (
    "core device offload.align_hook offload.dispatch_hook offload.hooks offload.module_input_output "
    "offload.module_tensors offload.offload_folder offload.offloaded_tensor offload.pager "
    "offload.weight_block"
)


@functools.cache  # once in a process
@_disable_dynamo
def _skip_in_compiler() -> None:
    """Exclude the modules that move weights from compilation; the forwards that they call are compiled."""
    import torch._dynamo.trace_rules as rules

    for name in _SKIPPED_IN_COMPILER.split():
        rules.add(f"accelerate.{name}")


def _count_backends() -> int:
    """Return how many backends programs have compiled with: each ``torch.compile`` by name adds one."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    # That of functions which are not to be compiled is None.
    return 0 if eval_frame is None else sum(map(bool, eval_frame.cached_backends.values()))


# ------------------------------------------------------------------------------------------- inner forwards

# Forward of a class -> the function that stands for it. It has no reference to its key.
_FORWARDS: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType] = weakref.WeakKeyDictionary()


class InnerForward(functools.partial[Any]):
    """The forward of a module that has an inner hook, while nothing is compiled.

    Clients look for a ``functools.partial`` with ``__wrapped__``, and then replace ``_old_forward``.
    """


def _share_forwards(module: nn.Module) -> None:
    """Make methods of the inner forwards in a module, which a compiler is about to trace.

    It compares methods by their functions, and partials by identity: now layers of a class share one graph.
    """
    for part in module.modules():
        attributes = attributes_of(part)
        forward, original = (
            attributes.get("forward"),
            getattr(attributes.get("_old_forward"), "__func__", None),
        )
        if isinstance(forward, InnerForward) and isinstance(original, types.FunctionType):
            part.forward = types.MethodType(_forward_of_class(original, forward.func), part)


def _forward_of_class(original: types.FunctionType, inner: Any) -> types.FunctionType:
    """Return the function that stands for the forward of a class, with its name and signature."""
    forward = _FORWARDS.get(original)
    if forward is None:
        # Compiled graphs belong to the code of a function, and there are few for each.
        code = inner.__code__.replace(co_name=original.__qualname__)
        forward: Any = functools.update_wrapper(types.FunctionType(code, inner.__globals__), original)
        del forward.__wrapped__
        forward.__signature__ = inspect.signature(original)
        _FORWARDS[original] = forward
    return forward
