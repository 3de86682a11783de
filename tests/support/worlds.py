"""The world of a fake cluster, as one of its ranks sees it: no process group, no communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accelerate.world import world
from accelerate.world.world import World


def enter(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> World:
    """Make this process a rank of a fake world of that ``size``, ``rank``, ``nodes`` and ``device``."""
    entered = World.fake(**facts)
    monkeypatch.setattr(world, "_current", entered)
    return entered


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Let this process be ``rank`` of ``size`` ranks inside the block, without a process group."""
    with pytest.MonkeyPatch.context() as patch:
        enter(patch, size=size, rank=rank)
        yield
