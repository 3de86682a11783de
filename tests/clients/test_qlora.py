"""A frozen base of 4 bits with adapters of peft, sharded over two processes: the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.clients.big import library, llama, needs
from tests.support.ranks import RanksError, RankServer
from tests.support.torch_versions import is_torch

pytestmark = [needs("transformers", "peft", "bitsandbytes"), pytest.mark.timeout(180)]
# What the rank server imports once.
PRELOAD = ("transformers.models.llama.modeling_llama", "peft", "bitsandbytes")
STEPS = 4


def quantized(storage: torch.dtype) -> Any:
    """A llama whose linear layers are nf4, frozen, with LoRA of rank 4 in four of each layer."""
    bnb, peft = library("bitsandbytes"), library("peft")
    base = llama().requires_grad_(False)
    for path, old in list(base.named_modules()):
        if not isinstance(old, nn.Linear) or path == "lm_head":
            continue
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4",
            quant_storage=storage,
        )  # fmt: skip
        new.load_state_dict(old.state_dict())
        holder, _, name = path.rpartition(".")
        setattr(base.get_submodule(holder), name, new.to("cpu"))
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter.data, std=0.02)
    return model


def adamw(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def trained(model: Any, optimizer: Any, backward: Any, rank: int = 0, size: int = 1) -> list[torch.Tensor]:
    losses = []
    for step in range(STEPS):
        words = ((torch.arange(40).view(4, 10) * (step + 3)) % 61).chunk(size)[rank]
        loss = model(input_ids=words, labels=words).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and adapters of one process."""
    model = quantized(torch.uint8)
    losses = trained(model, adamw(model), torch.Tensor.backward)
    return [loss.item() for loss in losses], adapters(model)


def adapters(model: Any, state: Any = None) -> dict[str, torch.Tensor]:
    found = library("peft").get_peft_model_state_dict(model, state_dict=state)
    return {name: value.clone() for name, value in found.items()}


def sharded(storage: torch.dtype, precision: str, folder: str) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
    model: Any = quantized(storage)
    model, optimizer = accelerator.prepare(model, adamw(model))
    rank = accelerator.process_index
    losses = trained(model, optimizer, accelerator.backward, rank, 2)
    means = [accelerator.gather(loss).mean().item() for loss in losses]
    kinds = {(str(p.dtype), p.requires_grad) for p in model.parameters()}
    every: list[Any] = list(model.parameters())
    mine = sum(p.to_local().numel() for p in every) / sum(p.numel() for p in every)
    state = accelerator.get_state_dict(model)
    found = adapters(model, state) if state else {}
    if rank == 0:
        unwrapped: Any = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(folder, state_dict=state, safe_serialization=True)
    return means, kinds, mine, found


def test_a_base_of_4_bits_is_sharded_with_its_adapters(
    tmp_path: Path, ranks: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen bytes and trained floats in one part; the adapters are saved whole, by peft's own names."""
    monkeypatch.chdir(tmp_path)
    if is_torch("<2.12"):
        with pytest.raises(RanksError, match=r"FSDP2 of torch .* cannot shard .*weight") as caught:
            ranks(2, sharded, torch.uint8, "no", str(tmp_path / "adapter"), timeout=120)
        assert caught.value.causing_kinds() == {"PrepareError"}
        return
    ((losses, expected),) = ranks(1, alone)
    first, second = ranks(2, sharded, torch.uint8, "no", str(tmp_path / "adapter"), timeout=120)
    assert first[:2] == second[:2]
    torch.testing.assert_close(first[0], losses, rtol=0, atol=1e-5)
    assert first[1] == {("torch.uint8", False), ("torch.float32", False), ("torch.float32", True)}
    assert first[2] == pytest.approx(0.5, abs=0.01)
    torch.testing.assert_close(first[3], expected, rtol=0, atol=1e-5)
    assert second[3] == {}
    saved = library("safetensors.torch").load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    torch.testing.assert_close(saved, expected, rtol=0, atol=1e-5)


def test_a_storage_that_a_cast_would_spoil_is_refused(ranks: RankServer, tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, sharded, torch.float16, "bf16", str(tmp_path), timeout=120)
    assert caught.value.causing_kinds() == {"PrepareError"}
    assert "is stored as torch.float16, and computed in torch.bfloat16" in str(caught.value)


def prepare_in_8_bits() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    linear = library("bitsandbytes").nn.Linear8bitLt(32, 32, has_fp16_weights=False)
    model = nn.Sequential(linear.to("cpu").requires_grad_(False), nn.Linear(32, 8))
    Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).prepare(model)


def test_weights_in_8_bits_are_refused(ranks: RankServer) -> None:
    """A shard has no scales; the first forward of the layer would stop at an attribute that is gone."""
    with pytest.raises(RanksError) as caught:
        ranks(2, prepare_in_8_bits, timeout=120)
    assert caught.value.causing_kinds() == {"PrepareError"}
    assert "FSDP2 cannot shard 0.weight, a weight in 8 bits" in str(caught.value)
