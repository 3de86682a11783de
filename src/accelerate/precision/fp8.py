"""8-bit floats: not built yet; a request is refused instead of computed in another format."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from accelerate.precision.base import Precision, no_context


class FP8MixedPrecision(Precision):
    """The precision fp8, which ``check`` refuses."""

    name: ClassVar[str] = "fp8"
    planned_feature: ClassVar[str] = (
        "matrix products in 8-bit floats by torchao or TransformerEngine will come"
    )

    def forward_context(self, options: Any = None) -> AbstractContextManager[Any]:
        """Return an empty context; ``check`` refuses before this is called."""
        return no_context()


PLUGIN = FP8MixedPrecision
