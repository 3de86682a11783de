"""Checks for optional packages and their versions (PEP 440). No check imports one.

The launcher uses them too, so slow imports (packaging, importlib.metadata) stand where a version is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accelerate.core import environ
from accelerate.core.errors import MissingExtraError, SettingError

if TYPE_CHECKING:
    from packaging.version import Version

P = ParamSpec("P")
R = TypeVar("R")
OPERATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def find_program(name: str) -> str | None:
    """Return the path of a program that packages install: on the PATH, or beside this Python; None if absent.

    The Python of a virtual environment that is not activated is started by its path.
    """
    import shutil

    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def is_installed(module: str) -> bool:
    """Return True when ``module`` (``"wandb"``, ``"megatron.core"``) can be imported.

    A bare folder of that name does not count, although Python would import it as a namespace package:
    several tools leave a folder of their own name in the working directory.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return loaded.__spec__ is None or _is_real(loaded.__spec__)
    return _has_spec(module)


@functools.cache
def _has_spec(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # no parent package; a parent without a spec
        return False
    return spec is not None and _is_real(spec)


def _is_real(spec: ModuleSpec) -> bool:
    """Return True when a spec stands for a file or a built-in, not just a folder."""
    return spec.origin is not None


@functools.cache
def get_version(module: str) -> Version | None:
    """Return the version of the distribution that contains ``module``; None when it is unknown."""
    import importlib.metadata

    from packaging.version import parse

    top = module.partition(".")[0]
    try:
        return parse(importlib.metadata.version(top))
    except importlib.metadata.PackageNotFoundError:
        # The distribution has another name than its module; only now is the slow search worth it.
        others = importlib.metadata.packages_distributions().get(top)
    return parse(importlib.metadata.version(others[0])) if others else None


def is_satisfied(requirement: str) -> bool:
    """Return True when the module of a requirement (``"torchao>=0.6.1"``) is installed in a fitting version.

    A module of unknown version passes only when the requirement has no version.
    """
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    if not is_installed(parsed.name):
        return False
    if not parsed.specifier:
        return True
    version = get_version(parsed.name)
    return version is not None and parsed.specifier.contains(version, prereleases=True)


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return True when ``library_or_version operation requirement_version`` holds.

    A build's local label counts only where the requirement names one (PEP 440, "Version matching"):
    ``2.6.0+cpu`` is ``== 2.6.0``.

    Args:
        library_or_version: the name of an installed distribution, or a version.
        operation: one of ``> >= == != <= <``.
        requirement_version: the version to compare with.

    Raises:
        SettingError: the operation is none of these.
        importlib.metadata.PackageNotFoundError: the distribution is not installed.
    """
    from importlib.metadata import version

    from packaging.version import Version, parse

    if operation not in OPERATIONS:
        raise SettingError(
            f"{operation!r} is not a comparison of versions", fix=f"use one of: {', '.join(OPERATIONS)}"
        )
    actual = library_or_version
    if isinstance(actual, str):
        actual = parse(version(actual))
    required = parse(requirement_version)
    if required.local is None and actual.local is not None:
        actual = Version(str(actual).partition("+")[0])
    return OPERATIONS[operation](actual, required)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed version of torch with ``version``; torch is not imported."""
    return compare_versions("torch", operation, version)


def make_checker(*requirements: str, flag: str = "") -> Callable[[], bool]:
    """Return a function that tells whether any of ``requirements`` is satisfied.

    Args:
        requirements: modules with an optional version, as for pip.
        flag: a yes/no variable that must be set as well.
    """

    def available() -> bool:
        return (not flag or environ.get_flag(flag)) and any(is_satisfied(each) for each in requirements)

    available.__doc__ = f"Return True when {' or '.join(requirements)} is installed" + (
        f", and {flag} is set." if flag else "."
    )
    return available


def make_version_checker(module: str, default: str | None = None) -> Callable[..., bool]:
    """Return a function that tells whether ``module`` is installed, in ``min_version`` or newer."""

    def available(min_version: str | None = default) -> bool:
        return is_satisfied(f"{module}>={min_version}" if min_version else module)

    available.__doc__ = f"Return True when {module} is installed, in at least ``min_version``."
    return available


def requires(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator whose functions raise MissingExtraError, when called, if ``module`` is missing."""

    def decorate(func: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_installed(module):
                raise MissingExtraError(module, f"{func.__name__}()")
            return func(*args, **kwargs)

        return wrapper

    decorate.__doc__ = f"The decorated function needs {module} when it is called."
    return decorate
