"""Half precision by autocast, attached to a module by hooks: the user's ``forward`` is never replaced.

Source: torch.amp (https://pytorch.org/docs/stable/amp.html).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from accelerate.core.errors import DeviceError
from accelerate.core.handler import KwargsHandler
from accelerate.device.base import Device
from accelerate.precision.base import Precision
from accelerate.world.tensors import convert_to_fp32


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``.

    Attributes:
        enabled: False computes in the format of the weights.
        cache_enabled: keep cast weights for the length of the forward; None takes torch's default.
        upcast_outputs: half precision outputs of a prepared model come out in float32, as in Accelerate 1.x;
            False leaves them as they were computed. It says nothing to ``Accelerator.autocast``, which has no
            outputs.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    upcast_outputs: bool = True


def autocast(
    device: Device, dtype: torch.dtype | None, options: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """``torch.autocast`` on ``device``; ``dtype`` None takes torch's default there."""
    given = options or AutocastKwargs()
    return torch.autocast(device.type, dtype=dtype, enabled=given.enabled, cache_enabled=given.cache_enabled)


class _Contexts(threading.local):
    """The entered contexts of a thread, and those to be entered again: making one costs more than that."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.free: list[Any] = []


class _Around:
    """Enters autocast before a forward and leaves it after, also when the forward raises.

    Contexts are kept per thread and as a stack, since a forward may run inside another and in several
    threads at once. A copied or pickled module keeps its precision.
    """

    def __init__(self, device: Device, dtype: torch.dtype, options: AutocastKwargs | None) -> None:
        self.device, self.dtype, self.options = device, dtype, options
        self.local = _Contexts()
        # Autocast is entered around the compiled call: inside, it would split the graph.
        self.outside = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self.dtype, self.options)

    def enter(self) -> None:
        local = self.local
        context = local.free.pop() if local.free else autocast(self.device, self.dtype, self.options)
        context.__enter__()
        local.open.append(context)

    def leave(self) -> None:
        local = self.local
        if local.open:
            context = local.open.pop()
            context.__exit__(None, None, None)
            local.free.append(context)


class _Before:
    """The forward pre-hook."""

    def __init__(self, around: _Around) -> None:
        self.around = around

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not (self.around.outside and torch.compiler.is_compiling()):
            self.around.enter()


class _After:
    """The forward hook; ``upcast`` gives half precision outputs in float32."""

    def __init__(self, around: _Around, upcast: bool) -> None:
        self.around, self.upcast = around, upcast

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not (self.around.outside and torch.compiler.is_compiling()):
            self.around.leave()
        return convert_to_fp32(output) if self.upcast else None


def attach(
    module: nn.Module,
    device: Device,
    dtype: torch.dtype,
    options: AutocastKwargs | None = None,
    *,
    upcast: bool = True,
) -> None:
    """Makes every forward of ``module`` run under autocast.

    Args:
        module: the model; what was attached before is replaced.
        device: where it runs.
        dtype: the format of matrix products and convolutions.
        options: torch's own.
        upcast: half precision outputs come out in float32 (the documented behaviour of Accelerate 1.x).
    """
    detach(module)
    around = _Around(device, dtype, options)
    module.register_forward_pre_hook(_Before(around), prepend=True)
    # always_call: autocast must be left also when the forward raises.
    module.register_forward_hook(_After(around, upcast), always_call=True)


def attach_outside(module: nn.Module) -> None:
    """Enters autocast around the compiled call of ``module``, not inside: its graph stays whole.

    A copy of the module is not compiled, and computes under its hooks.
    """
    compiled: Any = module._compiled_call_impl
    found = [hook.around for hook in module._forward_pre_hooks.values() if isinstance(hook, _Before)]
    if compiled is None or not found:
        return
    around = found[0]
    around.outside = True

    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast(around.device, around.dtype, around.options):
            return compiled(*args, **kwargs)

    call.__wrapped__ = compiled  # type: ignore[attr-defined]  # what is asked whether it is compiled
    module._compiled_call_impl = call


def attached(module: nn.Module) -> tuple[torch.dtype, AutocastKwargs | None, bool] | None:
    """The number format, options and ``upcast`` of what ``attach`` put on; None where it was not called."""
    for hook in module._forward_hooks.values():
        if isinstance(hook, _After):
            return hook.around.dtype, hook.around.options, hook.upcast
    return None


def detach(module: nn.Module) -> None:
    """Takes off what ``attach`` put on; nothing where it was not called."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Before | _After)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


class HalfPrecision(Precision):
    """The forward in a 16-bit format, the weights as they are."""

    dtype: ClassVar[torch.dtype]
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = (AutocastKwargs,)

    def check(self) -> None:
        """The device must compute in this format."""
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

    def forward(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Autocast on the device."""
        return autocast(self.device, self.dtype, options or self.options)

    def attach(self, model: nn.Module) -> None:
        """Autocast by hooks."""
        attach(model, self.device, self.dtype, self.options, upcast=self._upcasts)

    def compiled(self, model: nn.Module) -> None:
        """Autocast goes around the compiled call."""
        attach_outside(model)

    def takes_over(self, model: nn.Module) -> bool:
        """Whether the model computes in another format, or with other options, so far."""
        return attached(model) not in (None, (self.dtype, self.options, self._upcasts))

    def missing(self, model: nn.Module) -> str:
        """Autocast of this format must be attached, and on."""
        found = attached(model)
        if found is None:
            return f"no autocast is attached to the {type(model).__name__}"
        if found[1] is not None and not found[1].enabled:
            return "AutocastKwargs(enabled=False) turns it off"
        return "" if found[0] == self.dtype else f"the {type(model).__name__} computes in {found[0]}"

    @property
    def _upcasts(self) -> bool:
        return self.options is None or self.options.upcast_outputs

    def converts(self) -> str:
        """For the plan."""
        outputs = "come out in float32" if self._upcasts else "stay as computed"
        return f"matrix products and convolutions compute in {self.dtype}, outputs {outputs}"
