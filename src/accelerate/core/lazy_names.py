"""Public names that are loaded when first used (PEP 562), from a table of their sources.

The table maps a public module to its names, and a name to its *source*:

    "package.module:attribute"                 an object of this package, the package's own name left out
    LazyCall(maker, *args, **kw)               the result of calling ``maker`` (a source): similar names
    ObjectNameSource(constant)                 a plain constant that needs no code
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from accelerate.core.errors import nearest

T = TypeVar("T")


class LazyCall:
    """A source that makes its object by a call, once, when the name is first used.

    Args:
        maker: the source of the function that is called.
        args, kwargs: arguments of the call.
        then: converts the result of the call into the object.
    """

    def __init__(
        self, maker: str, *args: Any, then: Callable[[Any], Any] | None = None, **kwargs: Any
    ) -> None:
        self.maker, self.args, self.kwargs, self.then = maker, args, kwargs, then


class ObjectNameSource:
    """A source that is the object itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


NameSource = str | LazyCall | ObjectNameSource
NameTable = Mapping[str, Mapping[str, NameSource]]


class UnknownPublicNameError(AttributeError):
    """A public module has no such name. The nearest known name is searched only when the message is read.

    ``from accelerate import device`` asks for an attribute before it imports a submodule.
    """

    def __init__(self, module: str, name: str, known: list[str]) -> None:
        super().__init__(module, name, known)
        self.name = name

    def __str__(self) -> str:
        module, name, public_names = self.args
        near = None if name.startswith("__") else nearest(name, public_names)
        return f"module {module!r} has no attribute {name!r}" + (f"; did you mean {near!r}?" if near else "")


class PublicNames:
    """The public names of a package and the sources of their objects.

    Args:
        package: the package that sources are relative to.
        sources: public module -> name -> source.
        reexports: public module -> other public modules -> which of their own names it has too, separated by
            blanks; ``"*"`` for all of them.
        complete_modules: modules whose re-exported names are promised too, so that their stubs declare them.
    """

    def __init__(
        self,
        package: str,
        sources: NameTable,
        reexports: Mapping[str, Mapping[str, str]],
        complete_modules: tuple[str, ...] = (),
    ) -> None:
        self.package, self.sources, self.reexports, self.complete_modules = (
            package,
            sources,
            reexports,
            complete_modules,
        )

    def find_owner(self, module: str, name: str) -> str | None:
        """Return the public module that owns ``module.name``; None when there is no such name."""
        if name in self.sources[module]:
            return module
        for other, names in self.reexports.get(module, {}).items():
            if name in self.sources[other] and (names == "*" or name in names.split()):
                return other
        return None

    def list_names(self, module: str) -> list[str]:
        """Return every name of a public module, own and re-exported, sorted; without submodules."""
        listed = set(self.sources[module])
        for other, names in self.reexports.get(module, {}).items():
            listed.update(self.sources[other] if names == "*" else names.split())
        return sorted(listed)

    def list_submodules(self, module: str) -> list[str]:
        """Return the last names of the public modules directly below ``module``, sorted."""
        prefix = f"{module}."
        below = (name[len(prefix) :] for name in self.sources if name.startswith(prefix))
        return sorted(name for name in below if "." not in name)

    def resolve(self, module: str, name: str) -> Any:
        """Return the object behind a public name.

        Raises:
            AttributeError: the module has no such name.
        """
        owner = self.find_owner(module, name)
        if owner is None:
            if name in self.list_submodules(module):
                return importlib.import_module(f"{module}.{name}")
            raise UnknownPublicNameError(module, name, self.list_names(module))
        if owner != module:
            return getattr(importlib.import_module(owner), name)
        return self._load_object(self.sources[module][name], f"{module}.{name}")

    def _load_object(self, source: NameSource, path: str) -> Any:
        if isinstance(source, ObjectNameSource):
            return source.value
        if isinstance(source, LazyCall):
            result = self._load_object(source.maker, path)(*source.args, **source.kwargs)
            result = result if source.then is None else source.then(result)
            if isinstance(result, FunctionType):
                result.__module__, _, result.__name__ = path.rpartition(".")
                result.__qualname__ = result.__name__
            return result
        file, _, attribute = source.partition(":")
        return getattr(importlib.import_module(f"{self.package}.{file}"), attribute)

    def module_hooks(self, module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
        """Return ``__getattr__`` and ``__dir__`` of one public module.

        A resolved object is stored in the module's globals, so it is looked up once, and an object that a
        user put there is the one that everybody sees.
        """
        namespace = vars(sys.modules[module])

        def __getattr__(name: str) -> Any:  # noqa: N807
            if name == "__all__":
                return [each for each in self.list_names(module) if not each.startswith("_")]
            value = self.resolve(module, name)
            namespace[name] = value
            return value

        def __dir__() -> list[str]:  # noqa: N807
            return sorted({*namespace, *self.list_names(module), *self.list_submodules(module)})

        # The import system binds a submodule in its package when it is first imported. Where a public name
        # is spelled like a submodule, the name must win in any order of imports: so import the submodule now.
        for clash in set(self.list_submodules(module)) & set(self.list_names(module)):
            importlib.import_module(f"{module}.{clash}")
            namespace.pop(clash, None)
        return __getattr__, __dir__


def get_override(module: str, name: str, default: T) -> T:
    """Return what a user assigned to a name of a public module, or ``default``.

    Some programs replace a function of a public module (``accelerate.data_loader.prepare_data_loader``) and
    expect this package to call theirs. Callers of such a function ask here at each call.

    Args:
        module: the public module.
        name: the public name.
        default: the object behind the name when nobody replaced it.
    """
    return vars(sys.modules[module]).get(name, default) if module in sys.modules else default


# ------------------------------------------ short forms for tables: each returns the sources of several names

# Names of Megatron-LM's module that ``accelerate.utils`` has too. Its others (``initialize``,
# ``prepare_data_loader``) are called like names of other modules, which a star import would hide.
PARTIAL_REEXPORTS = {
    "accelerate.utils.megatron_lm": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep "
        "avg_losses_across_data_parallel_group gather_across_data_parallel_groups"
    )
}


def exports(text: str) -> dict[str, NameSource]:
    """Return the names of one file, from ``"file: name name"``; ``public=own`` where the own name differs."""
    file, _, names = text.partition(": ")
    pairs = (name.partition("=") for name in names.split())
    return {public: f"{file}:{own_name or public}" for public, _, own_name in pairs}


def words(text: str) -> list[str]:
    """Return a new list of the words of ``text``."""
    return text.split()


def constants(texts: str = "", **values: object) -> dict[str, NameSource]:
    """Return constants of the API that no code here needs; ``NAME=text`` for one-word texts."""
    pairs = dict(pair.split("=") for pair in texts.split())
    return {name: ObjectNameSource(value) for name, value in {**pairs, **values}.items()}


def package_checks(names: str) -> dict[str, NameSource]:
    """Return ``is_<name>_available`` for packages; ``name=requirement`` if it is not just that package."""
    each = (name.partition("=") for name in names.split())
    return {
        f"is_{name}_available": LazyCall("core.packages:make_checker", need or name) for name, _, need in each
    }


def device_checks(types: str) -> dict[str, NameSource]:
    """Return ``is_<type>_available`` for device types."""
    return {
        f"is_{type}_available": LazyCall("facade.device_availability:device_checker", type)
        for type in types.split()
    }


def package_requirements(names: str) -> dict[str, NameSource]:
    """Return the decorators ``require_<name>`` of tests, by what ``is_<name>_available`` answers."""
    maker = "facade.client_test_utils:package_decorator"
    return {
        f"require_{name}": LazyCall(maker, f"accelerate.utils.imports:is_{name}_available", name)
        for name in names.split()
    }


def device_requirements(how_many: str, types: str) -> dict[str, NameSource]:
    """Return the decorators ``require_<how many><type>`` of tests; ``name=type`` where the type is another.

    Args:
        how_many: ``"single_"``, ``"multi_"``, ``"non_"``; empty for one or more.
        types: device types; ``type_or_type`` for either.
    """
    each = (name.partition("=") for name in types.split())
    return {
        f"require_{how_many}{name}": LazyCall(
            "facade.client_test_utils:device_decorator", type or name, how_many
        )
        for name, _, type in each
    }


def all_names(modules: str) -> dict[str, str]:
    """Return the request for all names of these public modules."""
    return dict.fromkeys((f"accelerate.{module}" for module in modules.split()), "*")
