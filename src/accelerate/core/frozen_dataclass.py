"""Frozen dataclasses without generated code: ``@dataclass(frozen=True)`` with shared methods.

A dataclass writes its methods as text and compiles them, which takes twenty times as long as all the rest of
making the class. The launcher makes some fifty such classes for every job and every help text. They share
the methods below, which do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
elif TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Do nothing: only type checkers use it."""
        return lambda decorator: decorator


T = TypeVar("T")


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
            raise TypeError(_describe_mistake(cls.__qualname__, order, args, field_names, values, kwargs))
        self.__dict__.update(values)

    return __init__


def _describe_mistake(
    name: str,
    order: tuple[str, ...],
    args: tuple[Any, ...],
    known: set[str],
    values: dict[str, Any],
    kwargs: dict[str, Any],
) -> str:
    if len(args) > len(order):
        return f"{name}() takes {len(order)} arguments by place, and {len(args)} were given"
    twice = kwargs.keys() & {*order[: len(args)]}
    for mistake, names in (
        ("got twice", twice),
        ("does not know", values.keys() - known),
        ("needs", known - values.keys()),
    ):
        if names:
            return f"{name}() {mistake}: {', '.join(sorted(names))}"
    raise AssertionError


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
