"""Comparing outputs that cannot be joined: the processes of a sequence must have equal ones."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import PrepareError


def has_numbers(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or an array of numbers, which can be joined."""
    return isinstance(leaf, torch.Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc")


def has_fixed_numbers(values: Any) -> bool:
    """Return whether the type alone says that there are no texts or objects on any rank.

    A list may be longer on another rank, and where a container is empty another rank may have texts.
    """
    if tree.is_mapping(values):
        values = tuple(values.values())
    if isinstance(values, tuple):
        return bool(values) and all(map(has_numbers, values))
    return has_numbers(values)


def check_equal(leaves: list[Any], size: int, group: Any, what: str) -> None:
    """Exchange the leaves of an output between the processes of a sequence, and compare them.

    Args:
        leaves: those of this process.
        size: the number of processes.
        group: their process group.
        what: the kind of parallelism, for messages.

    Raises:
        PrepareError: they differ.
    """
    everyone: list[Any] = [None] * size
    own = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    dist.all_gather_object(everyone, own, group=group)
    # This rank's too is a copy that was pickled: copies of equal objects are pickled alike.
    first = everyone[0]
    for other in everyone[1:]:
        if len(first) != len(other) or not all(map(_is_equal, first, other)):
            raise PrepareError(
                "texts or objects to gather differ between processes of one sequence",
                why=f"each has a part of its tokens ({what}), and they cannot be joined",
                fix="gather tensors or arrays that are per token, (rows, tokens), and make the texts or "
                "objects of what comes back",
            )


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values that were unpickled are equal.

    ``==`` says no of NaN and of copies of most objects, and may give an array.
    """
    if isinstance(one, (set, frozenset)):  # equal ones may be pickled in another order
        return isinstance(other, (set, frozenset)) and one == other
    return _pickle_values(one) == _pickle_values(other)


def _pickle_values(value: Any) -> bytes:
    file = io.BytesIO()
    _ValuePickler(file).dump(value)
    return file.getvalue()


class _ValuePickler(pickle.Pickler):
    """Pickles tensors by their values: torch's format contains addresses."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), data),)
