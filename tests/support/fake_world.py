"""A world of many ranks in one process that talks to none of them, for what each rank decides by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelerate.world import world


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Let this process be ``rank`` of ``size`` ranks, without a process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_current", world.World.fake(size, rank))
        yield
