"""Tests on PyTorch/XLA's client for CPUs (`make test-xla`), skipped where torch_xla is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch_xla"):
    os.environ.setdefault("PJRT_DEVICE", "CPU")


@pytest.fixture(scope="session")
def runtime() -> None:
    """Start PyTorch/XLA before the first backward: torch counts the devices there, and never again."""
    import torch_xla

    torch_xla.device()


@pytest.fixture
def xla(runtime: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose XLA, which on a CPU is never chosen by itself."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "xla")
    yield
    import torch_xla

    torch_xla.sync()
