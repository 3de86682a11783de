"""Collectives of fixed size on 2 to 32 processes, against the same call of ``torch.distributed``.

The ranks are forked from one process that has imported everything, so that 32 of them start in seconds. They
share the cores of one machine: what is compared is the work of all ranks, not the latency of a network.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.case import BenchError, Case, Sample, Subject, alternate, leave, report, worker

# operation -> the upper bound of the ratio
OPERATIONS = {"reduce of a scalar": 1.3, "barrier": 1.3, "broadcast of 1 KB": 1.3, "gather of 1 KB": 1.1}
SIZES = (2, 8, 16, 32)


def measure(operation: str, size: int, subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, operation, str(size), "3" if quick else "7")


CASES = tuple(
    Case(
        f"{operation} on {size} processes, against `torch.distributed`",
        "us",
        "ratio",
        target,
        partial(measure, operation, size),
    )
    for operation, target in OPERATIONS.items()
    for size in SIZES
)


def calls(operation: str, size: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The call by hand and the call of the library."""
    import torch
    import torch.distributed as dist

    from accelerate import Accelerator
    from accelerate.utils import broadcast

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != size:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {size}")
    scalar, values = torch.tensor(1.0), torch.ones(256)
    # Renamed in torch 2.13, where the old name warns.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def gather_by_hand() -> None:
        getattr(dist, name)(torch.empty(size * 256), values)

    return {
        "reduce of a scalar": (
            lambda: dist.all_reduce(scalar.clone()),
            lambda: accelerator.reduce(scalar, "sum"),
        ),
        "barrier": (dist.barrier, accelerator.wait_for_everyone),
        "broadcast of 1 KB": (lambda: dist.broadcast(values, 0), lambda: broadcast(values, 0)),
        "gather of 1 KB": (gather_by_hand, lambda: accelerator.gather(values)),
    }[operation]


def main(operation: str, size: int, blocks: int) -> None:
    import torch
    import torch.distributed as dist

    importlib.import_module("accelerate.utils")  # once, before the fork
    torch.set_num_threads(1)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    children: list[int] = []
    while len(children) < size and (child := os.fork()):
        children.append(child)
    rank = len(children)  # in a child: those that were forked before it
    if rank == size:
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise BenchError("a rank failed")
        return
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in where.items()})
    base, value = calls(operation, size)
    steps = max(10, 400 // size)

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(steps):
            call()

    sample = alternate(
        partial(repeat, base),
        partial(repeat, value),
        "ratio",
        blocks=blocks,
        steps=steps,
        before=dist.barrier,
    )
    if rank == 0:
        report(sample)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
