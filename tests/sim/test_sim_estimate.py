"""The estimate of a training against the memory that it takes on a simulated accelerator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.support.estimates import estimate_memory

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
# Gated without dropout and tied weights; plain with both, whose activation function is many small operators.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {**SIZES, "intermediate_size": 344, "num_key_value_heads": 2}),
    "GPT2": ("LMHeadModel", {**SIZES, "bos_token_id": 1, "eos_token_id": 1}),
    "Bert": ("ForMaskedLM", {**SIZES, "intermediate_size": 512}),
}
BATCH, LENGTH = 4, 64
# How far the trace, and the formula, may be from what is measured.
TRACE, FORMULA = 1.05, 2.0


def model_of(kind: str) -> Any:
    """A small model of the family, with its own code for attention: not every device has a fused one."""
    ending, sizes = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="eager")
    return getattr(transformers, kind + ending)(config)


def bill_of(kind: str, mixed: str = "no", *, traced: bool = True) -> Any:
    with torch.device("meta"):
        model = model_of(kind)
    how: dict[str, Any] = {"attention": "eager", "mixed_precision": mixed, "traced": traced}
    return estimate_memory(model, batch=BATCH, length=LENGTH, **how)


def held() -> int:
    gc.collect()
    return torch.get_device_module("sim").memory_allocated()


def on_sim(kind: str) -> tuple[Any, torch.Tensor]:
    """The model in training, and one batch. ``to`` leaves what was tied apart on a device of this kind."""
    model = model_of(kind).to("sim").train()
    model.tie_weights()
    return model, torch.randint(2, 500, (BATCH, LENGTH), device="sim")


@pytest.mark.parametrize("mixed", ["no", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_gradients_and_state_are_exact_and_activations_near(kind: str, mixed: str) -> None:
    bill, guess = bill_of(kind, mixed), bill_of(kind, mixed, traced=False)
    before = held()
    model, words = on_sim(kind)
    assert held() - before == bill.weights + words.nbytes
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    start = held()
    with torch.autocast("sim", dtype=torch.bfloat16, enabled=mixed == "bf16"):
        loss = model(input_ids=words, labels=words).loss
    saved = held() - start
    assert saved / TRACE <= bill.activations + bill.copies <= saved * TRACE
    assert saved / FORMULA <= guess.activations + guess.copies <= saved * FORMULA
    loss.backward()
    del loss
    assert held() - start == bill.gradients
    start = held()
    optimizer.step()
    assert held() - start == bill.optimizer
    optimizer.zero_grad()
    assert held() - before == words.nbytes + bill.weights + bill.optimizer


def test_what_all_parts_take_is_what_a_step_with_accumulation_takes() -> None:
    sim = torch.get_device_module("sim")
    bill, before, peak = bill_of("Llama"), held(), 0
    model, words = on_sim("Llama")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        for _ in range(2):
            sim.reset_peak_memory_stats()
            model(input_ids=words, labels=words).loss.backward()
            peak = sim.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    assert bill.total <= peak <= 1.15 * bill.total


def test_a_device_of_that_size_is_enough_and_one_without_the_activations_is_not() -> None:
    from tests.support.sim import capacity

    bill, before = bill_of("GPT2"), held()

    def step() -> None:
        model, words = on_sim("GPT2")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            model(input_ids=words, labels=words).loss.backward()
            optimizer.step()

    with capacity(before + int(1.15 * bill.total)):
        step()
    gc.collect()
    torch.get_device_module("sim").empty_cache()
    with capacity(before + bill.total - bill.activations), pytest.raises(torch.OutOfMemoryError):
        step()
