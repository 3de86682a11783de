"""The estimate of a training against the memory that it takes on a real accelerator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.support.estimates import estimate_memory

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
BATCH, LENGTH = 4, 256
# Allocators give 512 bytes at least, libraries keep workspaces, and kernels what others do not.
EXACT, NEAR = 1.02, 1.25


def model_of(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def held() -> int:
    gc.collect()
    return torch.accelerator.memory_allocated()


def take_workspaces(device_type: str) -> None:
    """Let the libraries take their workspaces, of the backward's thread too: they are in no estimate."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, device=device_type, dtype=dtype)
        layer(torch.ones(64, 64, device=device_type, dtype=dtype)).sum().backward()


def near(found: int, expected: int, factor: float) -> bool:
    return expected / factor <= found <= expected * factor


@pytest.mark.parametrize("mixed", ["no", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_is_estimated_is_what_a_training_takes(device: Any, attention: str, mixed: str) -> None:
    if attention == "sdpa" and device.type != "cuda":
        pytest.skip("whether this device has a fused kernel for attention is not known")
    # Torch has no fused attention in float32 for fewer heads of keys than of queries.
    how = "fused" if attention == "sdpa" and mixed == "bf16" else "eager"
    with torch.device("meta"):
        hollow = model_of(attention)
    bill = estimate_memory(hollow, batch=BATCH, length=LENGTH, attention=how, mixed_precision=mixed)
    take_workspaces(device.type)
    before = held()
    model = model_of(attention).to(device.type).train()
    words = torch.randint(0, 2000, (BATCH, LENGTH), device=device.type)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = held() - before
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed == "bf16"):
        loss = model(input_ids=words, labels=words).loss
    saved = held() - before - weights
    loss.backward()
    optimizer.step()
    del loss
    state = held() - before - weights
    assert near(weights, bill.weights, EXACT), (weights, bill)
    assert near(saved, bill.activations + bill.copies, NEAR), (saved, bill)
    assert near(state, bill.gradients + bill.optimizer, NEAR), (state, bill)
