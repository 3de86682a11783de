"""No mixed precision: the forward computes in the format of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import nn

from accelerate.precision.autocast import AutocastKwargs, detach_autocast, get_attached_autocast
from accelerate.precision.base import Precision


class NoMixedPrecision(Precision):
    """Computes in the dtype of the weights."""

    name: ClassVar[str] = "no"

    def forward_context(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return an empty context, whatever ``options`` say of autocast in other formats."""
        return nullcontext()

    def replaces_attached(self, model: nn.Module) -> bool:
        """Return True when the model has computed in another format so far."""
        return get_attached_autocast(model) is not None

    def attach(self, model: nn.Module) -> None:
        """Remove a precision that was attached before."""
        detach_autocast(model)


PLUGIN = NoMixedPrecision
