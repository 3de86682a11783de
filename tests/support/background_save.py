"""The memory that saving in the background copies a state to, and the writing that can be held."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from accelerate.checkpoint import async_save
from accelerate.checkpoint.storage import LocalCheckpointStorage


def hold_writes(patch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event without which no file of a checkpoint is written."""
    go, write = threading.Event(), LocalCheckpointStorage.write

    def held(store: LocalCheckpointStorage, name: str, fill: Any) -> Any:
        assert go.wait(60)
        return write(store, name, fill)

    patch.setattr(LocalCheckpointStorage, "write", held)
    return go


def release_staging() -> None:
    """Give back the host memory of earlier copies."""
    async_save.staging.release()


def staging_size() -> int:
    """Return the bytes of host memory that are kept for copies."""
    return async_save.staging.size


def staging_blocks() -> dict[str, list[torch.Tensor]]:
    """Return the host memory that is kept for copies, by the type of the device that they come from."""
    return {kind: list(blocks) for kind, blocks in async_save.staging._blocks.items()}
