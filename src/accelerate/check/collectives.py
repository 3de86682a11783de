"""Are all processes there, each on a device of its own, and do values arrive as they were sent?"""

from __future__ import annotations

import socket
import time

import torch

from accelerate.check.base import Skip, equal, expect
from accelerate.core import environ
from accelerate.core.units import show_bytes
from accelerate.facade.accelerator import Accelerator
from accelerate.world import collective

_NUMBERS = 1 << 20  # float32 values of the exchange whose time is taken
_REPEATS = 5


def ranks(accelerator: Accelerator) -> str:
    """Every rank is there once, knows the size, and has a device of its own."""
    world = accelerator.world
    told = environ.get("WORLD_SIZE")
    expect(told is None or int(told) == world.size, f"WORLD_SIZE is {told}, but the world has {world.size}")
    every = collective.gather_object([(world.rank, world.size, socket.gethostname(), str(world.device))])
    equal([rank for rank, *_ in every], list(range(world.size)), "the list of ranks")
    equal({size for _, size, *_ in every}, {world.size}, "the size that the ranks know")
    hosts = {host for *_, host, _ in every}
    devices = [(host, device) for *_, host, device in every]
    # Where a process sees one device only, all of them may call theirs by the same name.
    if world.device.type != "cpu" and world.hardware.count() > 1:
        expect(len(set(devices)) == world.size, f"ranks share a device: {devices}")
    names = ", ".join(device for _, device in devices[:8]) + (", ..." if world.size > 8 else "")
    return f"{world.size} on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}: {names}"


def gather(accelerator: Accelerator) -> str:
    """Values of several types come from all ranks, in order; ragged ones after padding."""
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    sent = {
        "whole": torch.arange(3, device=device) + 10 * rank,
        "real": torch.full((1, 2), rank + 0.5, device=device),
        "yes": torch.tensor([rank % 2 == 0], device=device),
    }
    found = accelerator.gather(sent)
    equal(found["whole"].tolist(), [10 * r + i for r in range(size) for i in range(3)], "what was gathered")
    equal(found["real"].tolist(), [[r + 0.5] * 2 for r in range(size)], "what was gathered")
    equal(found["yes"].tolist(), [r % 2 == 0 for r in range(size)], "what was gathered")
    ragged = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    rows = accelerator.gather(ragged).reshape(size, -1).tolist()
    equal(rows, [[1.0] * (r + 1) + [0.0] * (size - r - 1) for r in range(size)], "what was padded")
    return f"{len(sent)} types and ragged rows, in the order of the ranks"


def reduce(accelerator: Accelerator) -> str:
    """The sum and the mean over all ranks."""
    rank, size = accelerator.process_index, accelerator.num_processes
    own = torch.tensor([1.0, float(rank)], device=accelerator.device)
    total = size * (size - 1) / 2
    equal(accelerator.reduce(own, reduction="sum").tolist(), [float(size), total], "the sum")
    equal(accelerator.reduce(own, reduction="mean").tolist(), [1.0, total / size], "the mean")
    return f"sum {total:g} and mean {total / size:g} of the ranks"


def broadcast(accelerator: Accelerator) -> str:
    """The first and the last rank send to all."""
    last = accelerator.num_processes - 1
    for source in sorted({0, last}):
        own = torch.full((4,), float(accelerator.process_index), device=accelerator.device)
        found = collective.broadcast(own, from_process=source)
        equal(found.tolist(), [float(source)] * 4, f"what rank {source} sent")
    return "from rank 0" + (f" and from rank {last}" if last else "")


def objects(accelerator: Accelerator) -> str:
    """Python objects travel too."""
    rank, size = accelerator.process_index, accelerator.num_processes
    every = collective.gather_object([{"rank": rank, "text": "x" * rank}])
    equal(every, [{"rank": r, "text": "x" * r} for r in range(size)], "the list of objects")
    sent = collective.broadcast_object_list([rank, {"rank": rank}])
    equal(sent, [0, {"rank": 0}], "what rank 0 sent")
    return f"gathered from {size}, sent by rank 0"


def speed(accelerator: Accelerator) -> str:
    """For information: the time of one sum over all ranks."""
    if accelerator.num_processes == 1:
        raise Skip("one process exchanges nothing")
    own = torch.ones(_NUMBERS, device=accelerator.device)
    accelerator.reduce(own, reduction="sum")
    times: list[float] = []
    for _ in range(_REPEATS):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        accelerator.reduce(own, reduction="sum")
        accelerator.world.hardware.synchronize()
        times.append(time.perf_counter() - began)
    size = _NUMBERS * own.element_size()
    return f"the sum of {show_bytes(size)} takes {1e3 * sorted(times)[_REPEATS // 2]:.1f} ms (median)"
