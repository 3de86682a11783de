"""The memory of a rank by ``accelerate plan``, compared with that of two processes."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.estimates import estimate_memory
from tests.support.long_run import long_run_param
from tests.support.packages import needs
from tests.support.ranks import RankServer

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

pytestmark = [
    needs("transformers"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
BATCH, LENGTH = 2, 32
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RESTING, ALL = (
    1.15,
    1.20,
)  # processors differ by what the libraries of torch keep: 1.09 to 1.10 on an AMD EPYC
MMAP_THRESHOLD = -3  # of mallopt: what is larger is given back to the system when it is freed


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig
    return LlamaForCausalLM(config(**SIZES, attn_implementation="eager"))


def said(**options: Any) -> Any:
    """The bill of that way."""
    with torch.device("meta"):
        model = model_of()
    return estimate_memory(model, batch=BATCH, length=LENGTH, attention="eager", num_processes=2, **options)


def held() -> int:
    """Bytes of this process that are no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """The greatest memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done, self.most = threading.Event(), 0

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.most = max(self.most, held())


def measured(options: dict[str, Any] | None, window: int = 1) -> tuple[int, int]:
    """(bytes after a backward of the second step, greatest of all that).

    Args:
        options: of the plugin; None for none.
        window: micro-batches of a step, 1 or 2. With 2 the backward is the first, which only accumulates.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16) == 1
    layers: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    plugin = None if options is None else FullyShardedDataParallelPlugin(**layers, **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=window)
    words = torch.randint(2, 500, (BATCH, LENGTH))
    # Libraries, threads and workspaces are there before.
    torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()
    with torch.device("meta"):
        model_of()
    gc.collect()
    before = held()
    model: Any = model_of()
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    peak, after = Peak(), list[int]()
    for step in range(2):
        if step:
            peak.start()
        for _ in range(window):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=words, labels=words, use_cache=False).loss)
            gc.collect()
            accelerator.wait_for_everyone()
            after.append(held())
        optimizer.step()
        optimizer.zero_grad()
    peak.done.set()
    peak.join()
    return after[-window] - before, peak.most - before


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        long_run_param({"strategy": "ddp"}, None),
        ({"strategy": "fsdp"}, {}),
        long_run_param({"strategy": "fsdp", "recompute": "full"}, {"activation_checkpointing": True}),
        long_run_param({"strategy": "fsdp", "accumulation": 2}, {}),
    ],
    ids=["copies", "sharded", "recomputed", "accumulated"],
)
def test_it_is_near_what_is_measured(
    ranks: RankServer, asked: dict[str, Any], options: dict[str, Any] | None
) -> None:
    bill = said(**asked)
    buckets = bill.gradients if asked["strategy"] == "ddp" else 0
    kept = bill.weights + bill.gradients + bill.optimizer + buckets
    for resting, peak in ranks(2, measured, options, bill.training.accumulation, timeout=120):
        assert kept / RESTING <= resting <= kept * RESTING
        assert bill.total / ALL <= peak <= bill.total * ALL
