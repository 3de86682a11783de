"""Which prepared loaders are being iterated; the innermost one counts."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref


class ActiveLoaders:
    """A stack of loaders in iteration, held weakly: a loader nobody else holds is not kept alive.

    Attributes:
        micro_steps: accumulation steps since the innermost loader gave its batch.
        micro_steps_before: the same for the batch before, 0 before there was one.
    """

    def __init__(self) -> None:
        self._stack: list[ReferenceType[Any]] = []
        self.micro_steps = self.micro_steps_before = 0

    def add(self, loader: Any) -> None:
        """The loader begins an epoch."""
        self._stack.append(ref(loader))

    def remove(self, loader: Any) -> None:
        """The loader's epoch ended, or was broken off."""
        self._stack = [item for item in self._stack if item() not in (None, loader)]

    def new_batch(self) -> None:
        """The innermost loader gives its next batch."""
        if self.micro_steps:
            self.micro_steps_before = self.micro_steps
        self.micro_steps = 0

    @property
    def innermost(self) -> Any | None:
        """The loader whose loop is the innermost, or None."""
        return self._stack[-1]() if self._stack else None

    @property
    def references(self) -> list[Any]:
        """All loaders in iteration, the outermost first; None stands for none."""
        return [None, *(item() for item in self._stack)]


# The loaders that no Accelerator prepared.
UNOWNED = ActiveLoaders()
