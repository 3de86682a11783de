"""The precision protocol: the forward's context, and who scales losses and steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.core.effects import Effect, Option
from accelerate.core.errors import NotBuiltError
from accelerate.core.handler import KwargsHandler
from accelerate.device.base import Device


class Precision(ABC):
    """In which number format a model computes.

    Args:
        device: the hardware it runs on.
        handlers: the kwargs handlers given to the ``Accelerator``, by class.

    Attributes:
        name: the value of ``mixed_precision`` that means it.
        scales: whether it scales losses and judges steps; if not, loops leave it out of both.
        planned: what will come, for a precision that is not built yet.
        handler_classes: kwargs handlers that configure it.
    """

    name: ClassVar[str]
    scales: ClassVar[bool] = False
    planned: ClassVar[str] = ""
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = ()

    def __init__(self, device: Device, handlers: Mapping[type, KwargsHandler] | None = None) -> None:
        self.device = device
        self.handlers = dict(handlers or {})

    def check(self) -> None:
        """Refuses what the device cannot do.

        Raises:
            DeviceError: the device lacks this format.
            NotBuiltError: it is planned only.
        """
        if self.planned:
            raise NotBuiltError(f"mixed_precision={self.name!r} is not built yet", why=self.planned)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, where there is one."""
        return None

    @abstractmethod
    def forward(self, options: Any = None) -> AbstractContextManager[Any]:
        """The context a forward pass runs in; ``options`` is an ``AutocastKwargs`` for this time only."""

    def attach(self, model: nn.Module) -> None:
        """Makes ``model`` compute in this format, without touching its ``forward``."""

    def compiled(self, model: nn.Module) -> None:
        """Is told that ``model``, to which it is attached, was compiled as a whole."""

    def takes_over(self, model: nn.Module) -> bool:
        """Whether ``attach`` would end what another precision has attached."""
        return False

    def effect(self, option: Option, models: Sequence[nn.Module]) -> Effect:
        """What became of the choice of this format, seen on prepared models."""
        return option.seen(next(filter(None, map(self.missing, models)), ""))

    def missing(self, model: nn.Module) -> str:
        """Why a prepared model does not compute in this format, as can be seen on it; empty if it does."""
        return ""

    def converts(self) -> str:
        """What ``attach`` does, as a clause for the plan; empty when it does nothing."""
        return ""

    def check_trainable(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuses parameters that cannot be trained this way."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward on."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the loss scale out of the optimizer's gradients, once per step."""

    def agree(self, agreement: Callable[[torch.Tensor], None] | None) -> None:
        """Is told how a flag of each process becomes the greatest of all, where each has other gradients."""

    def loss_scale(self) -> float:
        """By how much gradients are scaled now."""
        return 1.0

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> tuple[bool, Any]:
        """(whether the optimizer stepped, what its ``step`` returned)."""
        return True, optimizer.step(closure) if closure is not None else optimizer.step()


def no_context() -> AbstractContextManager[None]:
    """A forward as the weights are."""
    return nullcontext()
