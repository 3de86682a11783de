"""The stack of prepared loaders in iteration; the innermost one is the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref


class ActiveLoaders:
    """A stack of weak references to the loaders in iteration."""

    def __init__(self) -> None:
        self._stack: list[ReferenceType[Any]] = []
        # Called with a loader that begins an epoch, or is requested for its next batch, before anything of
        # that is drawn or read.
        self.on_request: Callable[[Any], None] | None = None

    def add(self, loader: Any) -> None:
        """Add a loader that begins an epoch."""
        self._stack.append(ref(loader))

    def touch(self, loader: Any) -> None:
        """Make a loader that yields a batch the innermost one: loops inside its own are over."""
        if self.innermost is not loader:
            self.remove(loader)
            self.add(loader)

    def remove(self, loader: Any) -> None:
        """Remove a loader whose epoch ended or was broken off."""
        self._stack = [item for item in self._stack if item() not in (None, loader)]

    @property
    def innermost(self) -> Any | None:
        """The loader of the innermost loop, or None."""
        return self._stack[-1]() if self._stack else None

    @property
    def references(self) -> list[Any]:
        """All loaders in iteration, the outermost first, after a leading None."""
        return [None, *(item() for item in self._stack)]


# The stack of loaders that no Accelerator prepared.
UNOWNED = ActiveLoaders()
