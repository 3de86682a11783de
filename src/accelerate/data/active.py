"""Which prepared loaders are being iterated; the innermost one counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref


class ActiveLoaders:
    """A stack of loaders in iteration, held weakly: a loader nobody else holds is not kept alive."""

    def __init__(self) -> None:
        self._stack: list[ReferenceType[Any]] = []
        # Called with a loader that begins an epoch, or is asked for the batch after the one in hand; nothing
        # of what comes is drawn or read by then.
        self.asked: Callable[[Any], None] | None = None

    def add(self, loader: Any) -> None:
        """The loader begins an epoch."""
        self._stack.append(ref(loader))

    def touch(self, loader: Any) -> None:
        """The loader is asked for a batch: loops inside of its own, also one left half-way, are over."""
        if self.innermost is not loader:
            self.remove(loader)
            self.add(loader)

    def remove(self, loader: Any) -> None:
        """The loader's epoch ended, or was broken off."""
        self._stack = [item for item in self._stack if item() not in (None, loader)]

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
