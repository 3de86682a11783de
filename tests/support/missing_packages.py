"""Optional packages that are installed, or not, as far as this package knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accelerate.core import packages


def pretend(monkeypatch: pytest.MonkeyPatch, is_there: Callable[[str], bool]) -> None:
    """Let a package be there only if it is installed and ``is_there(name)``."""
    real = packages.is_installed
    monkeypatch.setattr(packages, "is_installed", lambda module: is_there(module) and real(module))
