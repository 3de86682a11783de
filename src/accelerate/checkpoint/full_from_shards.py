"""Full states, read from the shards of a model or an optimizer, for what takes no shards (DeepSpeed)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint.dcp_files import ShardFolderReader
from accelerate.checkpoint.layout import CheckpointLoadContext
from accelerate.checkpoint.sharded_state import entries_by_model_name, optimizer_entries, read_nested


def read_full_state(
    folder: Path, category: str, context: CheckpointLoadContext
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return (outline, function that reads a sharded state as a full one, on the host).

    The outline is the same state dict, of a model on the meta device, of an optimizer without its ``state``.

    Args:
        folder: the folder of the shards.
        category: ``"models"``, or ``"optimizers"``: then the state dict goes by parameter names, and the
            state of a parameter is read whenever it is asked for.
        context: whether reading may run code.

    Raises:
        CheckpointError: shards are missing.
    """
    shards = ShardFolderReader(folder, trusted=context.trusted)
    shards.check_files(shards.paths)
    if category == "models":
        entries = entries_by_model_name(shards, {})
        metadata = {name: shards.tensor_metadata(group[0]) for name, group in entries.items()}
        outline: dict[str, Any] = {
            name: None if entry is None else torch.empty(entry.size, device="meta")
            for name, entry in metadata.items()
        }
        return outline, lambda: {name: read_nested(shards, group, 2) for name, group in entries.items()}
    states, other = optimizer_entries(shards)
    outline = {**{key: read_nested(shards, group, 2) for key, group in other.items()}, "state": {}}
    by_name = {name: _ParamStateOnDisk(shards, group) for name, group in states.items()}
    return outline, lambda: {**outline, "state": by_name}


class _ParamStateOnDisk(Mapping[str, Any]):
    """The state of one parameter, read at each access."""

    def __init__(self, shards: ShardFolderReader, group: Iterable[str]) -> None:
        self._shards = shards
        self._entries: dict[str, list[str]] = {}
        for name in group:
            self._entries.setdefault(shards.paths[name][3], []).append(name)

    def __getitem__(self, key: str) -> Any:
        return read_nested(self._shards, self._entries[key], 4)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
