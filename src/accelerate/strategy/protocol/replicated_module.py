"""The prepared model under DDP: an object of a subclass of the user's class, with torch's reducer behind it.

``torch.nn.parallel.DistributedDataParallel`` wraps a model and hides its type. Here the prepared model is a
second object over the state of the user's module (they share one ``__dict__``), of a subclass of the user's
class that does torch's work around a call. So it keeps methods, attributes and parameter names, every method
that calls the model reduces gradients, and the user's own object stays a plain module.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError, list_first, warn_user
from accelerate.strategy.protocol.output_tensors import find_hidden_tensors

# Of parameters of copies of replicated modules whose gradients a backward has changed since they were last
# averaged: the number of the copy and their place in it, an order that all ranks share. Weak, for a plain
# backward of copies that the program drops averages nothing.
reached_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
_copy_numbers = itertools.count()
# Hooks of ``watch_frozen``, by parameter.
_frozen_hooks = WeakIdKeyDictionary()


class ReplicaProgress:
    """The events of one replica, by which gradients are noticed that torch's reducer does not see.

    Attributes:
        replica: a weak reference to torch's object.
        names, params: those that the reducer averages, in its order.
        is_in_call: the replica is being called, and its forward is the user's.
        is_armed: a forward has made the reducer wait for a backward, which has not come yet.
        reached: not empty if a backward has reached the replica just now.
        buffers_differ: the last forward was one in training.
    """

    replica: Callable[[], DistributedDataParallel | None]
    names: list[str]
    params: WeakIdKeyDictionary
    reached: set[torch.Tensor]
    buffers_differ: bool
    is_armed: bool
    is_in_call: bool
    _hook: RemovableHandle | None = None

    def follow(self, replica: DistributedDataParallel) -> ReplicaProgress:
        """Follow the replica, or another one of the same module; return itself."""
        self.replica = weakref.ref(replica)
        ignored = replica.parameters_to_ignore
        trained = [
            (n, p) for n, p in replica.module.named_parameters() if p.requires_grad and n not in ignored
        ]
        self.names, self.params = [n for n, _ in trained], WeakIdKeyDictionary({p: None for _, p in trained})
        self.is_armed, self.buffers_differ, self.is_in_call = False, False, False
        self.reached = set()
        if self._hook is not None:
            self._hook.remove()
        if trained:
            # A built-in function, for it runs in every backward; one parameter stands for all.
            self._hook = trained[-1][1].register_post_accumulate_grad_hook(self.reached.add)
        return self

    def explain(self, error: RuntimeError) -> PrepareError | None:
        """Return what a backward has left out, if that is why torch refuses the next forward."""
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        replica = self.replica()
        if match is None or replica is None:
            return None
        names = [self.names[int(index)] for index in match[1].split()]
        params = dict(replica.module.named_parameters())
        frozen = [name for name in names if name in params and not params[name].requires_grad]
        return PrepareError(
            f"the last backward gave no gradient to {list_first(frozen or names)}",
            why="DDP waits for the gradient of every parameter that trained when the model was prepared; "
            + ("since then these were frozen" if frozen else "the loss does not depend on these"),
            fix="DistributedDataParallelKwargs(find_unused_parameters=True) in kwargs_handlers, or freeze "
            "them before prepare",
        )


class ReplicatedModule:
    """The first base of a replicated module's class: runs DDP's work around a call.

    A copied or pickled replica is a plain module: the copy is not replicated.
    """

    # Slots of the classes of views, whose ``__dict__`` is the user's.
    _replica: DistributedDataParallel
    _progress: ReplicaProgress
    _user_module: nn.Module
    _wrapper_names: ClassVar[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object of the user's class: methods make parts and twins by ``type(self)``."""
        return next(base for base in cls.__mro__ if not issubclass(base, ReplicatedModule))(*args, **kwargs)

    def set_replica(self, replica: DistributedDataParallel | None) -> None:
        """Use another object of torch; ``nn.Module`` would register it as a part of the model."""
        object.__setattr__(self, "_replica", replica)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward between DDP's work before and after it.

        Raises:
            PrepareError: the backward before it left trained parameters without a gradient, or DDP finds no
                tensor in the output, and would reduce nothing.
        """
        replica, progress, trains = self._replica, self._progress, self.training  # type: ignore[attr-defined]
        # Torch broadcasts buffers only after a forward that reduced; in the middle of a window they differ.
        if progress.buffers_differ and not trains and replica.require_backward_grad_sync:
            replica.require_forward_param_sync = True
        progress.buffers_differ = trains
        try:
            args, kwargs = replica._pre_forward(*args, **kwargs)
        except RuntimeError as error:
            explained = progress.explain(error)
            if explained is None:
                raise
            raise explained from error
        # Of a model in which this one is a part, and of one that calls itself.
        outer = DistributedDataParallel._active_ddp_module, progress.is_in_call
        DistributedDataParallel._active_ddp_module, progress.is_in_call = replica, True
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            DistributedDataParallel._active_ddp_module, progress.is_in_call = outer
        if replica.static_graph and torch.is_grad_enabled():
            _check_output(output)
        output = replica._post_forward(output)
        if replica.require_backward_grad_sync and torch.is_grad_enabled():
            progress.is_armed = True
        return output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the call of the user's module: both objects run it, and only this one reduces around it."""
        self._user_module.compile(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state by the user's names, or by those of torch's wrapper: all begin with ``module.``."""
        if all(name.startswith("module.") for name in state_dict):
            plain = OrderedDict(state_dict)
            if hasattr(state_dict, "_metadata"):  # versions of the layers, by their names
                plain._metadata = dict(state_dict._metadata)  # type: ignore[attr-defined]
            consume_prefix_in_state_dict_if_present(plain, "module.")
            own = self._user_module.state_dict().keys()
            # A model may have a child of that name: the names count that fit better.
            if len(plain.keys() & own) > len(state_dict.keys() & own):
                state_dict = plain
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the user's module; ``DDP.backward`` averages its gradients."""
        return _watch_copy(copy.deepcopy(self._user_module, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _return_module, (self._user_module,)


def _check_output(output: Any) -> None:
    """Refuse, with ``static_graph``, an output in which torch finds no tensor."""
    if find_hidden_tensors(tree_leaves(output)):
        raise PrepareError(
            f"static_graph=True: the model returns a {type(output).__name__}, in which DDP finds no tensor",
            why="with a static graph it begins to reduce gradients at the tensors of the output",
            fix="let its forward return a tensor, tuple, list or dict, or leave static_graph out",
        )


class CopyMethod:
    """The ``__deepcopy__`` of a copy of a replicated module: the gradients of its copies are averaged."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module as its class does it."""
        module = self._module()
        assert module is not None, "it is being copied"
        del vars(module)["__deepcopy__"]
        try:
            return _watch_copy(copy.deepcopy(module, memo))
        finally:
            vars(module)["__deepcopy__"] = self

    def __reduce__(self) -> Any:
        return type(None), ()  # so that a pickle of the module can be read without this package


def _watch_copy(module: nn.Module) -> nn.Module:
    """Let ``DDP.backward`` average the gradients of a copy, and those of its copies."""
    number = next(_copy_numbers)
    for index, parameter in enumerate(module.parameters()):
        _add_gradient_hook(parameter, functools.partial(reached_copies.__setitem__, value=(number, index)))
    vars(module)["__deepcopy__"] = CopyMethod(module)
    return module


def watch_frozen(model: nn.Module, note: Callable[[torch.Tensor], None]) -> None:
    """Let autograd call ``note`` with parameters that are frozen now if they get a gradient."""
    for parameter in model.parameters():
        if (hook := _frozen_hooks.pop(parameter, None)) is not None:
            hook.remove()
        if not parameter.requires_grad:
            _frozen_hooks[parameter] = _add_gradient_hook(parameter, note)


def _add_gradient_hook(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> RemovableHandle | None:
    """Call ``hook`` when a backward has set the gradient; also of a parameter that is frozen now."""
    trains, is_plain = parameter.requires_grad, type(parameter) is nn.Parameter
    # Quantized weights are of other classes, and never train.
    if not trains and not (is_plain and parameter.is_floating_point() and not parameter.is_inference()):
        return None
    # Torch takes the hook of a tensor that trains only, and keeps it.
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trains)
    return handle


def _return_module(module: nn.Module) -> nn.Module:
    return module


def _no_sync(self: ReplicatedModule) -> AbstractContextManager[None]:
    """Return torch's context in which gradients accumulate on each rank and are not all-reduced."""
    return self._replica.no_sync()


def _module(self: ReplicatedModule) -> nn.Module:
    """The user's own object."""
    _note_module(type(self).__name__)
    return self._user_module


@functools.cache
def _note_module(name: str) -> None:
    warn_user(
        f"{name}.module is the object that was given to prepare: a forward of it synchronises nothing. The "
        "prepared model has all its methods and attributes itself; accelerator.unwrap_model(model) returns it"
    )


def _replica_property(name: str) -> property:
    def assign(self: ReplicatedModule, value: Any) -> None:
        setattr(self._replica, name, value)

    return property(lambda self: getattr(self._replica, name), assign, doc=f"{name} of torch's wrapper.")


# Attributes and methods of torch's wrapper; programs read its device to place batches.
_FORWARDED_MEMBERS = (
    *("device", "device_type", "device_ids", "output_device", "process_group", "broadcast_buffers"),
    *("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "require_backward_grad_sync"),
    *("register_comm_hook", "join", "_set_static_graph"),
    # Of torch.distributed.algorithms.Join.
    *("join_hook", "join_device", "join_process_group", "_join_config"),
)
_CLASS_NAMES = ("__module__", "__qualname__", "__doc__")
_WRAPPER_MEMBERS: dict[str, Any] = {name: _replica_property(name) for name in _FORWARDED_MEMBERS} | {
    "no_sync": _no_sync,
    "module": property(_module),
}


def replica_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` behind a replicated module, or that is the module; else None."""
    if isinstance(module, ReplicatedModule):
        return module._replica
    return module if isinstance(module, DistributedDataParallel) else None


def _synchronized_forward(module_class: type[nn.Module]) -> Callable[..., Any]:
    """Return a ``forward`` that is a call of the replica, unless it runs in one, as in torch's wrapper."""

    @functools.wraps(module_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._progress.is_in_call:
            return module_class.forward(self, *args, **kwargs)
        return self(*args, **kwargs)

    return forward


def replicate(module: nn.Module, **options: Any) -> nn.Module:
    """Return a replicated view of ``module``: an object of a subclass of its class over the same state.

    Args:
        module: the model, on its device; equal on all ranks afterwards (rank 0's values).
        options: arguments of ``torch.nn.parallel.DistributedDataParallel``.
    """
    # What torch's wrapper has, unless the model has something of that name itself.
    members = {name: each for name, each in _WRAPPER_MEMBERS.items() if not hasattr(module, name)}
    replica, module_class = DistributedDataParallel(module, **options), type(module)
    # One class for all modules of a class: programs compare the classes of two prepared models.
    for kind in module_class.__subclasses__():
        if vars(kind).get("_wrapper_names") == members.keys():
            break
    else:
        own: dict[str, Any] = {name: getattr(module_class, name) for name in _CLASS_NAMES}
        own |= {"_wrapper_names": members.keys(), "forward": _synchronized_forward(module_class)}
        own["__slots__"] = ("_replica", "_progress", "_user_module")
        kind = type(module_class.__name__, (ReplicatedModule, module_class), members | own)
    view: Any = object.__new__(kind)
    view.__dict__ = module.__dict__
    parts = {"_replica": replica, "_progress": ReplicaProgress().follow(replica), "_user_module": module}
    for name, part in parts.items():
        object.__setattr__(view, name, part)  # nn.Module would register modules as parts of the model
    return view
