"""Optional packages: which this machine has, and how to pretend that it lacks some."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from accelerate.core import packages


def is_installed(module: str) -> bool:
    """Return True when ``module`` (``"megatron.core"``) can be imported, without importing it.

    A bare folder of that name, which some tools leave in the working directory, does not count.
    """
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        return False
    return spec is not None and spec.origin is not None


def needs(module: str) -> pytest.MarkDecorator:
    """Skip a test where ``module`` is not installed; unlike ``pytest.importorskip`` it is not imported."""
    return pytest.mark.skipif(not is_installed(module), reason=f"{module} is not installed")


def pretend_installed(monkeypatch: pytest.MonkeyPatch, is_there: Callable[[str], bool]) -> None:
    """Let a package be there only if it is installed and ``is_there(name)``."""
    real = packages.is_installed
    monkeypatch.setattr(packages, "is_installed", lambda module: is_there(module) and real(module))
