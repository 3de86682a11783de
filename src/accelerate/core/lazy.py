"""Public names that are loaded when first used (PEP 562), from a table of where they live.

The table maps a public module to its names, and a name to its *home*:

    "package.module:attribute"     an object of this package, the package's own name left out
    Made(maker, *args, **kwargs)   the result of calling ``maker`` (a home): families of similar names
    Value(constant)                a plain constant that needs no code
    Plan("what will come")         not built yet: usable in ``import``, ``isinstance`` and as a base class;
                                   calling or using it raises NotBuiltError
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from accelerate.core.errors import NotBuiltError, nearest

T = TypeVar("T")


class Made:
    """A home whose object is made by a call, once, when it is first used.

    Args:
        maker: the home of the function that is called.
        args, kwargs: what it is called with.
        then: turns its result into the object.
    """

    def __init__(
        self, maker: str, *args: Any, then: Callable[[Any], Any] | None = None, **kwargs: Any
    ) -> None:
        self.maker, self.args, self.kwargs, self.then = maker, args, kwargs, then


class Value:
    """A home that is the object itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Plan:
    """A home that does not exist.

    Args:
        text: what will come; or, when nothing will, why.
        instead: what to use for a name that will not come.
    """

    def __init__(self, text: str, instead: str = "") -> None:
        self.text, self.instead = text, instead


Home = str | Made | Value | Plan
Table = Mapping[str, Mapping[str, Home]]


class NoSuchName(AttributeError):  # noqa: N818 (Python has such a name for it)
    """A public module has no such name. The nearest one is looked for when somebody reads the message.

    ``from accelerate import device`` asks for an attribute before it imports a submodule.
    """

    def __init__(self, module: str, name: str, known: list[str]) -> None:
        super().__init__(module, name, known)
        self.name = name

    def __str__(self) -> str:
        module, name, known = self.args
        near = None if name.startswith("__") else nearest(name, known)
        return f"module {module!r} has no attribute {name!r}" + (f"; did you mean {near!r}?" if near else "")


class Names:
    """All public names of a package.

    Args:
        package: the package that homes are relative to.
        homes: public module -> name -> home.
        also: public module -> other public modules -> which of their own names it has too, separated by
            blanks; ``"*"`` for all of them.
        whole: modules that promise each of these other names.
    """

    def __init__(
        self,
        package: str,
        homes: Table,
        also: Mapping[str, Mapping[str, str]],
        whole: tuple[str, ...] = (),
    ) -> None:
        self.package, self.homes, self.also, self.whole = package, homes, also, whole

    def source(self, module: str, name: str) -> str | None:
        """The public module whose own name ``module.name`` is; None when there is no such name."""
        if name in self.homes[module]:
            return module
        for other, names in self.also.get(module, {}).items():
            if name in self.homes[other] and (names == "*" or name in names.split()):
                return other
        return None

    def names(self, module: str) -> list[str]:
        """Every name of a public module, its own and others', sorted; submodules are not among them."""
        found = set(self.homes[module])
        for other, names in self.also.get(module, {}).items():
            found.update(self.homes[other] if names == "*" else names.split())
        return sorted(found)

    def submodules(self, module: str) -> list[str]:
        """The public modules directly below ``module``, by their last name."""
        prefix = f"{module}."
        below = (name[len(prefix) :] for name in self.homes if name.startswith(prefix))
        return sorted(name for name in below if "." not in name)

    def resolve(self, module: str, name: str) -> Any:
        """The object behind a public name.

        Raises:
            AttributeError: the module has no such name.
        """
        source = self.source(module, name)
        if source is None:
            if name in self.submodules(module):
                return importlib.import_module(f"{module}.{name}")
            raise NoSuchName(module, name, self.names(module))
        if source != module:
            return getattr(importlib.import_module(source), name)
        return self._at(self.homes[module][name], f"{module}.{name}")

    def _at(self, home: Home, path: str) -> Any:
        if isinstance(home, Plan):
            return planned(path, home)
        if isinstance(home, Value):
            return home.value
        if isinstance(home, Made):
            made = self._at(home.maker, path)(*home.args, **home.kwargs)
            made = made if home.then is None else home.then(made)
            if isinstance(made, FunctionType):
                made.__module__, _, made.__name__ = path.rpartition(".")
                made.__qualname__ = made.__name__
            return made
        file, _, attribute = home.partition(":")
        return getattr(importlib.import_module(f"{self.package}.{file}"), attribute)

    def face(self, module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
        """``__getattr__`` and ``__dir__`` of one public module.

        A resolved object is kept in the module's globals, so it is looked up once, and one that a user put
        there is the one that everybody sees.
        """
        space = vars(sys.modules[module])

        def __getattr__(name: str) -> Any:  # noqa: N807
            if name == "__all__":
                return self.names(module)
            value = self.resolve(module, name)
            space[name] = value
            return value

        def __dir__() -> list[str]:  # noqa: N807
            return sorted({*space, *self.names(module), *self.submodules(module)})

        # The import system binds a submodule in its package when it is first imported. Where a public name
        # is spelled like a submodule, the name must win whatever is imported first: so import it now.
        for clash in set(self.submodules(module)) & set(self.names(module)):
            importlib.import_module(f"{module}.{clash}")
            space.pop(clash, None)
        return __getattr__, __dir__


def patched(module: str, name: str, own: T) -> T:
    """``own``, or what a user has put in its place in a public module.

    Some programs replace a function of a public module (``accelerate.data_loader.prepare_data_loader``) and
    expect this package to call theirs. Code that may be replaced so asks here when it makes the call.

    Args:
        module: the public module.
        name: the public name.
        own: what is behind the name when nobody replaced it.
    """
    return vars(sys.modules[module]).get(name, own) if module in sys.modules else own


def planned(path: str, plan: Plan) -> Any:
    """A stand-in of the right kind for a name that is not built; its spelling says the kind (PEP 8)."""
    module, _, name = path.rpartition(".")
    state = "has no counterpart here" if plan.instead else "is not built yet"

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotBuiltError(f"{path} {state}", why=plan.text, fix=plan.instead)

    if name.isupper():
        return _constant(refuse)
    if name[0].isupper():
        return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": plan.text})
    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = module, plan.text
    return refuse


_USES = ("getattr", "getitem", "iter", "len", "contains", "bool", "eq", "lt", "gt", "call", "add", "or")


def _constant(refuse: Callable[..., Any]) -> Any:
    """An object of which every use is refused: a planned constant must not pass for an empty one."""
    methods: dict[str, Any] = {f"__{use}__": refuse for use in _USES}
    return type("PlannedConstant", (), {**methods, "__hash__": object.__hash__})()
