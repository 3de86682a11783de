"""No step waits on the host for a value of the device, unless the program asks for the value."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from tests.support.ranks import RankServer

WINDOWS = 12
RECOMPUTED: dict[str, Any] = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Linear"],
    "activation_checkpointing": True,
    "activation_checkpointing_offload": True,
}
# Buffers that change are looked for in forwards 1, 2, 4, 8, 16, and what was seen is read before the next.
LAST_LOOK = 16


class HostWaits(TorchDispatchMode):
    """Records each operation in which the host waits for the device: reads, and copies that block.

    Attributes:
        waits: operation and innermost frame outside of torch; ``_to_copy from loop:12``.
        to_host: how many copies to the host did not block.
        copies: of each copy to the device, whether the host waits and whether it is on the default stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.to_host = 0
        self.copies: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [value for value in args[:2] if isinstance(value, torch.Tensor)]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            if any(tensor.device.type == "sim" for tensor in tensors):
                self._note(name)
        elif name in ("_to_copy", "copy_"):
            source = tensors[-1].device.type
            target = result.device.type
            non_blocking = (kwargs or {}).get("non_blocking") or (name == "copy_" and args[2:3] == (True,))
            # Torch fills memory of a device with a number that it has read from a tensor of the host.
            if source == "cpu" and target == "sim" and tensors[-1].dim():
                on_default = torch.accelerator.current_stream().stream_id == 0
                self.copies.append((not non_blocking, on_default))
                if on_default and not non_blocking:
                    self._note(name)
            if source == "sim" and target == "cpu":
                self.to_host += bool(non_blocking)
                if not non_blocking:
                    self._note(name)
        return result

    def _note(self, name: str) -> None:
        stack = reversed(traceback.extract_stack())
        here = (f for f in stack if "/torch/" not in f.filename and f.name != "<genexpr>")
        frame = next(f for f in here if f.filename != __file__ or f.name == "train")
        self.waits.append(f"{name} from {frame.name}:{frame.lineno}")


def train(monkeypatch: pytest.MonkeyPatch, kind: str, how: str, options: dict[str, Any]) -> HostWaits:
    """Train with clipping over windows of two micro-batches; the waits after the first ones.

    Args:
        monkeypatch: of the caller.
        kind: the strategy.
        how: "weighted" by items, memory "pinned" by the loader or "pinned by collate", in "large" batches
            (2 MiB), "fused" optimizer, "unscheduled", "recomputed": some of these, in one string.
        options: of the ``Accelerator``.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    if kind.startswith("fsdp"):
        more = RECOMPUTED if "recomputed" in how else {}
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]), **more)
    if kind == "mesh":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    # As on a GPU: batches go over a stream of their own.
    monkeypatch.setattr(type(accelerator.world.hardware), "pins_memory", True)
    torch.manual_seed(0)
    # The CPU's kernels, which compute here, have no batch norm of float16 with float32 statistics.
    norm = nn.LayerNorm(4) if "mixed_precision" in options else nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))
    samples: Any = [torch.ones(4)] * (2 * 2 * WINDOWS * accelerator.num_processes)
    by_program = "by collate" in how
    collate = large if "large" in how else pinned if by_program else None
    pins = "pinned" in how and not by_program
    rows = DataLoader(samples, batch_size=2, collate_fn=collate, pin_memory=pins)
    optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in how)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    recorded = HostWaits()
    with recorded:
        for number, batch in enumerate(rows):
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss, **({"num_items": 2} if "weighted" in how else {}))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if "unscheduled" not in how:
                    schedule.step()
                optimizer.zero_grad()
            if number == LAST_LOOK:
                recorded.waits.clear()
    return recorded


def pinned(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).pin_memory()


def large(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).repeat(2**16, 1)


def waits(kind: str, how: str, options: dict[str, Any]) -> list[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return train(monkeypatch, kind, how, options).waits


# Windows that are recorded.
STEPS = (2 * WINDOWS - 1 - LAST_LOOK + 1) // 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "mesh"])
def test_a_step_waits_for_nothing(ranks: RankServer, kind: str) -> None:
    """With accumulation, clipping, a schedule, buffers that change and losses weighted by items."""
    assert ranks(2, waits, kind, "weighted pinned", {}) == [[], []]


def test_a_step_without_items_waits_for_nothing(ranks: RankServer) -> None:
    assert ranks(2, waits, "ddp", "", {}) == [[], []]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_fp16_step_reads_one_flag(ranks: RankServer, kind: str) -> None:
    for seen in ranks(2, waits, kind, "pinned", {"mixed_precision": "fp16"}):
        assert [wait.partition(":")[0] for wait in seen] == [
            "_local_scalar_dense from _maybe_opt_step"
        ] * STEPS


def test_an_fp16_step_of_a_fused_optimizer_reads_nothing() -> None:
    """The schedule asks whether the optimizer stepped; without it nobody does."""
    options = {"mixed_precision": "fp16"}
    assert waits("one process", "fused unscheduled pinned", options) == []
    assert len(waits("one process", "fused pinned", options)) == STEPS


def test_one_process_waits_for_nothing() -> None:
    assert waits("one process", "", {}) == []


@pytest.mark.parametrize("how", ["", "pinned large", "pinned by collate"])
def test_batches_go_over_a_stream_of_their_own(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for that stream alone, and not where the loader has pinned the memory.

    A collate function may fill the memory that it has pinned again.
    """
    copies = train(monkeypatch, "one process", how, {}).copies
    batches = [copy for copy in copies if not copy[1]]
    assert batches == [(how != "pinned large", False)] * 2 * WINDOWS


class OneBuffer(IterableDataset[Any]):
    """A stream that fills one buffer again and again."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.empty(2)
        for number in range(4):
            yield buffer.fill_(number)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_batch_is_on_the_device_before_the_next_one_is_read(batch_size: int | None) -> None:
    def same(samples: list[torch.Tensor]) -> torch.Tensor:
        return samples[0]

    from accelerate import Accelerator

    collate = None if batch_size is None else same
    loader = Accelerator().prepare(DataLoader(OneBuffer(), batch_size=batch_size, collate_fn=collate))
    assert [batch.tolist() for batch in loader] == [[number, number] for number in range(4)]


def test_a_loader_is_copied_inside_of_an_epoch_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies of batches use a stream, which can be neither copied nor pickled."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    monkeypatch.setattr(type(accelerator.world.hardware), "pins_memory", True)
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2))  # type: ignore[arg-type]
    whole = [[0, 1], [2, 3]]
    for _ in loader:
        assert [batch.tolist() for batch in copy.deepcopy(loader)] == whole
    again = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch in again] == whole


def test_a_small_copy_from_pinned_memory_does_not_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would take longer to use the other stream than the device to copy; it waits for neither."""
    seen = train(monkeypatch, "one process", "pinned", {})
    assert [copy for copy in seen.copies if not copy[1]] == []
    assert seen.copies.count((False, True)) >= 2 * WINDOWS
    assert seen.waits == []


def offloads(how: str) -> tuple[int, list[str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorded = train(monkeypatch, "fsdp2", how, {})
    return recorded.to_host, recorded.waits


def test_offloaded_inputs_of_recomputed_blocks_are_copied_without_waiting(ranks: RankServer) -> None:
    """The input of the second linear layer, in each backward; that of the first needs no gradient."""
    assert ranks(2, offloads, "pinned recomputed") == [(2 * WINDOWS, [])] * 2
