"""The precision protocol: the context of a forward, loss scaling and the optimizer step."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.core.argument_checks import KwargsHandler
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.device.base import Device
from accelerate.precision.loss_scaling import LossScaling


class ForwardContexts(threading.local):
    """The contexts that forward pre-hooks of this thread have entered, the innermost last.

    Torch calls no hook when a forward ends by a KeyboardInterrupt, as in a notebook, or by another exception
    that is no ``Exception``: autocast would stay on for all that follows. So each context is kept with the
    frame that called its pre-hook; one whose frame is no longer in the stack is exited at the next occasion.

    Attributes:
        entered: (frame, owner, context) of each; the frame is None where it says nothing.
    """

    def __init__(self) -> None:
        self.entered: list[tuple[FrameType | None, object, AbstractContextManager[Any]]] = []

    def enter(self, context: AbstractContextManager[Any], owner: object, frame: FrameType | None) -> None:
        """Enter the context of a forward."""
        if self.entered:
            self.exit_interrupted()
        context.__enter__()
        self.entered.append((frame, owner, context))

    def exit(self, owner: object) -> None:
        """Exit the innermost context of ``owner``, if it has entered one."""
        for place in reversed(range(len(self.entered))):
            if self.entered[place][1] is owner:
                self.entered.pop(place)[2].__exit__(None, None, None)
                return

    def exit_interrupted(self) -> None:
        """Exit the contexts of forwards that have ended without a call of their hooks."""
        while self.entered and (frame := self.entered[-1][0]) is not None:
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and caller is not frame:
                caller = caller.f_back
            if caller is not None:
                return
            self.entered.pop()[2].__exit__(None, None, None)


FORWARD_CONTEXTS = ForwardContexts()


class LibraryContextHook:
    """The base of forward hooks that enter the context of a library, inside of autocast."""


@dataclass(frozen=True)
class LayerConversion:
    """The conversion of layers of a model by a precision.

    Attributes:
        library: the library that computes them, and its recipe, as text.
        is_permanent: they stay converted in whatever precision the model is prepared later.
    """

    library: str
    is_permanent: bool


class Precision(ABC):
    """The number format in which a model computes.

    Args:
        device: the device it runs on.
        handlers: the kwargs handlers passed to the ``Accelerator``, by class.

    Attributes:
        name: the value of ``mixed_precision`` that selects it.
        scales_loss: whether it scales losses and may skip steps; if not, loops call it for neither.
        loss_scaling: what scales them: that of fp16, or of a gradient scaler that the user assigned; or None.
        autocast_format: the format of all that it does not convert, where that has another name.
        handler_classes: kwargs handlers that configure it.
    """

    name: ClassVar[str]
    scales_loss: bool = False
    loss_scaling: LossScaling | None = None
    autocast_format: ClassVar[str | None] = None
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = ()
    handlers: dict[type, KwargsHandler]

    def __init__(self, device: Device, handlers: Mapping[type, KwargsHandler] | None = None) -> None:
        self.device = device
        self.handlers = dict(handlers or {})
        if FORWARD_CONTEXTS.entered:
            FORWARD_CONTEXTS.exit_interrupted()

    def check(self) -> None:
        """Refuse a format that the device does not support.

        Raises:
            DeviceError: the device lacks this format.
        """
        return

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, where there is one."""
        return None if self.loss_scaling is None else self.loss_scaling.scaler

    def set_loss_scaling(self, loss_scaling: LossScaling | None) -> None:
        """Set what scales losses; None scales nothing."""
        if self.loss_scaling is not None:
            self.loss_scaling.update_scale()
        self.loss_scaling, self.scales_loss = loss_scaling, loss_scaling is not None

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores what scales losses now, and its scale."""
        loss_scaling = self.loss_scaling
        state = {} if loss_scaling is None else loss_scaling.scaler.state_dict()

        def restore() -> None:
            self.loss_scaling, self.scales_loss = loss_scaling, loss_scaling is not None
            if loss_scaling is not None:
                loss_scaling.forget_optimizers()
                loss_scaling.scaler.load_state_dict(state)

        return restore

    @property
    def recipe(self) -> Any:
        """The recipe of 8-bit floats; None in other formats."""
        return None

    @property
    def fp8_backend(self) -> str:
        """The library for 8-bit floats: ``AO``, ``TE`` or ``MSAMP``; ``NO`` in other formats."""
        return "NO"

    @abstractmethod
    def forward_context(self, options: Any = None) -> AbstractContextManager[Any]:
        """Return the context of a forward pass; ``options`` is an ``AutocastKwargs`` for this call only."""

    def attach(self, model: nn.Module) -> None:
        """Make ``model`` compute in this format, without touching its ``forward``."""

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the steps of a prepared optimizer, whose parameters are those that it will step."""

    def replaces_attached(self, model: nn.Module) -> bool:
        """Return True when ``attach`` would replace another attached precision."""
        return False

    def report_option(self, option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
        """Report the status of the option that chose this format, as prepared models show it."""
        return option.report_unless(next(filter(None, map(self.explain_missing, models)), ""))

    def explain_missing(self, model: nn.Module) -> str:
        """Return why a prepared model does not compute in this format; empty if it does."""
        return ""

    def explain_unused(self, option: str) -> str:
        """Return why an option of its handler makes no difference here; empty if it is used."""
        return ""

    def describe_conversion(self) -> str:
        """Return the effect of ``attach`` as a clause for the plan; empty when it has none."""
        return ""

    def describe_attachment(self, models: Sequence[nn.Module]) -> str:
        """Return the effect of ``attach`` on these models for the plan.

        Raises:
            PrepareError: this precision does not go with one of them.
        """
        return self.describe_conversion()

    def check_trainable(self, named: Iterable[tuple[str, torch.Tensor]], *, strict: bool) -> None:
        """Warn of parameters that cannot be trained in this format as it is; refuse them in a strict run."""

    def scale(
        self, loss: torch.Tensor, reached_params: Callable[[torch.Tensor], set[torch.Tensor]] | None = None
    ) -> torch.Tensor:
        """Return the loss to run backward on; ``reached_params`` returns the parameters in its graph."""
        return loss if self.loss_scaling is None else self.loss_scaling.scale(loss, reached_params)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, once per step."""
        if self.loss_scaling is not None:
            self.loss_scaling.unscale(optimizer)

    def set_overflow_sync(self, agreement: Callable[[torch.Tensor], None] | None) -> None:
        """Set the all-reduce (max) of the overflow flag, for ranks that hold different gradients."""
        if self.loss_scaling is not None:
            self.loss_scaling.set_overflow_sync(agreement)

    def set_gather_extension(self, supported: bool) -> None:
        """Set whether the strategy all-gathers weights in the format of their tensor subclass (FSDP2)."""

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse tensor parallelism where its layers cannot compute on shards of their weights.

        Args:
            size: the number of processes that share a layer.

        Raises:
            SettingError: they cannot.
        """

    def loss_scale(self) -> float:
        """Return the current factor of the loss."""
        return 1.0 if self.loss_scaling is None else self.loss_scaling.scaler.get_scale()

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None
    ) -> tuple[bool | torch.Tensor, Any]:
        """Step; return (whether the optimizer stepped, the result of its ``step``).

        The first is a flag on the device, of one element, where the host does not know it without waiting.
        """
        if self.loss_scaling is not None:
            return self.loss_scaling.step(optimizer, closure, self.name)
        return True, optimizer.step(closure) if closure is not None else optimizer.step()
