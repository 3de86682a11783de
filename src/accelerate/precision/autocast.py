"""Half precision by autocast, attached to a module by hooks: the user's ``forward`` is never replaced.

Source: torch.amp (https://pytorch.org/docs/stable/amp.html).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import DeviceError, warn_user
from accelerate.core.lazy_names import get_override
from accelerate.core.torch_internals import is_available
from accelerate.device.base import Device
from accelerate.precision.base import FORWARD_CONTEXTS, LayerConversion, LibraryContextHook, Precision
from accelerate.world.local_tensor_trees import convert_outputs_to_fp32, convert_to_fp32


@check_arguments
@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``.

    Attributes:
        enabled: False computes in the dtype of the weights.
        cache_enabled: cache cast weights during the forward; None takes torch's default.
        upcast_outputs: converts half precision outputs of a prepared model to float32, as in Accelerate 1.x;
            False leaves them as computed. ``Accelerator.autocast`` ignores it: it has no outputs.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    upcast_outputs: bool = True


def autocast(
    device: Device, dtype: torch.dtype | None, options: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` on ``device``; ``dtype`` None takes torch's default there."""
    if options is None:  # no AutocastKwargs() here: the compiler may trace this
        return torch.autocast(device.type, dtype=dtype)
    cache = options.cache_enabled
    return torch.autocast(device.type, dtype=dtype, enabled=options.enabled, cache_enabled=cache)


class _UnusedContexts(threading.local):
    """The contexts that a thread has made and exited, to reuse: making a context is slow."""

    def __init__(self) -> None:
        self.items: list[Any] = []


class _AutocastScope:
    """The autocast that two hooks enter before a forward, and exit afterwards, also when the forward raises.

    Contexts form a stack per thread, since a forward may run inside another and in several threads at once.
    A copied or pickled module keeps its precision.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        options: AutocastKwargs | None,
        conversion: LayerConversion | None = None,
    ) -> None:
        self.device, self.dtype, self.options, self.conversion = device, dtype, options, conversion
        self.unused = _UnusedContexts()
        options = options or AutocastKwargs()
        # What ``torch.autocast`` takes.
        self.arguments = device.type, dtype, options.enabled, options.cache_enabled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self.dtype, self.options, self.conversion)


# For a model that ``torch.compile`` traces together with its hooks. The compiler, dynamo, knows autocast as a
# ``with`` block only. While it traces a hook, it runs the next two functions instead of tracing them, and
# they put into the graph what it does at both ends of a block. That is right as long as the forward is traced
# in one piece with its hooks. Otherwise it traces the loop over the hooks, or a hook, on its own: then they
# run as they are, outside of the graph, around the forward.
_BLOCKS = "accelerate_autocast_blocks"  # of a graph: what is entered in it, the innermost last
_call_untraced: Any = None  # set by ``_enter_in_graph``, since it imports the compiler


def _enter_in_graph(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None) -> bool:
    """Enter autocast in the graph that is being traced; return False where hooks must run outside of it."""
    dynamo, tracer = _find_tracer()
    if tracer is None:
        return False
    module_file = nn.Module.__call__.__code__.co_filename
    is_loop = tracer.f_code.co_filename == module_file and not tracer.f_code.co_name.endswith("_call_impl")
    if is_loop or getattr(dynamo.config, "nested_graph_breaks", False):
        return False
    block = dynamo.variables.ctx_manager.AutocastModeVariable.create(
        torch.autocast, (device, dtype, enabled, cache_enabled), {}
    )
    block.enter(tracer)
    blocks = vars(tracer.output).setdefault(_BLOCKS, [])
    blocks.append(block)
    return True


def _exit_in_graph() -> bool:
    """Exit what ``_enter_in_graph`` has entered in this graph; return False if there is nothing."""
    _, tracer = _find_tracer()
    blocks = None if tracer is None else vars(tracer.output).get(_BLOCKS)
    if not blocks:
        return False
    blocks.pop().exit(tracer)
    return True


def _find_tracer() -> tuple[Any, Any]:
    """Return the compiler and its tracer; let the frame run as it is if that is a hook of ours alone.

    The tracer is None where a version of torch lacks what is needed to add to its graph.
    """
    global _call_untraced
    dynamo: Any = torch._dynamo
    if _call_untraced is None:
        _call_untraced = torch.compiler.disable(_call_hook)
    if not is_available("autocast in a graph"):
        return dynamo, None
    tracer = dynamo.symbolic_convert.InstructionTranslator.current_tx()
    if Path(tracer.f_code.co_filename).parent == Path(__file__).parent:
        raise dynamo.exc.SkipFrame("a hook that enters or exits autocast")
    return dynamo, tracer


def _call_hook(hook: Callable[..., Any], *args: Any) -> None:
    hook(*args)


# Dynamo runs these while it traces, and takes the result as a constant. (``assume_constant_result`` of
# torch.compiler sets this attribute too, but imports the compiler.)
for _function in (_enter_in_graph, _exit_in_graph):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _AutocastPreHook:
    """The forward pre-hook that enters autocast."""

    def __init__(self, around: _AutocastScope) -> None:
        self.scope = around

    def __call__(self, module: nn.Module, args: Any) -> None:
        scope = self.scope
        if is_dynamo_compiling():
            if not _enter_in_graph(*scope.arguments):
                _call_untraced(self, module, args)
            return
        # No function of this package is called: where the compiler runs the hook as it is, it traces these.
        unused, entered = scope.unused.items, FORWARD_CONTEXTS.entered
        context = unused.pop() if unused else torch.autocast(*scope.arguments)
        caller = sys._getframe(1)
        if entered:
            FORWARD_CONTEXTS.exit_interrupted()
        context.__enter__()
        # One that the compiler calls has returned when the forward begins.
        entered.append((None if caller.f_code is _call_hook.__code__ else caller, scope, context))


class _AutocastExitHook:
    """The forward hook that exits autocast; ``upcast`` converts half precision outputs to float32."""

    def __init__(self, around: _AutocastScope, upcast: bool) -> None:
        self.scope, self.upcast = around, upcast
        # Programs replace either function to save memory; ``convert_to_fp32`` also around a forward alone.
        convert = get_override("accelerate.utils.operations", "convert_to_fp32", convert_to_fp32)
        wrap = get_override("accelerate.accelerator", "convert_outputs_to_fp32", convert_outputs_to_fp32)
        self.convert = convert if wrap is convert_outputs_to_fp32 else wrap(lambda output: output)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        scope, convert = self.scope, self.convert
        if is_dynamo_compiling():
            if not _exit_in_graph():
                _call_untraced(self, module, args, None)
        else:
            latest = get_override("accelerate.utils.operations", "convert_to_fp32", convert_to_fp32)
            convert = convert if latest is convert_to_fp32 else latest
            entered = FORWARD_CONTEXTS.entered
            for place in reversed(range(len(entered))):
                if entered[place][1] is scope:
                    context = entered.pop(place)[2]
                    context.__exit__(None, None, None)
                    scope.unused.items.append(context)
                    break
        return convert(output) if self.upcast else None


def attach_autocast(
    module: nn.Module,
    device: Device,
    dtype: torch.dtype,
    options: AutocastKwargs | None = None,
    *,
    upcast: bool = True,
    conversion: LayerConversion | None = None,
) -> None:
    """Run every forward of ``module`` under autocast.

    Args:
        module: the model; a precision that was attached before is replaced.
        device: the device it runs on.
        dtype: the dtype of matrix products and convolutions.
        options: options of ``torch.autocast``.
        upcast: convert half precision outputs to float32 (the documented behaviour of Accelerate 1.x).
        conversion: of layers of the module by the same precision.
    """
    detach_autocast(module)
    scope = _AutocastScope(device, dtype, options, conversion)
    # Next to the forward: hooks of the user run outside of autocast, and see the float32 outputs.
    module.register_forward_pre_hook(_AutocastPreHook(scope))
    # always_call: autocast must be exited also when the forward raises.
    module.register_forward_hook(_AutocastExitHook(scope, upcast), prepend=True, always_call=True)


def get_attached_autocast(
    module: nn.Module,
) -> tuple[torch.dtype, AutocastKwargs | None, bool, LayerConversion | None] | None:
    """Return (dtype, options, upcast, conversion) of the attached autocast; None without one."""
    for hook in module._forward_hooks.values():
        if isinstance(hook, _AutocastExitHook):
            return hook.scope.dtype, hook.scope.options, hook.upcast, hook.scope.conversion
    return None


def describe_detachment(modules: Iterable[nn.Module]) -> str:
    """Return the clause for the plan on models whose precision is taken off."""
    stays = next(filter(None, map(_describe_permanent_conversion, modules)), "")
    return f"the model computes in the format of its weights again{stays}"


def _describe_permanent_conversion(module: nn.Module) -> str:
    """Return a clause on layers that stay converted when the attached precision is replaced; may be empty."""
    attached = get_attached_autocast(module)
    conversion = None if attached is None else attached[3]
    if conversion is None or not conversion.is_permanent:
        return ""
    return f", but its layers in 8-bit floats by {conversion.library} stay so"


def warn_of_replacement(module: nn.Module, name: str) -> None:
    """Warn that the precision ``name`` takes the place of the attached one."""
    warn_user(
        f"a {type(module).__name__} was prepared with another precision before, by another Accelerator: from "
        f"now on mixed_precision={name!r} holds for it{_describe_permanent_conversion(module)}"
    )


def detach_autocast(module: nn.Module) -> None:
    """Remove autocast from a module, if it has it, and the context of a library inside of it."""
    kinds: tuple[type, ...] = (_AutocastPreHook, _AutocastExitHook)
    attached = get_attached_autocast(module)
    if attached is not None and attached[3] is not None:
        kinds = (*kinds, LibraryContextHook)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), kinds)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


class HalfPrecisionAutocast(Precision):
    """Autocast to a 16-bit dtype; the weights keep their dtype."""

    dtype: ClassVar[torch.dtype]
    conversion: LayerConversion | None = None
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = (AutocastKwargs,)

    def check(self) -> None:
        """Raise DeviceError unless the device computes in this format."""
        super().check()
        if not self.device.supports(self.name):
            raise DeviceError(
                f"mixed_precision={self.name!r} does not work on {self.device.type} here",
                why="the device has no support for this number format",
                fix="use mixed_precision='no', or another device",
            )

    @property
    def options(self) -> AutocastKwargs | None:
        """The user's ``AutocastKwargs``."""
        return cast("AutocastKwargs | None", self.handlers.get(AutocastKwargs))

    def forward_context(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return autocast on the device."""
        return autocast(self.device, self.dtype, options or self.options)

    def attach(self, model: nn.Module) -> None:
        """Attach autocast by hooks."""
        attach_autocast(
            model,
            self.device,
            self.dtype,
            self.options,
            upcast=self._upcasts,
            conversion=self.conversion,
        )

    def replaces_attached(self, model: nn.Module) -> bool:
        """Return True when the model has computed in another format or with other options so far."""
        return get_attached_autocast(model) not in (
            None,
            (self.dtype, self.options, self._upcasts, self.conversion),
        )

    def explain_missing(self, model: nn.Module) -> str:
        """Return why autocast of this dtype is not attached to ``model`` or is off; empty if it is on."""
        attached = get_attached_autocast(model)
        if attached is None:
            return f"no autocast is attached to the {type(model).__name__}"
        dtype, options, *_ = attached
        if options is not None and not options.enabled:
            return "AutocastKwargs(enabled=False) turns it off"
        return "" if dtype == self.dtype else f"the {type(model).__name__} computes in {dtype}"

    @property
    def _upcasts(self) -> bool:
        return self.options is None or self.options.upcast_outputs

    def describe_conversion(self) -> str:
        """Return the clause for the plan of ``prepare``."""
        outputs = "come out in float32" if self._upcasts else "stay as computed"
        return f"matrix products and convolutions compute in {self.dtype}, outputs {outputs}"
