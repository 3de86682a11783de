"""Versions of installed packages, compared without importing them (PEP 440)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version, parse

from accelerate.core.errors import SettingError

OPERATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


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
