"""Fixtures of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

from tests.support.ranks import RankServer


@pytest.fixture(scope="session")
def ranks() -> Generator[RankServer]:
    """``ranks(n, function, *args)`` runs a function of the test module on n processes (support/ranks.py)."""
    server = RankServer()
    yield server
    server.remove()


@pytest.fixture(autouse=True)
def _clean_process() -> Generator[None]:
    """Every test leaves the process as it found it: environment as before, no world open."""
    before = dict(os.environ)
    yield
    # Only what a test has imported can have left something behind; importing it here would cost seconds.
    world = sys.modules.get("accelerate.world.world")
    if world is not None and world.current() is not None:
        world.close()
    command = sys.modules.get("tests.support.command")
    if command is not None:
        command.sweep()
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
