"""A forward on empty tensors: what it counts, and what it says of models that it cannot run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from accelerate.facade.estimate import activation_trace
from accelerate.facade.estimate.activation_formula import activation_bytes, transformer_shape
from accelerate.facade.estimate.activation_trace import SavedActivationBytes, trace_saved
from accelerate.facade.estimate.memory_estimate import MemoryEstimateConfig, estimate_training, measure_model
from accelerate.facade.estimate.skeleton import build_skeleton
from tests.null.test_estimate import LLAMA
from tests.null.test_meta_models import BERT, write
from tests.support.torch_versions import is_torch

transformers = pytest.importorskip("transformers")
SMALL = {**LLAMA, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def traced(
    folder: Path, config: Any, batch: int = 2, length: int = 32, **options: Any
) -> SavedActivationBytes:
    found = trace_saved(build_skeleton(write(folder, config)), batch, length, **options)
    assert isinstance(found, SavedActivationBytes), found
    return found


def saved_for_real(model: nn.Module, batch: int, length: int) -> int:
    """Bytes of the storages that autograd holds after a forward of a real model on the CPU."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    words = torch.zeros(batch, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=words, labels=words)
    return sum(storage.nbytes() for storage in found.values())


def recomputed_for_real(model: Any, batch: int, length: int) -> int:
    """Most bytes of storages that autograd holds at once in a forward and backward with checkpoints."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    holders, sizes, most = Counter[int](), dict[int, int](), 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal most
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.key = storage._cdata
            if self.key not in own:
                holders[self.key] += 1
                sizes[self.key] = storage.nbytes()
                most = max(most, sum(sizes.values()))

        def __del__(self) -> None:
            holders[self.key] -= 1
            if not holders[self.key]:
                del sizes[self.key]

    model.train().gradient_checkpointing_enable({"use_reentrant": True})  # whose recomputation hooks see
    words = torch.zeros(batch, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        model(input_ids=words, labels=words).loss.backward()
    return most


@pytest.mark.parametrize("kind", ["Llama", "Mamba"])
def test_full_recomputation_holds_one_block_and_the_inputs_of_all(tmp_path: Path, kind: str) -> None:
    """Also where blocks have no heads of attention: the logits are gone before the first block is back."""
    small = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 100, "dtype": "float32"}
    small |= {"model_type": kind.lower(), "architectures": [f"{kind}ForCausalLM"]}
    if kind == "Llama":
        small |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**small, attn_implementation="eager")
    real = recomputed_for_real(getattr(transformers, f"{kind}ForCausalLM")(config), 2, 32)
    how = MemoryEstimateConfig(batch=2, length=32, recompute="full", attention="eager")
    facts = measure_model(build_skeleton(write(tmp_path, small)), kind)
    estimate = estimate_training(facts, how, traced(tmp_path, small, attention="eager"))
    logits = 2 * 32 * 100 * 8
    assert real <= estimate.activations <= 1.1 * (real + logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_it_counts_what_a_real_forward_saves(tmp_path: Path, attention: str) -> None:
    # Torch before 2.9 has no fused attention on a CPU for heads of queries that share a key.
    small = {**SMALL, "num_key_value_heads": 4} if is_torch("<2.9") else SMALL
    config = transformers.LlamaConfig(**{**small, "dtype": "float32"}, attn_implementation=attention)
    real = saved_for_real(transformers.LlamaForCausalLM(config).train(), 2, 32)
    how = "fused" if attention == "sdpa" else "eager"
    assert traced(tmp_path, small, attention=how).activations == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("kind", ["equal", "alternating"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_equal_blocks_are_counted_by_two_short_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, autocast: torch.dtype | None
) -> None:
    """The sum is that of a whole forward, to the byte; blocks that differ are all run."""
    config = {**SMALL, "num_hidden_layers": 7}
    if kind == "alternating":
        named = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
        config |= {**named, "head_dim": 16, "sliding_window": 8}
    runs: list[int] = []
    count = activation_trace._count_saved

    def record(model: Any, words: torch.Tensor, narrow: torch.dtype | None) -> SavedActivationBytes:
        runs.append(len(model.model.layers))
        return count(model, words, narrow)

    monkeypatch.setattr(activation_trace, "_count_saved", record)
    short = traced(tmp_path, config, autocast=autocast, attention="eager")
    assert runs == ([2, 3] if kind == "equal" else [7])
    monkeypatch.setattr(activation_trace, "_find_equal_blocks", lambda model: None)
    assert traced(tmp_path, config, autocast=autocast, attention="eager") == short
    assert runs[-1] == 7


def test_it_grows_with_batch_and_length_and_shrinks_with_the_format(tmp_path: Path) -> None:
    one = traced(tmp_path, SMALL).activations
    assert traced(tmp_path, SMALL, batch=4).activations == pytest.approx(2 * one, rel=0.01)
    assert traced(tmp_path, SMALL, length=64).activations == pytest.approx(2 * one, rel=0.02)
    assert traced(tmp_path, SMALL, attention="eager").activations > one
    assert traced(tmp_path, SMALL, dtype=torch.bfloat16).activations < 0.8 * one


def test_autocast_copies_weights_and_they_are_counted_apart(tmp_path: Path) -> None:
    model = build_skeleton(write(tmp_path, SMALL))
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    found = traced(tmp_path, SMALL, autocast=torch.bfloat16)
    assert found.casts == 2 * sum(layer.weight.numel() for layer in layers)
    assert found.activations < traced(tmp_path, SMALL).activations
    assert traced(tmp_path, SMALL).casts == 0


def test_a_mask_of_dropout_is_one_byte_as_on_accelerators(tmp_path: Path) -> None:
    small = {**BERT, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with_masks, without = (traced(tmp_path, {**small, **more}).activations for more in ({}, none))
    # Three places per block and its embeddings; what dropout leaves is saved where its input was.
    assert 0 < with_masks - without <= 3 * 2 * 32 * 64 * (1 + 4)


def test_a_large_model_is_traced_without_memory(tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    found = traced(tmp_path, LLAMA, batch=8, length=2048, dtype=torch.bfloat16)
    assert psutil.Process().memory_info().rss - before < 500 * 2**20
    layers = transformer_shape(build_skeleton(write(tmp_path, LLAMA)))
    assert layers is not None
    formula = activation_bytes(layers, 8, 2048)
    assert found.activations > 50 * 2**30
    assert formula / 1.5 < found.activations < formula * 1.5


@pytest.mark.parametrize(("kind", "name"), [("t5", "T5ForConditionalGeneration"), ("bert", "BertModel")])
def test_models_of_other_shapes_are_traced(tmp_path: Path, kind: str, name: str) -> None:
    small = {"model_type": kind, "architectures": [name], "d_model": 64, "num_layers": 1}
    small |= {"decoder_start_token_id": 0, "pad_token_id": 0}
    assert traced(tmp_path, {**small, "hidden_size": 64, "num_attention_heads": 2}).activations > 0


def test_an_operator_that_cannot_be_run_so_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 1}
    found = trace_saved(build_skeleton(write(tmp_path, experts)), 1, 8)
    if not isinstance(found, str) and (is_torch(">=2.14") or is_torch("<2.9")):
        pytest.skip("this torch traces it")
    assert str(found).startswith("MixtralForCausalLM cannot be traced: ")
    assert "torch._subclasses.fake_tensor" not in {record.name for record in caplog.records}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    tied = {**SMALL, "tie_word_embeddings": True}
    assert traced(tmp_path, tied, autocast=torch.bfloat16) == traced(tmp_path, SMALL, autocast=torch.bfloat16)


def test_a_model_that_takes_no_tokens_or_fails_says_so() -> None:
    assert trace_saved(nn.Linear(2, 2), 1, 1) == "Linear takes no tokens"

    class Failing(nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.ones(int(input_ids.sum()))

    assert str(trace_saved(Failing(), 1, 1)).startswith("Failing cannot be traced: ")
