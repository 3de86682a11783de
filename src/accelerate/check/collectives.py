"""Checks of ranks, devices and collectives."""

from __future__ import annotations

import socket
import time

import torch

from accelerate.check.base import CheckNotApplicableError, expect, expect_equal
from accelerate.core import environ
from accelerate.core.units import show_bytes
from accelerate.facade.accelerator import Accelerator
from accelerate.world import collective

_NUMBERS = 1 << 20  # float32 values of the timed all-reduce
_REPEATS = 5


def check_ranks(accelerator: Accelerator) -> str:
    """Check that every rank exists once, knows the world size, and has a device of its own."""
    world = accelerator.world
    variable = environ.get("WORLD_SIZE")
    matches = variable is None or int(variable) == world.size
    expect(matches, f"WORLD_SIZE is {variable}, but the world has {world.size}")
    reports = collective.gather_object([(world.rank, world.size, socket.gethostname(), str(world.device))])
    expect_equal([rank for rank, *_ in reports], list(range(world.size)), "the list of ranks")
    expect_equal({size for _, size, *_ in reports}, {world.size}, "the size that the ranks know")
    hosts = {host for *_, host, _ in reports}
    devices = [(host, device) for *_, host, device in reports]
    # Where a process sees one device only, all of them may call theirs by the same name.
    if world.device.type != "cpu" and world.hardware.count() > 1:
        expect(len(set(devices)) == world.size, f"ranks share a device: {devices}")
    names = ", ".join(device for _, device in devices[:8]) + (", ..." if world.size > 8 else "")
    return f"{world.size} on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}: {names}"


def check_gather(accelerator: Accelerator) -> str:
    """Check an all-gather of several dtypes in rank order, and of ragged rows after padding."""
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    sent = {
        "whole": torch.arange(3, device=device) + 10 * rank,
        "real": torch.full((1, 2), rank + 0.5, device=device),
        "yes": torch.tensor([rank % 2 == 0], device=device),
    }
    gathered = accelerator.gather(sent)
    expect_equal(
        gathered["whole"].tolist(), [10 * r + i for r in range(size) for i in range(3)], "what was gathered"
    )
    expect_equal(gathered["real"].tolist(), [[r + 0.5] * 2 for r in range(size)], "what was gathered")
    expect_equal(gathered["yes"].tolist(), [r % 2 == 0 for r in range(size)], "what was gathered")
    ragged = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    rows = accelerator.gather(ragged).reshape(size, -1).tolist()
    expect_equal(rows, [[1.0] * (r + 1) + [0.0] * (size - r - 1) for r in range(size)], "what was padded")
    return f"{len(sent)} types and ragged rows, in the order of the ranks"


def check_reduce(accelerator: Accelerator) -> str:
    """Check the all-reduced sum and mean."""
    rank, size = accelerator.process_index, accelerator.num_processes
    values = torch.tensor([1.0, float(rank)], device=accelerator.device)
    total = size * (size - 1) / 2
    expect_equal(accelerator.reduce(values, reduction="sum").tolist(), [float(size), total], "the sum")
    expect_equal(accelerator.reduce(values, reduction="mean").tolist(), [1.0, total / size], "the mean")
    return f"sum {total:g} and mean {total / size:g} of the ranks"


def check_broadcast(accelerator: Accelerator) -> str:
    """Check a broadcast from the first and from the last rank."""
    last = accelerator.num_processes - 1
    for source in sorted({0, last}):
        values = torch.full((4,), float(accelerator.process_index), device=accelerator.device)
        received = collective.broadcast(values, from_process=source)
        expect_equal(received.tolist(), [float(source)] * 4, f"what rank {source} sent")
    return "from rank 0" + (f" and from rank {last}" if last else "")


def check_objects(accelerator: Accelerator) -> str:
    """Check the gather and broadcast of Python objects."""
    rank, size = accelerator.process_index, accelerator.num_processes
    objects = collective.gather_object([{"rank": rank, "text": "x" * rank}])
    expect_equal(objects, [{"rank": r, "text": "x" * r} for r in range(size)], "the list of objects")
    sent = collective.broadcast_object_list([rank, {"rank": rank}])
    expect_equal(sent, [0, {"rank": 0}], "what rank 0 sent")
    return f"gathered from {size}, sent by rank 0"


def measure_all_reduce(accelerator: Accelerator) -> str:
    """Measure the time of one all-reduce."""
    if accelerator.num_processes == 1:
        raise CheckNotApplicableError("one process exchanges nothing")
    values = torch.ones(_NUMBERS, device=accelerator.device)
    accelerator.reduce(values, reduction="sum")
    times: list[float] = []
    for _ in range(_REPEATS):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        accelerator.reduce(values, reduction="sum")
        accelerator.world.hardware.synchronize()
        times.append(time.perf_counter() - began)
    size = _NUMBERS * values.element_size()
    return f"the sum of {show_bytes(size)} takes {1e3 * sorted(times)[_REPEATS // 2]:.1f} ms (median)"
