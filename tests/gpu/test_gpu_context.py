"""Sequences that two accelerators share: the numbers of one CPU process.

Keys are gathered, or heads exchanged, by this package's own exchange around the device's attention; or keys
go around torch's ring, with the device's own kernels. One accelerator is a ring too, and shows the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from accelerate.device.base import Device
from tests.support import sim
from tests.support.ranks import RankServer
from tests.support.sequences import CUT, RING, Jobs, alone, close, ring_alone, shared_all

JOBS: Jobs = [
    ("llama", CUT, 8, 4, False),
    ("llama", CUT, 4, 1, True),
    ("mistral", {"sp_size": 2}, 4, 2, True),
    ("plain", {"sp_size": 2}, 4, 1, False),
    # A simulated device has no attention kernel of its own that a ring could be made of.
    *([] if sim.autoloaded() else [("llama", RING, 8, 4, False), ("plain", RING, 4, 1, False)]),
]


def test_two_accelerators_train_to_the_numbers_of_one_process(ranks: RankServer, device: Device) -> None:
    """B1, B9"""
    if device.count() < 2:
        pytest.skip(f"two {device.type} devices are needed, and there is one")
    where = [f"{device.type}:0", f"{device.type}:1"]
    found: Any = ranks(2, shared_all, JOBS, False, devices=where)
    for job, *numbers in zip(JOBS, *found, strict=True):
        kind, _, steps, window, padded = job
        one = alone(kind, steps, window, padded)
        for losses, norms, _ in numbers:
            close((losses, norms, {n: v.cpu() for n, v in numbers[0][2].items()}), one, 1e-4)


def around() -> list[dict[str, float]]:
    """Distances of a ring of one from torch's attention, of result and gradients, by number format."""
    from accelerate import Accelerator
    from accelerate.strategy.parallelism.context.attention import AttentionCall
    from accelerate.strategy.parallelism.context.context_parallel import RingAttention

    where = Accelerator().device
    ring = RingAttention(1, 0, dist.group.WORLD, True)
    found: list[dict[str, float]] = []
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 36)):
        shapes = ((2, 8, 128, width), (2, 4, 128, width), (2, 4, 128, width))
        parts = [torch.randn(s, device=where, dtype=dtype, requires_grad=True) for s in shapes]
        with ring_alone():
            mine = ring.compute_attention(AttentionCall(*parts, None, 0.0, True, {}))  # type: ignore[call-arg]
        q, k, v = parts
        keys, values = (part.repeat_interleave(2, 1) for part in (k, v))
        whole = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        weight = torch.randn_like(whole)
        ours, theirs = (torch.autograd.grad(o, parts, weight) for o in (mine, whole))
        pairs = zip(("result", "query", "key", "value"), (mine, *ours), (whole, *theirs), strict=True)
        found.append({name: (a - b).abs().max().item() for name, a, b in pairs})
    return found


def test_kernels_of_the_device_make_a_ring(ranks: RankServer, device: Device) -> None:
    """Gradients too, with several heads of queries over one of keys, and an odd width."""
    if sim.autoloaded():
        pytest.skip("a simulated device has no attention kernel of its own")
    ((full, *halves),) = ranks(1, around, devices=[f"{device.type}:0"])
    assert max(full.values()) < 1e-3, full
    assert max(far for half in halves for far in half.values()) < 0.1, halves
