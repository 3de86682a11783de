"""The version of torch that a test runs with."""

from __future__ import annotations

from importlib.metadata import version

from packaging.specifiers import SpecifierSet
from packaging.version import Version


def is_torch(versions: str) -> bool:
    """Return whether the installed torch is one of ``versions``: ``">=2.10"``, ``"==2.6.*"``."""
    return Version(version("torch")).public in SpecifierSet(versions)
