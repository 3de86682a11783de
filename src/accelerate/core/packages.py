"""Which optional packages are installed. Asking never imports one.

The launcher asks too, so what takes long to import is imported where a version is asked for.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from accelerate.core import environ
from accelerate.core.errors import MissingExtraError

if TYPE_CHECKING:
    from packaging.version import Version

P = ParamSpec("P")
R = TypeVar("R")


def installed(module: str) -> bool:
    """Whether ``module`` (``"wandb"``, ``"megatron.core"``) can be imported.

    A bare folder of that name does not count, although Python would import it as a namespace package:
    several tools leave a folder of their own name in the working directory.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return loaded.__spec__ is None or _is_real(loaded.__spec__)
    return _found(module)


@functools.cache
def _found(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # no parent package; a parent without a spec
        return False
    return spec is not None and _is_real(spec)


def _is_real(spec: ModuleSpec) -> bool:
    """Whether there is a file (or a built-in) behind a spec, not just a folder."""
    return spec.origin is not None


@functools.cache
def version(module: str) -> Version | None:
    """The version of the distribution that brings ``module``; None when that cannot be told."""
    import importlib.metadata

    from packaging.version import parse

    top = module.partition(".")[0]
    try:
        return parse(importlib.metadata.version(top))
    except importlib.metadata.PackageNotFoundError:
        # The distribution has another name than its module; only now is the slow search worth it.
        others = importlib.metadata.packages_distributions().get(top)
    return parse(importlib.metadata.version(others[0])) if others else None


def satisfied(requirement: str) -> bool:
    """Whether the module of a requirement (``"torchao>=0.6.1"``) is installed in a fitting version.

    A module whose version cannot be told passes only when no version is asked for.
    """
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    if not installed(wanted.name):
        return False
    found = version(wanted.name) if wanted.specifier else None
    return not wanted.specifier or (found is not None and wanted.specifier.contains(found, prereleases=True))


def checker(*requirements: str, flag: str = "") -> Callable[[], bool]:
    """A function telling whether any of ``requirements`` is satisfied.

    Args:
        requirements: modules with an optional version, as for pip.
        flag: a yes/no variable that must be set as well.
    """

    def available() -> bool:
        return (not flag or environ.flag(flag)) and any(satisfied(each) for each in requirements)

    available.__doc__ = f"Whether {' or '.join(requirements)} is installed" + (
        f", and {flag} is set." if flag else "."
    )
    return available


def version_checker(module: str, default: str | None = None) -> Callable[..., bool]:
    """A function telling whether ``module`` is installed, in version ``min_version`` or newer."""

    def available(min_version: str | None = default) -> bool:
        return satisfied(f"{module}>={min_version}" if min_version else module)

    available.__doc__ = f"Whether {module} is installed, in at least ``min_version``."
    return available


def requires(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator whose functions raise MissingExtraError, when called, where ``module`` is missing."""

    def required(func: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(func)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not installed(module):
                raise MissingExtraError(module, f"{func.__name__}()")
            return func(*args, **kwargs)

        return checked

    required.__doc__ = f"The decorated function needs {module} when it is called."
    return required
