"""Trees of tensors taken apart: the tensors in a row, and a form that can be sent and compared.

A form is the tree with a ``Slot`` in the place of each tensor. Everything else in it is a plain value.
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


class Slot(int):
    """The place of a tensor in its row."""

    def __repr__(self) -> str:
        return f"tensor {int(self)}"


def take_apart(value: Any, what: str) -> tuple[Any, list[torch.Tensor]]:
    """The form of a tree, and its tensors.

    Args:
        value: containers, tensors and plain values (numbers, strings, None, dtypes ...).
        what: what errors call it.

    Raises:
        PrepareError: it holds something else, such as a cache.
    """
    tensors: list[torch.Tensor] = []

    def slot(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    for path, leaf in tree.leaves(value):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise PrepareError(
                f"{what}{path} is a {type(leaf).__name__}, which cannot go through a pipeline",
                why="only tensors and plain values are cut into chunks and sent from stage to stage",
                fix="leave it out (for a cache of keys and values: use_cache=False)",
            )
    return tree.map_tree(slot, value), tensors


def put_together(form: Any, tensors: Sequence[Any]) -> Any:
    """The tree of a form and a row of tensors."""
    return tree.map_tree(lambda leaf: tensors[leaf] if isinstance(leaf, Slot) else leaf, form)
