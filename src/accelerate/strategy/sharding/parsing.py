"""Parsers of the FSDP options: names of torch's enumerations, dtypes, classes of layers."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import SettingError, UnknownNameError

_DTYPES = {"no": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def enum_name(value: Any) -> Any:
    """Return the name of a member of an enumeration; anything else as it is."""
    return value.name if isinstance(value, Enum) else value


def parse_enum_name(value: Any, kind: type[Enum], field: str) -> str:
    """Return the member name that ``value`` means: in any case, or as a number counted from 1.

    A leading underscore, with which torch marks unstable members, is ignored.

    Raises:
        UnknownNameError: there is no such member.
    """
    names = [member.name.lstrip("_") for member in kind]
    text = str(value).upper().lstrip("_")
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise UnknownNameError("value", str(value), names, where=f"of {field}")
    return text


def parse_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a name such as ``"bf16"`` or ``"bfloat16"``.

    Raises:
        UnknownNameError: there is no such dtype.
    """
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    dtype = _DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnknownNameError("number format", str(value), _DTYPES, where="in mixed_precision_policy")
    return dtype


def parse_policy_fields(policy: dict[Any, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a mixed precision policy with dtypes; those that are None are left out.

    Raises:
        UnknownNameError: a field or a dtype does not exist.
    """
    for name in policy:
        if name not in fields:
            raise UnknownNameError("key of mixed_precision_policy", str(name), fields)
    return {
        name: value if isinstance(value, bool) else parse_dtype(value)
        for name, value in policy.items()
        if value is not None
    }


def find_layer_classes(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """Return the classes of these names in ``model``; with None those in its ``_no_split_modules``.

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
    unsplit = {classes[name] for name in getattr(model, "_no_split_modules", None) or () if name in classes}
    if not unsplit:
        raise SettingError(
            f"auto_wrap_policy is transformer_based_wrap, and a {type(model).__name__} does not say what its "
            "layers are",
            fix=f"transformer_cls_names_to_wrap=[...], with some of {', '.join(sorted(classes))}",
        )
    return unsplit
