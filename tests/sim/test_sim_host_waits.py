"""No step waits on the host for a value of the device, unless the program asks for the value."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RankServer

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
WINDOWS = 12
# Buffers that change are looked for in forwards 1, 2, 4, 8, 16, and what was seen is read before the next.
LAST_LOOK = 16


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Record every read of a value of the device, with the innermost frames outside of torch."""
    found: list[str] = []
    patch = pytest.MonkeyPatch()

    def watch(name: str) -> None:
        read = getattr(torch.Tensor, name)

        def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "sim":
                frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
                found.append(f"{name} at " + ", ".join(f"{f.name}:{f.lineno}" for f in frames[-2:]))
            return read(tensor, *args, **kwargs)

        patch.setattr(torch.Tensor, name, recorded)

    for name in READS:
        watch(name)
    try:
        yield found
    finally:
        patch.undo()


def train(kind: str, weighted: bool) -> list[str]:
    """Train with clipping over windows of two micro-batches; the reads of the rest."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    more: dict[str, Any] = {}
    if kind.startswith("fsdp"):
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]))
    if kind == "mesh":
        more["parallelism_config"] = ParallelismConfig(dp_replicate_size=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, **more)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    samples: Any = [torch.ones(4)] * (2 * 2 * WINDOWS * accelerator.num_processes)
    rows = torch.utils.data.DataLoader(samples, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    with host_reads() as found:
        for number, batch in enumerate(rows):
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss, **({"num_items": 2} if weighted else {}))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if number == LAST_LOOK:
                found.clear()
        return list(found)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "mesh"])
def test_a_step_reads_nothing_back(ranks: RankServer, kind: str) -> None:
    """With accumulation, clipping, a schedule and buffers that change."""
    assert ranks(2, train, kind, False) == [[], []]


def test_a_window_of_weighted_losses_reads_its_total_once(ranks: RankServer) -> None:
    """The total decides whether the window counts at all, and the scale of the next one."""
    for reads in ranks(2, train, "ddp", True):
        assert len(reads) == (2 * WINDOWS - 1 - LAST_LOOK + 1) // 2, reads


def test_one_process_reads_nothing_back() -> None:
    assert train("one process", False) == []
