"""Options that are fields of a public class and settings of a launch too: one declaration for both.

    @mutable_dataclass
    class FSDPSettings:
        __prefix__ = "fsdp_"
        min_num_params: int | None = setting(None, help="least parameters of an FSDP unit")

    @describe_fields
    @dataclass
    class FullyShardedDataParallelPlugin(FSDPSettings):
        def __post_init__(self) -> None:
            self.settings = load_fields(self)

The launcher reads the first class, which imports no torch. The second inherits the fields: its constructor,
their variables and defaults, and the part of its docstring that explains them follow from the first.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from accelerate.core.setting import Setting, SettingsWithOrigins, declared_settings, load_settings
from accelerate.core.value_types import convert_to, wrong_value

T = TypeVar("T")


def load_fields(
    instance: object, cls: type[Any] | None = None, *, objects: Mapping[str, Any] | None = None, **code: Any
) -> SettingsWithOrigins[Any]:
    """Load the settings that the fields of ``instance`` are, and write the values into the fields.

    A field that is None takes its variable, then its fallback. A member of an enumeration counts by its name.

    Args:
        instance: an object with such fields.
        cls: the class that declares them; None takes all of the object's own class.
        objects: fields that may hold an object that no text can say, with its type; it stays as it is.
        code: values of settings that count instead of the fields, by name.

    Raises:
        SettingError: a value has the wrong type.
        UnknownNameError: a value is not among the choices.
    """
    declaring: type[Any] = cls or type(instance)
    rows = declared_settings(declaring)
    given: dict[str, Any] = {}
    kept: set[str] = set()
    for row in rows:
        value = code.get(row.name, getattr(instance, row.field))
        if objects and row.field in objects and value is not None and not isinstance(value, str | bool):
            setattr(instance, row.field, _check_object(value, row, objects[row.field], type(instance)))
            kept.add(row.field)
        else:
            if isinstance(value, Enum):
                value = value.name
            given[row.name] = (
                tuple(cast("Collection[Any]", value)) if isinstance(value, set | list) else value
            )
    loaded = load_settings(declaring, code=given, container=SimpleNamespace, owner=type(instance).__name__)
    for row in rows:
        if row.field not in kept:
            value = getattr(loaded.value, row.field)
            setattr(instance, row.field, row.fallback if value is None else value)
    return loaded


def _check_object(value: Any, row: Setting, kind: Any, owner: type[Any]) -> Any:
    kind = kind | row.type
    fits, result = convert_to(kind, value, "code")
    if not fits:
        raise wrong_value(f"the argument {row.field} of {owner.__name__}", row.field, kind, value)
    return result


def describe_fields(cls: type[T]) -> type[T]:
    """Add the fields that are settings to ``Attributes:`` in the docstring of a class."""
    described = "".join(f"    {_describe_field(row)}\n" for row in declared_settings(cls))
    head, section, rest = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    if not section:
        head, raises, rest = head.partition("Raises:\n")
        head, rest = f"{head.rstrip()}\n\n", f"\n{raises}{rest}" if raises else ""
    cls.__doc__ = f"{head}Attributes:\n{described}{rest}"
    return cls


def _describe_field(row: Setting) -> str:
    choices = f": {', '.join(map(str, row.choices))}" if row.choices else ""
    variable = f"``{row.variable}``" if row.variable else ""
    fallback = "" if row.fallback is None else str(row.fallback)
    source = ", ".join(filter(None, (variable, fallback)))
    text = f"{row.field}: {row.help}{choices}{f' ({source})' if source else ''}."
    return textwrap.fill(text, 106, subsequent_indent=" " * 8, break_on_hyphens=False)
