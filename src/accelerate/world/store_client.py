"""A client of the process group's key-value store with its own connection and short timeouts."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

_PREFIX = "accelerate"
# Worlds opened one after the other may share a store; every rank opens the same number of them.
_client_count = 0


class StoreClient:
    """Reads and writes short texts in the store that all ranks share.

    Attributes:
        is_lost: the store does not answer any more: the process that hosts it is gone.
        store: the store under this client's prefix.
        group_store: the store of the process group, without a prefix.
    """

    def __init__(self, store: Any) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        global _client_count
        _client_count += 1
        self.group_store = store
        self.store: Any = PrefixStore(f"{_PREFIX}/{_client_count}", store)
        self.is_lost = False
        self._connection: Any = None

    def open_prefix(self, prefix: str) -> StoreClient:
        """Return a client of the same store under a prefix, with its own connection for another thread."""
        from torch.distributed.distributed_c10d import PrefixStore

        other = copy.copy(self)
        other.store, other._connection = PrefixStore(prefix, self.store), None
        return other

    def _request(self, method: str, *arguments: Any) -> Any:
        if self.is_lost:
            return None
        try:
            if self._connection is None:
                # Its own: another thread may block the shared one while it waits. Torch before 2.10 cannot
                # clone a store.
                self._connection = self.store.clone() if hasattr(self.store, "clone") else self.store
                self._connection.set_timeout(timedelta(seconds=5))
            return getattr(self._connection, method)(*arguments)
        except RuntimeError:  # torch's DistNetworkError and DistStoreError, by version
            self.is_lost = True
            return None

    def put(self, key: str, text: str) -> None:
        """Set a key."""
        self._request("set", key, text)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._request("delete_key", key)

    def has(self, *keys: str) -> bool:
        """Return True if all keys are set."""
        return bool(self._request("check", list(keys)))

    def get(self, key: str) -> str | None:
        """Return the text of a key, None if it is not set."""
        value = self._request("get", key) if self.has(key) else None
        return None if value is None else value.decode()

    def add(self, key: str) -> int | None:
        """Add one to a counter and return it; None if the store is lost."""
        return self._request("add", key, 1)

    def put_if_absent(self, key: str, text: str) -> str | None:
        """Set a key unless it is set; return the text that it has, None if the store is lost."""
        value = self._request("compare_set", key, "", text)
        return None if value is None else value.decode()

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the texts of those keys that are set."""
        available = list(keys) if self.has(*keys) else [key for key in keys if self.has(key)]
        values = self._request("multi_get", available) if available else None
        return (
            {}
            if values is None
            else {key: text.decode() for key, text in zip(available, values, strict=True)}
        )

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all keys are set; return False after ``seconds`` or if the store is lost."""
        until, pause = time.monotonic() + seconds, 0.0005
        while not self.has(*keys):
            if self.is_lost or time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return True
