"""Words of the options of sharding: names of torch's enumerations, number formats, classes of layers."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import SettingError, UnknownNameError

_DTYPES = {"no": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def named(value: Any) -> Any:
    """The name of a member of an enumeration; anything else as it is."""
    return value.name if isinstance(value, Enum) else value


def word(value: Any, kind: type[Enum], field: str) -> str:
    """The name that ``value`` is: in any case, or as a number counted from 1.

    A line before a name, with which torch marks what it may change, is left out.

    Raises:
        UnknownNameError: it is none.
    """
    names = [member.name.lstrip("_") for member in kind]
    text = str(value).upper().lstrip("_")
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise UnknownNameError("value", str(value), names, where=f"of {field}")
    return text


def dtype(given: Any) -> torch.dtype:
    """A number format from its name, ``"bf16"`` or ``"bfloat16"``.

    Raises:
        UnknownNameError: it is none.
    """
    if isinstance(given, torch.dtype):
        return given
    name = str(given).removeprefix("torch.")
    found = _DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnknownNameError("number format", str(given), _DTYPES, where="in mixed_precision_policy")
    return found


def formats(given: dict[Any, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a policy of number formats; those that are None are left out.

    Raises:
        UnknownNameError: a field or a number format does not exist.
    """
    for name in given:
        if name not in fields:
            raise UnknownNameError("key of mixed_precision_policy", str(name), fields)
    return {
        name: value if isinstance(value, bool) else dtype(value)
        for name, value in given.items()
        if value is not None
    }


def layers(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """The classes of that names in ``model``; with None those that it names as not to be split.

    Raises:
        UnknownNameError: it has no module of a class that was named.
        SettingError: no class was named, and it names none itself.
    """
    classes = {type(part).__name__: type(part) for part in model.modules()}
    if names is not None:
        for name in names:
            if name not in classes:
                raise UnknownNameError(
                    "class to wrap", name, classes, where=f"in the model {type(model).__name__}"
                )
        return {classes[name] for name in names}
    found = {classes[name] for name in getattr(model, "_no_split_modules", None) or () if name in classes}
    if not found:
        raise SettingError(
            f"auto_wrap_policy is transformer_based_wrap, and a {type(model).__name__} does not say what its "
            "layers are",
            fix=f"transformer_cls_names_to_wrap=[...], with some of {', '.join(sorted(classes))}",
        )
    return found
