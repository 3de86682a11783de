"""Conversion of logged values and configurations to types that libraries take."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any

from accelerate.core.errors import PrepareError

# Arrays and tensors of more elements are text: numpy and torch print as many without leaving some out.
MAX_ELEMENTS = 1000


def unwrap_scalar(value: Any) -> Any:
    """Return the number of a one-element tensor or array; any other value unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and math.prod(getattr(value, "shape", (0,))) == 1 else value


def unwrap_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with one-element tensors and arrays as numbers, also in nested mappings."""
    return {
        key: unwrap_scalars(value) if isinstance(value, Mapping) else unwrap_scalar(value)
        for key, value in values.items()
    }


def flatten_mappings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten logged values: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten_mappings(value, f"{name}/") if isinstance(value, Mapping) else {name: value}
    return flat


def to_json_types(value: Any) -> Any:
    """Convert a configuration to the types of JSON: other values, such as paths and dtypes, become text.

    Namespaces and dataclasses become dicts of their fields; ranges, arrays and tensors that are not large
    become lists.
    """
    value = _list_elements(unwrap_scalar(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): to_json_types(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [to_json_types(each) for each in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), str(value))


def _list_elements(value: Any) -> Any:
    """Return the elements of an array or a tensor as lists; any other value, and a large one, unchanged."""
    elements = getattr(value, "tolist", None)
    if not callable(elements) or math.prod(getattr(value, "shape", (math.inf,))) > MAX_ELEMENTS:
        return value
    try:
        return elements()
    except RuntimeError:  # on the meta device, or sparse
        return value


def to_json_config(values: Any) -> Any:
    """Convert a configuration by ``to_json_types``; an object of another class counts as its attributes."""
    plain = to_json_types(values)
    is_object = isinstance(plain, str) and not isinstance(values, str) and hasattr(values, "__dict__")
    return to_json_types(vars(values)) if is_object else plain


def flatten_config(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``; lists become text.

    Raises:
        PrepareError: the configuration has no keys.
    """
    flat: dict[str, Any] = {}
    plain = to_json_config(values)
    if not isinstance(plain, dict):
        raise PrepareError(
            f"the configuration for the trackers is a {type(values).__name__}",
            why="values are stored under names",
            fix="pass a dict, such as vars(args)",
        )
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            flat |= flatten_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
