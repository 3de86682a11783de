"""Trees of tensors, flattened to a list of tensors and a structure that can be sent and compared.

The structure is the tree with a ``TensorLeafIndex`` for each tensor; other leaves are plain values.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, enum.Enum)
_PLAIN += (torch.dtype, torch.device, torch.memory_format, torch.layout)


class TensorLeafIndex(int):
    """The index of a tensor in the list of tensors."""

    def __repr__(self) -> str:
        return f"tensor {int(self)}"


def flatten_tree(value: Any, label: str) -> tuple[Any, list[torch.Tensor]]:
    """Flatten a tree; return (structure, tensors).

    Args:
        value: containers, tensors and plain values (numbers, strings, None, dtypes ...).
        label: the name of the value in errors.

    Raises:
        PrepareError: the tree has another leaf, such as a cache.
    """
    tensors: list[torch.Tensor] = []

    def to_index(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return TensorLeafIndex(len(tensors) - 1)

    for path, leaf in tree.iterate_leaves(value):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise PrepareError(
                f"{label}{path} is a {type(leaf).__name__}, which cannot go through a pipeline",
                why="only tensors and plain values are cut into chunks and sent from stage to stage",
                fix="leave it out (for a cache of keys and values: use_cache=False)",
            )
    return tree.map_tree(to_index, value), tensors


def unflatten_tree(structure: Any, tensors: Sequence[Any]) -> Any:
    """Return the tree of a structure and a list of tensors."""
    return tree.map_tree(lambda leaf: tensors[leaf] if isinstance(leaf, TensorLeafIndex) else leaf, structure)
