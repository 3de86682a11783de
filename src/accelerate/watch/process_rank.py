"""The rank of this process, also before the process group is open."""

from __future__ import annotations

from accelerate.core import environ
from accelerate.world import clusters, world


def get_rank_info() -> tuple[int, int, int]:
    """Return (rank, local rank, world size): of the process group, the launcher, or a single process."""
    info = world.current() or clusters.detect(environ.snapshot())
    return (info.rank, info.local_rank, info.size) if info else (0, 0, 1)
