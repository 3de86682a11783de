"""Tensors in the outputs of forwards, where torch's wrappers put hooks on them or do not find them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

# How deep objects are searched: one may refer to anything, as to a logger.
_NESTED_OBJECTS = 3


def find_hidden_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors with a gradient in attributes of objects, if there is none in plain containers.

    torch finds tensors in tuples, lists and dicts, and in other types that are registered as trees; in
    dataclasses by some wrappers and versions only.
    """
    if any(tensor.requires_grad for tensor in _tensors_in(output)):
        return []
    return [tensor for tensor in _tensors_in(output, _NESTED_OBJECTS) if tensor.requires_grad]


def _tensors_in(output: Any, objects: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in attributes of objects nested up to ``objects`` times."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors_in([*output.values()], objects)
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors_in(item, objects)
    elif objects and not isinstance(output, nn.Module | type | ModuleType):
        slots = (name for kind in type(output).__mro__ for name in getattr(kind, "__slots__", ()))
        attributes = [getattr(output, name, None) for name in slots]
        yield from _tensors_in([*getattr(output, "__dict__", {}).values(), *attributes], objects - 1)
