"""Ports for the tests: two tests that run side by side never get the same one."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

MAX_WORKERS = 16  # of pytest-xdist, each with ports of its own


def _worker_ports() -> Iterator[int]:
    """Ports of this pytest worker alone, each again after all others, from a random one on."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(15000 + worker % MAX_WORKERS, 32000, MAX_WORKERS)
    begin = random.SystemRandom().randrange(len(ports))  # the tests' own random numbers are theirs
    return itertools.cycle((*ports[begin:], *ports[:begin]))


_ports = _worker_ports()


def free_port() -> int:
    """A port nobody listens on, below the range that the system takes for outgoing connections.

    It is bound some time after it was tried: two workers that got the same one joined each other's group.
    """
    while True:
        port = next(_ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
