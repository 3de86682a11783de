"""8-bit floats: not built yet; asked for, it refuses instead of computing in another format."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from accelerate.precision.base import Precision, no_context


class Float8(Precision):
    """Refuses in ``check``."""

    name: ClassVar[str] = "fp8"
    planned: ClassVar[str] = "matrix products in 8-bit floats by torchao or TransformerEngine will come"

    def forward(self, options: Any = None) -> AbstractContextManager[Any]:
        """Never reached."""
        return no_context()


PLUGIN = Float8
