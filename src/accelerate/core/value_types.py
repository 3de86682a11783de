"""Plain values: the types that are declared for them, and classes of values that do not change.

A declared type says whether a value fits, what it becomes, and how people call the type. Settings of all
sources (``setting.py``) and arguments of constructors (``argument_checks.py``) share it.
"""

from __future__ import annotations

import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from datetime import timedelta
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from accelerate.core import environ
from accelerate.core.errors import SettingError

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
elif TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Do nothing: only type checkers use it."""
        return lambda decorator: decorator


T = TypeVar("T")
Source = Literal["text", "file", "code"]
UNIONS = (typing.Union, types.UnionType)
_ANY_ORDER = (Sequence, Iterable, Collection)
_SEQUENCES = (tuple, list, *_ANY_ORDER)
_LISTS = (list, tuple, set, frozenset)
_WITH_EXPONENT = re.compile(r"[+-]?\d+\.?\d*[eE]\+?\d{1,2}", re.ASCII)
_PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class ValueRule:
    """A rule beyond the type, inside ``Annotated[int, ValueRule(" (1 or more)", ...)]``.

    Args:
        words: the rule, in words that follow those of the type: ``" (1 or more)"``.
        holds: whether a value of the type keeps it.
    """

    def __init__(self, words: str, holds: Callable[[Any], bool]) -> None:
        self.words, self.holds = words, holds


# No job has more processes, machines, threads or restarts: a greater number is a slip, and takes all memory.
_MOST = 1_000_000
PositiveInt = Annotated[int, ValueRule(" (1 or more)", lambda number: number >= 1)]
NonNegativeInt = Annotated[int, ValueRule(" (0 or more)", lambda number: number >= 0)]
Count = Annotated[int, ValueRule(f" (1 to {_MOST})", lambda number: 1 <= number <= _MOST)]
LocalCount = Annotated[int, ValueRule(" (1 to 10000)", lambda number: 1 <= number <= 10_000)]
Index = Annotated[int, ValueRule(f" (0 to {_MOST})", lambda number: 0 <= number <= _MOST)]
Port = Annotated[int, ValueRule(" (0 to 65535)", lambda number: 0 <= number <= 65535)]
Seed = Annotated[int, ValueRule(" (-2**63 to 2**64 - 1)", lambda number: -(2**63) <= number < 2**64)]
Fraction = Annotated[float, ValueRule(" (0 to 1)", lambda number: 0 <= number <= 1)]
Seconds = Annotated[float, ValueRule(" (0 or more and finite)", lambda number: 0 <= number < math.inf)]
PositiveNumber = Annotated[float, ValueRule(" (above 0 and finite)", lambda number: 0 < number < math.inf)]
NonNegativeNumber = Annotated[float, ValueRule(" (0 or more)", lambda number: number >= 0)]
Timeout = Annotated[timedelta, ValueRule(" (longer than 0)", lambda length: length > timedelta(0))]
PathText = str | os.PathLike[str]
FilledPath = Annotated[str, ValueRule(" that is not empty", bool)]


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union; of another type itself alone."""
    return get_args(kind) if get_origin(kind) in UNIONS else (kind,)


def plain_type(kind: Any) -> Any:
    """Return a type without its rules."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_choice(value: Any, choices: Iterable[Any]) -> bool:
    """Return whether ``value`` is one of these; True is no 1, and a tensor is compared with nothing."""
    return any(
        isinstance(value, type(choice)) and isinstance(value, bool) == isinstance(choice, bool)
        and value == choice
        for choice in choices
    )  # fmt: skip


def convert_to(kind: Any, value: Any, source: Source) -> tuple[bool, Any]:
    """Return (whether ``value`` fits a type, the converted value).

    Args:
        kind: the type, as annotated.
        value: the value of the source.
        source: ``"text"`` (a flag, a variable) knows only text, so ``"8"`` is a fine whole number there;
            ``"file"`` and ``"code"`` may have it between quotes, 8.0 for 8, and 0 or 1 for a yes/no value;
            ``"code"`` may have a number of NumPy or torch.
    """
    origin = get_origin(kind)
    if origin in UNIONS:
        for member in get_args(kind):
            fits, result = convert_to(member, value, source)
            if fits:
                return True, result
        return False, value
    if origin is Annotated:
        base, *rules = get_args(kind)
        fits, result = convert_to(base, value, source)
        return fits and all(rule.holds(result) for rule in rules), result
    if kind is type(None):
        absent = source != "code" and isinstance(value, str) and value.lower() in ("none", "null")
        return absent or value is None, None
    if origin is Literal:
        return is_choice(value, get_args(kind)), value
    if kind in (bool, int, float):
        return _convert_number(kind, value, source)
    if origin in _SEQUENCES:
        return _convert_sequence(kind, value, source)
    if origin in (dict, Mapping) or kind is dict:
        return _convert_mapping(kind, value, source)
    if origin is Callable:
        return callable(value), value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _convert_to_enum(kind, value)
    if _has_nul(value):
        return kind is Any or kind is object, value  # the system knows no such text
    if isinstance(kind, type) and issubclass(kind, str):  # also a text that shows itself in its own way
        fits = isinstance(value, str)
        return fits, kind(value) if fits and type(value) is not kind and kind is not str else value
    if kind is Any or kind is object:
        return True, value
    return _is_instance(value, origin or kind), value


def _is_instance(value: Any, *kinds: Any) -> bool:
    return any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds)


def refuse_nul(name: str, value: Any) -> None:
    """Refuse a text or path with a NUL character, which the system knows in no name.

    Raises:
        SettingError: it has one.
    """
    if _has_nul(value):
        raise wrong_value(f"{name} {value!r}", name, str | os.PathLike, value)


def _has_nul(value: Any) -> bool:
    text: Any = os.fspath(cast("os.PathLike[str]", value)) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and "\0" in text


def _convert_number(kind: Any, value: Any, source: Source) -> tuple[bool, Any]:
    if source == "code" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if kind is bool:
        # Files in the wild hold 'no' and 'true' as words; a yes/no word is never ambiguous.
        if isinstance(value, str) and value.lower() in environ.TRUE | environ.FALSE:
            return True, value.lower() in environ.TRUE
        if type(value) is int and value in (0, 1):
            return True, bool(value)
        return isinstance(value, bool), value
    if isinstance(value, bool):
        return False, value
    # A number between quotes is one too, but no other text that Python reads as one: nan, 1_0.
    if isinstance(value, str) and (source == "text" or _PLAIN_NUMBER.fullmatch(value)):
        if kind is int and _WITH_EXPONENT.fullmatch(value) and float(value).is_integer():
            value = f"{float(value):.0f}"  # YAML takes 1e8 for text
        try:
            value = kind(value)
        except ValueError:
            return False, value
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML reads 2000.0, and 2.0e+3, as a float; 32 / 8 is one
    if kind is float and isinstance(value, int | float):
        try:
            value = float(value)
        except OverflowError:
            return False, value
    return isinstance(value, kind) and value == value, value  # nan is no number


def _convert_sequence(kind: Any, value: Any, source: Source) -> tuple[bool, Any]:
    """Convert to a list or tuple of one item type; text of a flag is split at commas."""
    origin = get_origin(kind)
    items: tuple[Any, ...] = get_args(kind)
    if isinstance(value, str) and source != "code" and str not in map(plain_type, items):
        # "(true, false)" is how Python shows a list; YAML has no such list, and it is text there.
        in_brackets = re.fullmatch(r"\s*(?:\((.*)\)|\[(.*)\])\s*", value, re.DOTALL)
        if in_brackets:
            source, value = "text", in_brackets[1] or in_brackets[2] or ""
    if source == "text" and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    fitting = (list, tuple) if source != "code" else (Iterable,) if origin in _ANY_ORDER else _LISTS
    if not _is_instance(value, *fitting) or _is_instance(value, str, bytes, Mapping):
        return False, value
    try:
        values: list[Any] = [*value]
    except TypeError:  # a tensor without dimensions
        return False, value
    if origin is tuple and Ellipsis not in items and len(items) > 1:
        if len(values) != len(items):
            return False, tuple(values)
        results = [convert_to(each, item, source) for each, item in zip(items, values, strict=True)]
    else:
        results = [convert_to(next(iter(items)), item, source) for item in values]
    converted = [item for _, item in results]
    return all(fits for fits, _ in results), tuple(converted) if origin is tuple else converted


def _convert_mapping(kind: Any, value: Any, source: Source) -> tuple[bool, Any]:
    if not _is_instance(value, dict if source != "code" else Mapping):
        return False, value
    if not get_args(kind) or source != "code":
        return True, value
    key_kind, value_kind = get_args(kind)
    table = cast("Mapping[Any, Any]", value)
    fits = all(
        convert_to(key_kind, key, source)[0] and convert_to(value_kind, item, source)[0]
        for key, item in table.items()
    )
    return fits, table


def _convert_to_enum(kind: type[Enum], value: Any) -> tuple[bool, Any]:
    if isinstance(value, kind):
        return True, value
    values = [member.value for member in kind]
    return (True, kind(value)) if is_choice(value, values) else (False, value)


# ---------------------------------------------------------------- in words


def describe_value(value: Any) -> str:
    """Return a value as an error shows it: text is called so, a class too, and long ones are cut."""
    text = repr(value)
    text = text if len(text) <= 120 else f"{text[:117]}..."
    if isinstance(value, str):
        return f"the text {text}"
    return f"the class {value.__name__}" if isinstance(value, type) else text


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table of keys",
    timedelta: "a datetime.timedelta",
    os.PathLike: "a path",
}


def type_name(kind: Any) -> str:
    """Return what people call a type; of a union its members, without None."""
    members = [part for part in union_members(kind) if part is not type(None)]
    if len(members) > 1 or members != [kind]:
        return " or ".join(dict.fromkeys(map(type_name, members)))
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{type_name(parts[0])}{parts[1].words}"
    if origin is Literal:
        return " or ".join(repr(choice) for choice in parts)
    if origin in _SEQUENCES:
        return f"a list ({type_name(parts[0])} each)"
    if origin in (dict, Mapping):
        return "a dict"
    if origin is Callable:
        return "a function"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(repr(member.value) for member in kind)
    return _TYPE_NAMES.get(kind) or _TYPE_NAMES.get(origin) or _object_name(kind)


def _object_name(kind: Any) -> str:
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}" if name[0].isupper() else name


def wrong_value(where: str, name: str, kind: Any, value: Any) -> SettingError:
    """Return the error of a value that does not fit.

    Args:
        where: the source of the value in the user's words.
        name: the name of the setting or argument.
        kind: its type.
        value: the value.
    """
    words = type_name(kind)
    fix = f"give {words}"
    for member in union_members(kind):
        base = plain_type(member)
        is_number, number = convert_to(base, value, "text") if isinstance(value, str) else (False, value)
        if base in (int, float) and is_number:
            if convert_to(member, number, "text")[0]:
                fix = f"write {name}: {number} without quotes"
            else:  # a flag that is out of its range
                value = number
    why = "no text may have a NUL character" if _has_nul(value) else ""
    return SettingError(f"{where} is {describe_value(value)}, but {name} is {words}", why=why, fix=fix)


# ---------------------------------------------------------------- frozen dataclasses without generated code
#
# A dataclass writes its methods as text and compiles them, which takes twenty times as long as all the rest
# of making the class. The launcher makes some fifty such classes for every job and every help text. They
# share the methods below, which do the same as those of ``@dataclass(frozen=True)``.


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_dataclass(cls: type[T]) -> type[T]:
    """Make a class a dataclass whose instances do not change; its fields are declared as for ``dataclass``.

    ``dataclasses.fields``, ``replace`` and ``asdict`` know it. It has no ``__post_init__``, and a class that
    inherits from it is made by this function too.
    """
    frozen = mutable_dataclass(cls)
    for name, method in {"__hash__": _hash, "__setattr__": _refuse, "__delattr__": _refuse}.items():
        if name not in vars(cls) or vars(cls)[name] is None:  # a class with __eq__ gets `__hash__ = None`
            setattr(frozen, name, method)
    return frozen


@dataclass_transform(field_specifiers=(field,))
def mutable_dataclass(cls: type[T]) -> type[T]:
    """Make a class a dataclass in the same way, whose instances change: one that others inherit from.

    A class that inherits from it may be made by ``dataclass``.
    """
    made: Any = dataclass(init=False, repr=False, eq=False)(cls)
    for name, method in {"__init__": _make_init(made), "__repr__": _repr, "__eq__": _eq}.items():
        if name not in vars(cls):
            setattr(made, name, method)
    return made


def _make_init(cls: Any) -> Callable[..., None]:
    """Return the ``__init__`` of a class: arguments in the order of its fields, or by name."""
    items = [item for item in fields(cls) if item.init]
    order: tuple[str, ...] = cls.__match_args__
    field_names = {item.name for item in items}
    defaults = {item.name: item.default for item in items if item.default is not MISSING}
    factories = {i.name: i.default_factory for i in items if i.default_factory is not MISSING}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        by_place = dict(zip(order, args, strict=False))
        values = {**defaults, **by_place, **kwargs}
        values |= {name: make() for name, make in factories.items() if name not in values}
        if len(args) > len(order) or by_place.keys() & kwargs.keys() or values.keys() != field_names:
            _refuse_call(cls, args, kwargs)
        self.__dict__.update(values)

    return __init__


def _refuse_call(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a ``TypeError`` that says what is wrong with the arguments of a class."""
    from inspect import Parameter, Signature  # only for mistakes

    items = sorted((item for item in fields(cls) if item.init), key=lambda item: bool(item.kw_only))
    parameters = [
        Parameter(
            item.name,
            Parameter.KEYWORD_ONLY if item.kw_only else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if item.default is item.default_factory is MISSING else None,
        )
        for item in items
    ]
    try:
        Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__qualname__}: {error}") from None


def _repr(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _compared_fields(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, item.name) for item in fields(value) if item.compare)


def _eq(self: Any, other: object) -> bool:
    return _compared_fields(self) == _compared_fields(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared_fields(self))


def _refuse(self: Any, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"{type(self).__qualname__} does not change: {name}")


# ---------------------------------------------------------------- bases of the public enumerations


class EnumWithContains(EnumMeta):
    """A metaclass of enumerations that supports ``"text" in Class``."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)  # type: ignore[call-arg]
        except ValueError:
            return False
        return True


class BaseEnum(str, Enum, metaclass=EnumWithContains):
    """A text enumeration: ``Class.MEMBER == "value"`` and ``str(Class.MEMBER) == "value"``."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values of all members, in order."""
        return [member.value for member in cls]


class StringEnum(str, Enum, metaclass=EnumWithContains):
    """A text enumeration that prints as Python's own do: ``str(Class.MEMBER) == "Class.MEMBER"``."""


class CustomDtype(Enum):
    """Number formats without a torch dtype; used for sizes only."""

    # Not text: callers tell a custom format from the name of a torch dtype by its type.
    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"

    @property
    def bits(self) -> int:
        """The size of one element in bits."""
        return int(self.value.lstrip("abcdefghijklmnopqrstuvwxyz"))
