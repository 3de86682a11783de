"""Helpers for any Python object: dotted attributes, names, merging of dicts."""

from __future__ import annotations

import functools
from typing import Any


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at a dotted path: ``recursive_getattr(model, "encoder.layer.0")``.

    Raises:
        AttributeError: a part of the path does not exist.
    """
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function; that of its class for any other object."""
    for named in (obj, type(obj)):
        name = getattr(named, "__qualname__", None) or getattr(named, "__name__", None)
        if name is not None:
            return str(name)
    return str(obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of ``source`` into ``destination``, dict by dict, and return it.

    Where both have a key, two dicts are merged and anything else is replaced.
    """
    for key, value in source.items():
        old_value = destination.get(key)
        if isinstance(value, dict) and isinstance(old_value, dict):
            merge_dicts(value, old_value)
        else:
            destination[key] = value
    return destination
