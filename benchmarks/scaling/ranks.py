"""The ranks of one measurement: ``python -m benchmarks.scaling.ranks CALL SIZE BLOCKS [FIRST COUNT HOST]``.

They are forked from one process that has imported everything, so that 32 of them start in seconds. They share
the cores of one machine: what is compared is the work of all ranks. With ``FIRST`` and ``COUNT`` the process
forks its part of the ranks, which meet rank 0 on ``HOST``.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from functools import partial

from benchmarks.case import BenchError, Case, Sample, Subject, alternate, leave, report, worker
from benchmarks.scaling.calls import CALLS, Loop

LOOPBACK = "127.0.0.1"
BLOCKS, QUICK = "7", "3"  # blocks of each loop; quick ones have a tenth of the steps
PORT_OF_MACHINES = 29500  # free on a machine that was made for this


def measure(name: str, size: int, subject: Subject, quick: bool) -> Sample:
    """One round of a call on this machine."""
    return worker(subject, __name__, name, str(size), QUICK if quick else BLOCKS)


def case(name: str, size: int, measure: Callable[[str, int, Subject, bool], Sample], **rounds: int) -> Case:
    """The row of a call on ``size`` ranks."""
    call = CALLS[name]
    target = call.target if size >= 8 or call.target is None else max(call.target, 1.3)
    title = f"{name} on {size} processes, against `torch.distributed`"
    return Case(title, "us", "ratio", target, partial(measure, name, size), **rounds)


def fork(count: int) -> int | None:
    """Start ``count`` processes: the number of this one, or None in the process that started them all.

    Raises:
        BenchError: one of them failed.
    """
    children: list[int] = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            return number
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise BenchError("a rank failed")
    return None


def open_place(rank: int, local_rank: int, size: int, count: int, address: str, port: int) -> None:
    """Tell this process where it stands, as torchrun does."""
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": count}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    place |= {"GLOO_SOCKET_IFNAME": "lo" if address == LOOPBACK else "eth0"}
    os.environ.update({name: str(value) for name, value in place.items()})


def run_rank(name: str, size: int, blocks: int) -> None:
    """Measure on this rank; rank 0 prints the sample."""
    import torch.distributed as dist

    by_hand, ours = CALLS[name].make(size)
    steps = max(1, CALLS[name].steps // size // (10 if str(blocks) == QUICK else 1))

    def repeat(call: Loop) -> None:
        for _ in range(steps):
            call()

    sample = alternate(
        partial(repeat, by_hand),
        partial(repeat, ours),
        "ratio",
        blocks=blocks,
        steps=steps,
        before=dist.barrier,
    )
    if dist.get_rank() == 0:
        report(sample)
    dist.barrier()
    leave()


def main(name: str, size: int, blocks: int, first: int = 0, count: int = 0, address: str = LOOPBACK) -> None:
    import torch

    importlib.import_module("accelerate.utils")  # once, before the fork
    torch.set_num_threads(1)
    count = count or size
    port = PORT_OF_MACHINES
    if address == LOOPBACK:
        with socket.socket() as holder:
            holder.bind((LOOPBACK, 0))
            port = holder.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        tempfile.tempdir = folder
        number = fork(count)
        if number is not None:
            open_place(first + number, number, size, count, address, port)
            run_rank(name, size, blocks)  # ends the process


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), *sys.argv[6:])
