"""No mixed precision: the forward computes in the format of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import nn

from accelerate.precision.autocast import AutocastKwargs, attached, autocast, detach
from accelerate.precision.base import Precision, no_context


class Plain(Precision):
    """As the weights are."""

    name: ClassVar[str] = "no"

    def forward(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Nothing, unless autocast is asked for by its options."""
        if options is None or not options.enabled:
            return no_context()
        return autocast(self.device, None, options)

    def takes_over(self, model: nn.Module) -> bool:
        """Whether the model computes in another format so far."""
        return attached(model) is not None

    def attach(self, model: nn.Module) -> None:
        """As the weights are, also if another format was attached before."""
        detach(model)


PLUGIN = Plain
