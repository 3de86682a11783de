"""Numbers, machines and ports from the variables of a launcher; see ``clusters.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accelerate.core.errors import WorldError

DEFAULT_PORT = 29500
# Ports derived from a job's number stay below 32768, where Linux begins to hand out its own.
PORTS = 3000

Env = Mapping[str, str]


def number(env: Env, *names: str) -> int | None:
    """The first of ``names`` that holds a number of zero or more; -1 means unset, as torch has it."""
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


def node_of(rank: int, local_rank: int, local_size: int, size: int, nodes: int) -> int | None:
    """The machine of a rank: ranks fill the machines one by one, or are dealt to them in turn.

    Filling wins where both would explain the numbers, since it is every launcher's default. None where
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
    """A port that two jobs on one machine are unlikely to share, the same on every rank of a job."""
    digits = re.sub(r"\D", "", env.get(job, ""))
    job_number = int(digits or 0) * 8 + (number(env, step) or 0 if step else 0)
    return DEFAULT_PORT + job_number % PORTS
