"""Parsers of a launcher's environment variables: numbers, machines and ports; see ``clusters.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accelerate.core.errors import WorldError

DEFAULT_PORT = 29500
# Ports derived from a job's number stay below 32768, where Linux begins to hand out its own.
JOB_PORT_COUNT = 3000

Env = Mapping[str, str]


def read_number(env: Env, *names: str) -> int | None:
    """Return the first number of zero or more in the variables ``names``; -1 means unset, as in torch."""
    for name in names:
        text = env.get(name, "").strip()
        if not text:
            continue
        try:
            value = int(text)
        except ValueError:
            raise WorldError(
                f"{name}={text!r} is not a whole number", fix=f"unset {name}, or set it right"
            ) from None
        if value >= 0:
            return value
    return None


def derive_node(rank: int, local_rank: int, local_size: int, size: int, nodes: int) -> int | None:
    """Derive the machine of a rank: ranks fill the machines one by one (block), or in turn (cyclic).

    Block wins if both explain the numbers, since it is every launcher's default. None if
    the machines hold different numbers: then a rank alone cannot tell.
    """
    if rank == local_rank:
        return 0
    if nodes * local_size != size:
        return None
    if rank == (rank // local_size) * local_size + local_rank:
        return rank // local_size
    return rank % nodes if rank // nodes == local_rank else None


def is_loopback(address: str | None) -> bool:
    return address is not None and (address in ("localhost", "::1") or address.startswith("127."))


def job_port(env: Env, job: str, step: str = "") -> int:
    """Return a port that is the same on every rank of a job, and likely different for two jobs."""
    digits = re.sub(r"\D", "", env.get(job, ""))
    job_number = int(digits or 0) * 8 + (read_number(env, step) or 0 if step else 0)
    return DEFAULT_PORT + job_number % JOB_PORT_COUNT
