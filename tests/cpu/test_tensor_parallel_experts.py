"""Models of transformers that have sharded their layers while they were read: experts, and norms of heads.

Their fused weights, gate and up projections in one, are shards of several boxes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import samples
from tests.support.ranks import RankServer

PRELOAD = ("transformers.models.llama.modeling_llama",)
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=32, num_local_experts=4, num_key_value_heads=2, **sizes)
    return MixtralForCausalLM(config)


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, num_key_value_heads=2, head_dim=4, **sizes))


def sharded_by_transformers(kind: type, folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.from_pretrained(folder, tp_plan="auto").train()  # type: ignore[attr-defined]


def parallel(**more: Any) -> Any:
    from accelerate import Accelerator, ParallelismConfig

    return Accelerator(parallelism_config=ParallelismConfig(tp_size=2), **more)


def words(step: int) -> torch.Tensor:
    rows = [sample["input_ids"] for sample in samples()]
    return torch.stack(rows[4 * step : 4 * step + 4])


def steps(accelerator: Any, model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
    losses = []
    for step in range(begin, end):
        with accelerator.accumulate(model):
            loss = model(input_ids=words(step), labels=words(step), use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(make: Any, count: int, window: int = 1) -> list[float]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(gradient_accumulation_steps=window), make()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return steps(accelerator, model, optimizer, 0, count)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def equal(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def saved(folder: str, kinds: tuple[str | None, ...]) -> dict[str, Any]:
    """Train two steps, save, go on, load what was saved, and go on again."""
    from transformers import MixtralForCausalLM

    from accelerate import FullyShardedDataParallelPlugin

    found: dict[str, Any] = {}
    for kind in kinds:
        plugin = FullyShardedDataParallelPlugin(state_dict_type=kind) if kind else None
        accelerator = parallel(fsdp_plugin=plugin)
        model = sharded_by_transformers(MixtralForCausalLM, f"{folder}/model")
        model, optimizer = accelerator.prepare(model, adamw(model))
        losses = steps(accelerator, model, optimizer, 0, 2)
        accelerator.save_state(f"{folder}/{kind}")
        state = accelerator.get_state_dict(model)
        after = steps(accelerator, model, optimizer, 2, 4)
        accelerator.load_state(f"{folder}/{kind}")
        loaded = accelerator.get_state_dict(model)
        again = steps(accelerator, model, optimizer, 2, 4)
        rows = tuple(model.get_parameter(FUSED).to_local().shape)
        found[str(kind)] = losses + after, equal(state, loaded), again == after, rows, state
    return found


def loaded_alone(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(), mixtral()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(folder)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return steps(accelerator, model, optimizer, 2, 4), state


def loaded_in_halves(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from transformers import MixtralForCausalLM

    accelerator = parallel()
    model = sharded_by_transformers(MixtralForCausalLM, f"{folder}/model")
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(f"{folder}/alone")
    state = accelerator.get_state_dict(model)
    return steps(accelerator, model, optimizer, 2, 4), state


def saved_alone(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(), mixtral()
    model, optimizer = accelerator.prepare(model, adamw(model))
    steps(accelerator, model, optimizer, 0, 2)
    accelerator.save_state(f"{folder}/alone")
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return steps(accelerator, model, optimizer, 2, 4), state


def test_fused_weights_are_saved_and_loaded_as_they_are(ranks: RankServer, tmp_path: Path) -> None:
    """In shards and as full states; by two processes and by one, each from the other."""
    folder = str(tmp_path)
    mixtral().save_pretrained(f"{folder}/model")
    expected = plain(mixtral, 4)
    first = ranks(2, saved, folder, (None, "FULL_STATE_DICT"))[0]
    for kind, (losses, is_equal, goes_on, rows, state) in first.items():
        assert rows == (4, 8, 16), kind
        assert losses == pytest.approx(expected, abs=1e-4), kind
        assert is_equal, kind
        assert goes_on, kind
        (after, loaded) = ranks(1, loaded_alone, f"{folder}/{kind}")[0]
        assert equal(loaded, state), kind
        assert after == pytest.approx(losses[2:], abs=1e-4), kind
    losses, state = ranks(1, saved_alone, folder)[0]
    after, loaded = ranks(2, loaded_in_halves, folder)[0]
    assert equal(loaded, state)
    assert after == pytest.approx(losses, abs=1e-4)


def from_files(folder: str) -> dict[str, torch.Tensor]:
    from transformers import MixtralForCausalLM

    from accelerate import load_checkpoint_in_model

    accelerator = parallel()
    model = sharded_by_transformers(MixtralForCausalLM, f"{folder}/model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model = accelerator.prepare(model)
    load_checkpoint_in_model(model, f"{folder}/whole.safetensors")
    return accelerator.get_state_dict(model)


def test_files_are_loaded_into_fused_weights(ranks: RankServer, tmp_path: Path) -> None:
    from safetensors.torch import save_model

    model = mixtral()
    model.save_pretrained(tmp_path / "model")
    save_model(model, str(tmp_path / "whole.safetensors"))
    assert equal(ranks(2, from_files, str(tmp_path))[0], model.state_dict())


def open_window(folder: str) -> tuple[list[float], list[float]]:
    """Save in the middle of a window of two, and go on; then load it here and do the same."""
    from transformers import MixtralForCausalLM

    accelerator = parallel(gradient_accumulation_steps=2)
    model = sharded_by_transformers(MixtralForCausalLM, f"{folder}/model")
    model, optimizer = accelerator.prepare(model, adamw(model))
    steps(accelerator, model, optimizer, 0, 3)
    accelerator.save_state(f"{folder}/window")
    after = steps(accelerator, model, optimizer, 3, 6)
    accelerator.load_state(f"{folder}/window")
    return after, steps(accelerator, model, optimizer, 3, 6)


def window_alone(folder: str) -> list[float]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(gradient_accumulation_steps=2), mixtral()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(f"{folder}/window")
    return steps(accelerator, model, optimizer, 3, 6)


def test_gradients_of_fused_weights_are_saved_in_an_open_window(ranks: RankServer, tmp_path: Path) -> None:
    folder = str(tmp_path)
    mixtral().save_pretrained(f"{folder}/model")
    expected = plain(mixtral, 6, window=2)[3:]
    after, again = ranks(2, open_window, folder)[0]
    assert after == pytest.approx(expected, abs=1e-4)
    assert again == after
    assert ranks(1, window_alone, folder)[0] == pytest.approx(expected, abs=1e-4)


def norms_of_heads(folder: str, called: bool) -> dict[str, float]:
    """The largest distance of a gradient after a window of three from that of one process."""
    from transformers import Qwen3ForCausalLM

    accelerator, alone = parallel(gradient_accumulation_steps=3), qwen3()
    model = sharded_by_transformers(Qwen3ForCausalLM, folder)
    if called:
        model(input_ids=words(0), labels=words(0), use_cache=False).loss.backward()
        model.zero_grad()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=words(step), labels=words(step), use_cache=False).loss)
        (alone(input_ids=words(step), labels=words(step), use_cache=False).loss / 3).backward()
    return {
        name: (parameter.grad.full_tensor() - alone.get_parameter(name).grad).abs().max().item()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("called", [False, True], ids=["new", "called before"])
def test_gradients_of_norms_of_heads_are_summed_once(ranks: RankServer, tmp_path: Path, called: bool) -> None:
    """transformers sums what has accumulated, again in each micro-batch of a window."""
    qwen3().save_pretrained(tmp_path)
    for far in ranks(2, norms_of_heads, str(tmp_path), called):
        assert max(far.values()) < 1e-5, far
