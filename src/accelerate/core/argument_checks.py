"""Arguments of public constructors: checked against their annotations before the constructor runs.

    @check_arguments
    @dataclass
    class ProjectConfiguration:
        total_limit: PositiveInt | None = None

refuses ``ProjectConfiguration(total_limit="abc")``. A dict is turned into the class where a class of options
is annotated, and a member of an enumeration may be given by its value. A field that is a setting is checked
with the other sources of its value, by ``load_fields``. ``KwargsHandler`` is the base of most such classes.
``refuse_assignments`` refuses what is assigned later, and would change nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, TypeVar, cast, get_args, get_origin

from accelerate.core.errors import SettingError, UnknownNameError, nearest
from accelerate.core.setting import convert_value, declared_settings
from accelerate.core.value_types import (
    convert_to,
    describe_value,
    plain_type,
    type_name,
    union_members,
    wrong_value,
)

T = TypeVar("T")
_CONSTRUCTOR = "__unchecked_init__"


class LazyClass:
    """A class that an annotation names, and that is imported when such an argument is given.

    Args:
        path: ``"accelerate.module:Name"``.
    """

    def __init__(self, path: str) -> None:
        self._module, _, self._name = path.partition(":")

    def load(self) -> Any:
        """Import the class."""
        return getattr(importlib.import_module(self._module), self._name)


def check_arguments(cls: type[T]) -> type[T]:
    """Check the arguments of a constructor by their annotations, and convert them, before it runs.

    An argument that is its default is not looked at, and None is fine where it is the default.
    """
    construct: Callable[..., None] = cls.__init__

    @wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kinds = _argument_kinds(cls, construct)
        values = [kinds.check(name, value) for name, value in zip(kinds.names, args, strict=False)]
        named = {name: kinds.check(name, value) for name, value in kwargs.items()}
        construct(self, *values, *args[len(values) :], **named)

    cls.__init__ = __init__
    setattr(cls, _CONSTRUCTOR, construct)
    return cls


class ArgumentKinds:
    """The types of the arguments of one constructor; each is resolved when such an argument is first given.

    Args:
        cls: the class.
        construct: its constructor.
    """

    def __init__(self, cls: type[Any], construct: Callable[..., None]) -> None:
        self._cls = cls
        parameters = list(inspect.signature(construct).parameters.values())[1:]
        self._defaults = {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}
        self.names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        self._takes_any = len(self._defaults) < len(parameters)
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        self._settings = {item.name for item in fields if item.metadata.get("setting")}
        sources = reversed(cls.__mro__) if fields else ()
        module_of = {name: base.__module__ for base in sources for name in inspect.get_annotations(base)}
        annotations = inspect.get_annotations(construct)
        self._annotations = {
            name: (annotations[name], module_of.get(name, construct.__module__))
            for name in self._defaults
            if name in annotations and name not in self._settings
        }
        self._kinds: dict[str, Any] = {}

    def check(self, name: str, value: Any) -> Any:
        """Return an argument as its declared type.

        Raises:
            SettingError: it does not fit; the error names the argument and its class.
            TypeError: there is no such argument, and one of a near name, or one that has taken its place.
        """
        if name not in self._defaults and not self._takes_any:
            moved, near = getattr(self._cls, "_moved_arguments", {}).get(name), nearest(name, self._defaults)
            if moved or near:
                call, hint = f"{self._cls.__name__}.__init__()", moved or f"did you mean {near!r}?"
                raise TypeError(f"{call} got an unexpected keyword argument {name!r}: {hint}")
        if name not in self._annotations or value is self._defaults[name]:
            return value
        if name not in self._kinds:
            text, module = self._annotations[name]
            names = vars(sys.modules[module])
            lazy = {n: each.load() for n, each in names.items() if isinstance(each, LazyClass) and n in text}
            self._kinds[name] = eval(text, names, lazy)
        kind, where = self._kinds[name], f"the argument {name} of {self._cls.__name__}"
        fits, result = convert_to(kind, value, "code")
        if fits:
            return result
        if value is None and self._defaults[name] is False:
            return False  # "not given", as libraries hand it on
        if isinstance(value, Mapping):
            for options in _options_classes(kind):
                return _build_options(options, cast("Mapping[Any, Any]", value), where)
        raise _wrong_argument(where, name, kind, value)

    def suggest(self, value: Any) -> str:
        """Return the first argument with ``value`` where it fits, such as ``num_steps=4``."""
        try:
            for row in declared_settings(self._cls):
                if row.field == self.names[0]:
                    convert_value(row, value, "", text=False)
            self.check(self.names[0], value)
        except SettingError:
            return "..."
        return f"{self.names[0]}={value!r}"


# Made when a constructor is first called, not when its module is imported.
_argument_kinds = cache(ArgumentKinds)


def _options_classes(kind: Any) -> Iterator[type[Any]]:
    """Yield the classes of options among the members of a type."""
    return (member for member in map(plain_type, union_members(kind)) if hasattr(member, _CONSTRUCTOR))


def _build_options(options: type[T], table: Mapping[Any, Any], where: str) -> T:
    known = inspect.signature(options).parameters
    for key in table:
        if key not in known:
            raise UnknownNameError(
                f"option of {options.__name__}", str(key), known, where=f"in the dict of {where}"
            )
    return options(**table)


def _wrong_argument(where: str, name: str, kind: Any, value: Any) -> SettingError:
    """Return the error; where an object of options is missing, it shows how to make one of the value."""
    classes = list(_options_classes(kind)) + [
        item for member in union_members(kind) for item in get_args(member) if hasattr(item, _CONSTRUCTOR)
    ]
    for options in classes:
        if isinstance(value, type) and issubclass(value, options):
            return SettingError(
                f"{where} is {describe_value(value)}, not an object of it",
                fix=f"write {name}={value.__name__}()",
            )
        kinds = _argument_kinds(options, getattr(options, _CONSTRUCTOR))
        return SettingError(
            f"{where} is {describe_value(value)}, but {name} is {type_name(kind)}",
            fix=f"write {name}={options.__name__}({kinds.suggest(value)})",
        )
    if any(get_origin(member) is list for member in union_members(kind)) and not isinstance(
        value, list | tuple | set
    ):
        return SettingError(
            f"{where} is {describe_value(value)}, but {name} is {type_name(kind)}", fix=f"write {name}=[...]"
        )
    return wrong_value(where, name, kind, value)


def refuse_assignments(owner: type, reasons: Mapping[str, tuple[str, str]]) -> None:
    """Let assignments to properties of a class raise an error that says why they would change nothing.

    Args:
        owner: the class.
        reasons: the names of the properties, each with the reason and with what to do instead.
    """
    for name, (why, fix) in reasons.items():
        setattr(owner, name, getattr(owner, name).setter(_refuse_assignment(owner, name, why, fix)))


def _refuse_assignment(owner: type, name: str, why: str, fix: str) -> Callable[[Any, Any], None]:
    def refuse(instance: Any, value: Any) -> None:
        raise _ReadOnlyAttributeError(f"{owner.__name__}().{name} cannot be assigned", why=why, fix=fix)

    return refuse


class _ReadOnlyAttributeError(SettingError, AttributeError):
    """The error of an assignment that would have no effect."""


class KwargsHandler:
    """The options of one component, passed in ``Accelerator(kwargs_handlers=[...])``.

    Every argument of a subclass has a default; most subclasses are dataclasses.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return every field with a copy of its value."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if name[0] != "_"})

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their default, as arguments for the component.

        The others are left out, so that the component's own defaults stay in force.
        """
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}
