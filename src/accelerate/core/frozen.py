"""Values that stay as they are: ``@dataclass(frozen=True)``, without compiling a text for each method.

A dataclass writes its methods as text and compiles them, which takes twenty times as long as all the rest of
making the class. The launcher has some fifty classes of values and makes them for every job and every help
text. Those share the methods below, which do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Of Python 3.11; for type checkers alone."""
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Makes a class a dataclass whose instances do not change; its fields are declared as for ``dataclass``.

    ``dataclasses.fields``, ``replace`` and ``asdict`` know it. It has no ``__post_init__``, and a class that
    inherits from it is made by this function too.
    """
    made: Any = dataclass(init=False, repr=False, eq=False)(cls)
    methods = {
        "__init__": _initializer(made),
        "__repr__": _repr,
        "__eq__": _eq,
        "__hash__": _hash,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
    }
    for name, method in methods.items():
        if name not in vars(cls) or vars(cls)[name] is None:  # a class with __eq__ gets `__hash__ = None`
            setattr(made, name, method)
    return made


def _initializer(cls: Any) -> Callable[..., None]:
    """``__init__`` of a class: arguments in the order of its fields, or by name."""
    items = [item for item in fields(cls) if item.init]
    order: tuple[str, ...] = cls.__match_args__
    known = {item.name for item in items}
    defaults = {item.name: item.default for item in items if item.default is not MISSING}
    factories = {i.name: i.default_factory for i in items if i.default_factory is not MISSING}

    def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807
        by_place = dict(zip(order, args, strict=False))
        values = {**defaults, **by_place, **given}
        values |= {name: make() for name, make in factories.items() if name not in values}
        if len(args) > len(order) or by_place.keys() & given.keys() or values.keys() != known:
            raise TypeError(_mistake(cls.__qualname__, order, args, known, values, given))
        self.__dict__.update(values)

    return __init__


def _mistake(
    name: str,
    order: tuple[str, ...],
    args: tuple[Any, ...],
    known: set[str],
    values: dict[str, Any],
    given: dict[str, Any],
) -> str:
    if len(args) > len(order):
        return f"{name}() takes {len(order)} arguments by place, and {len(args)} were given"
    twice = given.keys() & {*order[: len(args)]}
    for what, names in (
        ("got twice", twice),
        ("does not know", values.keys() - known),
        ("needs", known - values.keys()),
    ):
        if names:
            return f"{name}() {what}: {', '.join(sorted(names))}"
    raise AssertionError


def _repr(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _compared(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, item.name) for item in fields(value) if item.compare)


def _eq(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _refuse(self: Any, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"{type(self).__qualname__} does not change: {name}")
