"""The key-value store of the group as a notice board: over a connection of its own, and never long."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

_PREFIX = "accelerate"
# Worlds that were opened one after the other may share a store; all ranks open equally many.
_opened = 0


class Board:
    """Short notices that all ranks can read.

    Attributes:
        lost: the store does not answer any more: the process that holds it is gone.
        store: the whole store, under this board's prefix.
        home: the store itself, which is the group's.
    """

    def __init__(self, store: Any) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        global _opened
        _opened += 1
        self.home = store
        self.store: Any = PrefixStore(f"{_PREFIX}/{_opened}", store)
        self.lost = False
        self._own: Any = None

    def beside(self, prefix: str) -> Board:
        """A board in the same store under a prefix and over a connection of its own, for another thread."""
        from torch.distributed.distributed_c10d import PrefixStore

        other = copy.copy(self)
        other.store, other._own = PrefixStore(prefix, self.store), None
        return other

    def _client(self) -> Any:
        """A connection of its own: another thread may hold the common one for as long as it waits."""
        if self._own is None:
            # torch before 2.10 cannot clone; there the common connection must do
            self._own = self.store.clone() if hasattr(self.store, "clone") else self.store
            self._own.set_timeout(timedelta(seconds=5))
        return self._own

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self.lost:
            return None
        try:
            return getattr(self._client(), method)(*arguments)
        except RuntimeError:  # torch's DistNetworkError and DistStoreError, by version
            self.lost = True
            return None

    def put(self, key: str, text: str) -> None:
        """Writes a notice."""
        self._ask("set", key, text)

    def drop(self, key: str) -> None:
        """Takes a notice away."""
        self._ask("delete_key", key)

    def has(self, *keys: str) -> bool:
        """Whether all of the notices are there."""
        return bool(self._ask("check", list(keys)))

    def get(self, key: str) -> str | None:
        """A notice, None when it is not there."""
        found = self._ask("get", key) if self.has(key) else None
        return None if found is None else found.decode()

    def first(self, key: str, text: str) -> str | None:
        """The notice that was written first under ``key``, this one if there was none; None when lost."""
        found = self._ask("compare_set", key, "", text)
        return None if found is None else found.decode()

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Those of the notices that are there."""
        there = list(keys) if self.has(*keys) else [key for key in keys if self.has(key)]
        found = self._ask("multi_get", there) if there else None
        return {} if found is None else {key: text.decode() for key, text in zip(there, found, strict=True)}

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all of the notices came in time."""
        until, pause = time.monotonic() + seconds, 0.0005
        while not self.has(*keys):
            if self.lost or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return True
