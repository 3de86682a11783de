"""What ``accelerate plan`` says each rank holds, against the memory of two simulated accelerators."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from tests.support.estimates import estimate_memory
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import RankServer

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

pytest.importorskip("transformers")
# A processor without bfloat16 instructions takes 28 s for each way in bf16 at the size of the long run.
BATCH, LENGTH, SCALE = 4, *((64, 2) if LONG_RUN else (32, 1))
SIZES: dict[str, Any] = {
    "vocab_size": 512 * SCALE,
    "hidden_size": 128 * SCALE,
    "intermediate_size": 344 * SCALE,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# Way -> (fields of the estimate, how a user asks for it).
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "copies": ({"strategy": "ddp"}, None),
    "sharded": ({"strategy": "fsdp"}, {}),
    "whole in the step": ({"strategy": "fsdp", "keeps": True}, {"reshard_after_forward": False}),
    "recomputed": ({"strategy": "fsdp", "recompute": "full"}, {"activation_checkpointing": True}),
}
RESTING, ALL = 1.10, 1.20  # how far weights, gradients and optimizer, and the peak, may be from measured


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig
    return LlamaForCausalLM(config(**SIZES, attn_implementation="eager"))


def said(options: dict[str, Any], mixed: str) -> Any:
    """The bill of that way."""
    with torch.device("meta"):
        model = model_of()
    how = {"attention": "eager", "mixed_precision": mixed, "num_processes": 2, **options}
    return estimate_memory(model, batch=BATCH, length=LENGTH, **how)


def settled(sim: Any) -> int:
    """Bytes once the thread of the last collective has let go of its tensors."""
    gc.collect()
    last, until = -1, time.monotonic() + 10
    while last != sim.memory_allocated() and time.monotonic() < until:
        last = sim.memory_allocated()
        time.sleep(0.05)
    return last


def measured(options: dict[str, Any] | None, mixed: str) -> tuple[int, int]:
    """(bytes between backward and step of the second window, greatest of all that)."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    layers: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    plugin = None if options is None else FullyShardedDataParallelPlugin(**layers, **options)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=mixed)
    sim: Any = torch.get_device_module("sim")
    model: Any = model_of()
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    words = torch.randint(2, 500, (BATCH, LENGTH), device=accelerator.device)
    # A model that computes blocks again leaves its cache out by itself.
    uncached = {} if options and "activation_checkpointing" in options else {"use_cache": False}
    resting = 0
    for step in range(2):
        if step:
            sim.reset_peak_memory_stats()
        for _ in range(2):
            accelerator.backward(model(input_ids=words, labels=words, **uncached).loss)
        resting = settled(sim)
        optimizer.step()
        optimizer.zero_grad()
    return resting, sim.max_memory_allocated()


@pytest.mark.timeout(300)  # the first one also starts the rank server
@pytest.mark.parametrize(
    ("way", "mixed"),
    [
        (way, mixed) if mixed == default else long_run_param(way, mixed)
        for way, default in zip(WAYS, ("bf16", "no", "bf16", "no"), strict=True)
        for mixed in ("no", "bf16")
    ],
)
def test_it_is_near_what_is_measured(ranks: RankServer, way: str, mixed: str) -> None:
    asked, options = WAYS[way]
    bill = said(asked, mixed)
    # The buckets in which gradients are exchanged stay too.
    buckets = bill.gradients if asked["strategy"] == "ddp" else 0
    kept = bill.weights + bill.gradients + bill.optimizer + buckets
    for resting, peak in ranks(2, measured, options, mixed, timeout=110):
        assert kept / RESTING <= resting <= kept * RESTING
        assert bill.total / ALL <= peak <= bill.total * ALL
