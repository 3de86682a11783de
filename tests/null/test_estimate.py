"""The arithmetic of memory: the figures of the talks and of the papers, and the state of real optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.facade.estimate.activation_formula import (
    TransformerShape,
    activation_bytes,
    transformer_shape,
)
from accelerate.facade.estimate.activation_trace import SavedActivationBytes
from accelerate.facade.estimate.memory_estimate import (
    OPTIMIZERS,
    MemoryEstimateConfig,
    ModelSizes,
    estimate_training,
    measure_model,
    rule_of_thumb,
)
from accelerate.facade.estimate.skeleton import build_skeleton
from accelerate.utils import convert_bytes
from tests.null.test_meta_models import BERT, write

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


@pytest.fixture
def bert(tmp_path: Path) -> ModelSizes:
    """bert-base-cased without its head, as 1.x builds it."""
    return measure_model(build_skeleton(write(tmp_path, BERT), head=False), "bert-base-cased")


# ---------------------------------------------------------------- the talks


def shown(found: dict[str, int]) -> list[str]:
    return [convert_bytes(size) for size in (*found.values(), max(found.values()))]


def test_the_rows_of_bert_are_those_of_the_talks(bert: ModelSizes) -> None:
    assert round(bert.parameters / 1e6) == 108
    assert [convert_bytes(bert.total(t)) for t in ("float32", "float16", "int8", "int4")] == [
        *("413.18 MB", "206.59 MB", "103.29 MB", "51.65 MB"),
    ]
    words = ["413.18 MB", "413.18 MB", "826.36 MB", "1.61 GB", "1.61 GB"]
    assert shown(rule_of_thumb(bert.total())) == words
    words = ["413.18 MB", "619.77 MB", "826.36 MB", "826.36 MB", "826.36 MB"]
    assert shown(rule_of_thumb(bert.total(), "float16")) == words
    assert convert_bytes(bert.largest[0]) == "86.47 MB"


def test_the_rows_of_llama_are_those_of_the_talks(tmp_path: Path) -> None:
    """The talks counted a model that kept a cosine and a sine for each position in each layer, 0.25 GB."""
    model = build_skeleton(write(tmp_path, LLAMA), head=False)
    facts = measure_model(model, "Llama-3-8B")
    assert convert_bytes(facts.total()) == "27.96 GB"
    whole = measure_model(build_skeleton(write(tmp_path, LLAMA)), "Llama-3-8B")
    assert (round(whole.parameters / 1e9, 2), convert_bytes(whole.total())) == (8.03, "29.92 GB")
    for part in model.get_submodule("layers").children():
        for name in ("cosines", "sines"):
            part.register_buffer(name, torch.empty(8192, 128, device="meta"))
    told = measure_model(model, "Llama-3-8B").total()
    for dtype, said in (
        ("float32", (28.21, 28.21, 56.43, 112.84)),
        ("float16", (28.21, 42.32, 56.43, 56.43)),
    ):
        assert [size / 2**30 for size in rule_of_thumb(told, dtype).values()] == pytest.approx(
            said, abs=0.0151
        )


def test_the_dtype_of_a_configuration_does_not_halve_the_rows(tmp_path: Path) -> None:
    """A model stored in 16 bits is as large in float32 as any other."""
    found = [
        measure_model(build_skeleton(write(tmp_path, {**LLAMA, "dtype": dtype})), "x").total()
        for dtype in ("float32", "bfloat16", "float16")
    ]
    assert len(set(found)) == 1


# ---------------------------------------------------------------- the papers


def plain(parameters: int) -> ModelSizes:
    return ModelSizes("x", "x", (((parameters,), True),))


@pytest.mark.parametrize(("strategy", "billions"), [("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_stages_divide_as_their_paper_says(strategy: str, billions: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, Adam, mixed precision."""
    how = MemoryEstimateConfig(strategy=strategy, num_processes=64, mixed_precision="fp16")
    bill = estimate_training(plain(7_500_000_000), how)
    assert (bill.weights + bill.gradients + bill.optimizer) / 1e9 == pytest.approx(billions, abs=0.05)


def gpt(**more: Any) -> TransformerShape:
    return TransformerShape(4, 64, 8, 8, 8, 256, **{"dropout": True, **more})


def test_activations_of_a_block_are_those_of_the_paper() -> None:
    """Korthikanti et al. 2022, equations 1 and 2 and section 5: s b h (34 + 5 a s / h), 34 s b h, 2 s b h."""
    s, b, h, a = 128, 3, 64, 8
    eager = s * b * h * 34 + 5 * a * s * s * b
    assert activation_bytes(gpt(), b, s, 2, attention="eager") == 4 * eager
    assert activation_bytes(gpt(), b, s, 2, "selective", "eager") == 4 * s * b * h * 34
    assert activation_bytes(gpt(), b, s, 2, attention="fused") == 4 * s * b * h * 34
    full = activation_bytes(gpt(), b, s, 2, "full", "eager")
    assert full == 4 * 2 * s * b * h + 34 * s * b * h


def test_activations_grow_with_batch_and_length_and_shrink_with_recomputation() -> None:
    for attention in ("fused", "eager"):
        sizes = [activation_bytes(gpt(), 2, 64, 2, how, attention) for how in ("none", "selective", "full")]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] < sizes[0]
        assert activation_bytes(gpt(), 4, 64, attention=attention) == 2 * activation_bytes(
            gpt(), 2, 64, attention=attention
        )
        growth = activation_bytes(gpt(), 2, 128, attention=attention) / activation_bytes(
            gpt(), 2, 64, attention=attention
        )
        assert (growth == 2) == (attention == "fused")


def test_the_formula_reads_what_a_configuration_says(tmp_path: Path) -> None:
    found = transformer_shape(build_skeleton(write(tmp_path, LLAMA)))
    assert found == TransformerShape(
        32, 4096, 32, 8, 128, 14336, gated=True, dropout=False, vocabulary=128256
    )
    gpt2 = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
    }
    found = transformer_shape(build_skeleton(write(tmp_path, {**gpt2, "vocab_size": 100})))
    assert found == TransformerShape(2, 64, 4, 4, 16, 256, dropout=True, vocabulary=100)
    assert transformer_shape(nn.Linear(2, 2)) is None


# ---------------------------------------------------------------- optimizers

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_an_optimizer_is_counted_to_the_byte(kind: str, dtype: torch.dtype) -> None:
    """Steps, one number for a parameter, are left out: they are on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 5, 2), nn.Linear(7, 11, bias=False), nn.LayerNorm(11)).to(dtype)
    model[0].bias.requires_grad_(False)
    optimizer = KINDS[kind]([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    held = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    real = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    shapes = tuple((tuple(p.shape), p.requires_grad) for p in model.parameters())
    how = MemoryEstimateConfig(dtype=str(dtype).removeprefix("torch."), optimizer=kind)
    bill = estimate_training(ModelSizes("x", "x", shapes), how)
    assert bill.optimizer == real
    assert bill.weights == sum(p.nbytes for p in model.parameters())
    assert bill.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def test_state_of_8_bits_has_a_scale_for_each_block_and_leaves_small_parameters() -> None:
    state = OPTIMIZERS["8bit-adamw"]
    assert state((1024, 1024), 4) == 2 * (2**20 + 4 * 2**12)
    assert state((4095,), 4) == 8 * 4095


# ---------------------------------------------------------------- strategies


def test_every_strategy_divides_what_it_says_and_no_more() -> None:
    facts = ModelSizes("x", "x", (((1000,), True), ((24,), False)), buffers=16, largest=(400, ("a",)))
    found = {
        name: estimate_training(
            facts, MemoryEstimateConfig(strategy=name, num_processes=1 if name == "single" else 4)
        ).parts
        for name in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
    }
    rows = {name: [part for part in parts.values() if part] for name, parts in found.items()}
    assert rows == {
        "single": [4112, 4000, 8000],
        "ddp": [4112, 4000, 8000, 4000],  # gradients travel in buckets of their own
        "zero1": [4112, 4000, 2000],
        "zero2": [4112, 1000, 2000],
        "zero3": [1040, 1000, 2000, 800],  # the block that computes, and the next
        "fsdp": [1040, 1000, 2000, 800],
    }


def test_mixed_precision_keeps_weights_and_adds_copies() -> None:
    facts = ModelSizes("x", "x", (((1000,), True),), largest=(400, ("a",)))
    single = estimate_training(facts, MemoryEstimateConfig(mixed_precision="bf16"))
    assert list(single.parts.values()) == [4000, 4000, 8000, 2000, 0]
    sharded = estimate_training(
        facts, MemoryEstimateConfig(mixed_precision="bf16", strategy="fsdp", num_processes=2)
    )
    assert list(sharded.parts.values()) == [2000, 2000, 4000, 400, 0]
    assert estimate_training(facts, MemoryEstimateConfig(dtype="bfloat16")).total == 8000


def test_a_share_is_never_too_small() -> None:
    for size in range(1, 40):
        for ranks in (2, 3, 7):
            bill = estimate_training(plain(size), MemoryEstimateConfig(strategy="fsdp", num_processes=ranks))
            assert bill.weights * ranks >= 4 * size
            assert bill.weights == math.ceil(4 * size / ranks)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "flaot32"}, "did you mean 'float32'"),
        ({"dtype": "int8"}, "not trained in int8"),
        ({"optimizer": "adamv"}, "did you mean 'adam'"),
        ({"strategy": "zero4"}, "did you mean 'zero"),
        ({"mixed_precision": "bf61"}, "did you mean 'bf16'"),
        ({"recompute": "ful"}, "did you mean 'full'"),
        ({"attention": "fussed"}, "did you mean 'fused'"),
        ({"batch": 0}, "batch is 0"),
        ({"length": -1}, "length is -1"),
        ({"num_processes": 2}, "2 processes under the strategy 'single'"),
    ],
)
def test_a_training_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        MemoryEstimateConfig(**options)
    assert issubclass(UnknownNameError, SettingError)


def test_what_is_left_out_is_said() -> None:
    (note,) = estimate_training(plain(3), MemoryEstimateConfig(length=5), "Net takes no tokens").notes
    assert note == "activations are left out: Net takes no tokens"
    layered = ModelSizes("x", "x", (((3,), True),), shape=gpt())
    assert "left out: --length" in estimate_training(layered, MemoryEstimateConfig()).notes[0]
    assert (
        "by the formula of Korthikanti et al. 2022"
        in estimate_training(layered, MemoryEstimateConfig(length=5)).notes[0]
    )
    full, kept = MemoryEstimateConfig(length=5, recompute="full"), SavedActivationBytes(1000, 0)
    unknown = estimate_training(plain(3), full, kept)
    assert (unknown.activations, unknown.notes) == (
        1000,
        ("activations without recomputation: the model's blocks are not known",),
    )
    with pytest.raises(UnknownNameError, match="float64"):
        rule_of_thumb(100, "float64")
