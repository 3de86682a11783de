"""Stages of layers on gloo processes train to the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate.core.errors import PrepareError
from tests.support import parity
from tests.support.parity import Numbers
from tests.support.ranks import RankServer


def made(window: int = 1, sizes: dict[str, int] | None = None, **options: Any) -> Any:
    """An ``Accelerator`` with stages."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.strategy.parallel.pipeline_options import PipelineParallelConfig

    config = ParallelismConfig(**(sizes or {"pp_size": 2}), pp_handler=PipelineParallelConfig(**options))
    return Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=window)


def trained(window: int, sizes: dict[str, int], options: dict[str, Any]) -> tuple[Numbers, list[str], int]:
    accelerator = made(window, sizes, **options)
    model = parity.decoder()
    optimizer = parity.adamw(model)
    rows = parity.ROWS // accelerator.strategy.share.count
    model, optimizer, loader = accelerator.prepare(model, optimizer, parity.loader(rows))
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = parity.loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    held = [name for name, _ in model.named_parameters()]
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return (losses, norms, state), held, count


@pytest.mark.parametrize("window", [1, 4])
def test_two_stages_train_like_one_process(ranks: RankServer, window: int) -> None:
    (plain,) = ranks(1, parity.plain, window)
    found = ranks(2, trained, window, {"pp_size": 2}, {"num_microbatches": 4})
    for (losses, norms, _), _, _ in found:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain[0]), rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(plain[1]), rtol=0, atol=1e-5)

    parity.close(found[0][0], plain, 1e-5)


def test_stages_of_sharded_copies_train_like_one_process(ranks: RankServer) -> None:
    """Two stages, each on two processes that see different data."""
    (plain,) = ranks(1, parity.plain, 1)
    sizes = {"pp_size": 2, "dp_shard_size": 2}
    found = ranks(4, trained, 1, sizes, {"num_microbatches": 2}, timeout=120)
    parity.close(found[0][0], plain, 1e-5)


def several(options: dict[str, Any]) -> None:
    """Forms of losses, modes and calls, against a plain model."""
    accelerator = made(**options)
    plain = parity.decoder()
    model = accelerator.prepare(parity.decoder())
    batch = next(iter(parity.loader(6)))
    loss, other = parity.loss_of(model, batch), parity.loss_of(plain, batch)
    torch.testing.assert_close(loss, other)
    second = parity.loss_of(model, {name: value[:3] for name, value in batch.items()})
    accelerator.backward(loss * 2 + second**2 / 3, retain_graph=True)
    (other * 2 + parity.loss_of(plain, {n: v[:3] for n, v in batch.items()}) ** 2 / 3).backward()
    same_gradients(model, plain)
    with pytest.raises(PrepareError, match="second backward"):
        loss.backward()
    model.eval()
    with torch.no_grad():
        logits = model(batch["input_ids"])
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, plain.eval()(batch["input_ids"]))
    with torch.inference_mode():
        torch.testing.assert_close(model(batch["input_ids"][:1]), plain(batch["input_ids"][:1]))


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """This stage's gradients are those of the plain model."""
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, expected[name].grad
        assert (grad is None) == (other is None), name
        if grad is not None:
            torch.testing.assert_close(whole(grad), other, msg=lambda text, n=name: f"{n}: {text}")


def whole(value: Any) -> torch.Tensor:
    """A sharded tensor as one process would have it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_any_loss_and_several_calls(ranks: RankServer) -> None:
    """A batch that does not divide, a loss of two forwards, evaluation, another length."""
    ranks(2, several, {"num_microbatches": 4})


def steps(accelerator: Any, model: Any, optimizer: Any, begin: int, count: int) -> list[float]:
    """Losses of some training steps over the whole batch of each."""
    losses = []
    for batch in list(parity.loader())[begin : begin + count]:
        loss = parity.loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parts(accelerator: Any) -> tuple[Any, Any]:
    """Model and optimizer of two groups, prepared."""
    model = parity.decoder(seed=1)
    groups = [{"params": list(model.layers.parameters())}, {"params": [*model.norm.parameters()]}]
    groups.append({"params": [model.embed.weight], "lr": 0.01})
    return accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.005, eps=1e-4))


def sharded() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())


def checkpoints(folder: str) -> list[float]:
    """Saved in stages: in parts, whole, and from shards; loaded in stages."""
    accelerator = made(num_microbatches=2)
    model, optimizer = parts(accelerator)
    steps(accelerator, model, optimizer, 0, 3)
    accelerator.save_state(f"{folder}/parts")
    accelerator.save_state(f"{folder}/whole", sharded=False)
    accelerator.save_model(model, f"{folder}/weights")
    after = steps(accelerator, model, optimizer, 3, 3)
    for name in ("parts", "whole"):
        again = made(num_microbatches=4)
        model, optimizer = parts(again)
        steps(again, model, optimizer, 6, 1)
        again.load_state(f"{folder}/{name}")
        assert steps(again, model, optimizer, 3, 3) == pytest.approx(after, abs=1e-5), name
    other = sharded()
    model, optimizer = parts(other)
    other.load_state(f"{folder}/parts")
    other.save_state(f"{folder}/shards")
    assert steps(other, model, optimizer, 3, 3) == pytest.approx(after, abs=1e-5)
    again = made(num_microbatches=4)
    model, optimizer = parts(again)
    again.load_state(f"{folder}/shards")
    assert steps(again, model, optimizer, 3, 3) == pytest.approx(after, abs=1e-5)
    return after


def loads(folder: str, name: str) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = parts(accelerator)
    accelerator.load_state(f"{folder}/{name}")
    return steps(accelerator, model, optimizer, 3, 3)


def test_checkpoints_load_in_any_layout(ranks: RankServer, tmp_path: Path) -> None:
    """D6: saved in stages, in parts and whole, loaded in stages, shards and one process; tied weights."""
    after, _ = ranks(2, checkpoints, str(tmp_path), timeout=120)
    for name in ("parts", "whole"):
        assert ranks(1, loads, str(tmp_path), name)[0] == pytest.approx(after, abs=1e-5), name
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    plain = parity.decoder()
    missing, surplus = plain.load_state_dict(weights, strict=False)
    assert (set(missing) <= {"head.weight", "embed.weight"}, surplus) == (True, [])


def gpt() -> Any:
    """A small GPT-2 of transformers: tied embeddings, the loss inside, one block frozen."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config)
    model.transformer.h[2].requires_grad_(False)
    return model


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def words(rows: int = 8) -> dict[str, torch.Tensor]:
    found = torch.stack([sample["input_ids"] for sample in parity.samples()[:rows]])
    mask = torch.ones_like(found)
    mask[0, -2:] = 0
    return {"input_ids": found, "labels": found.clone(), "attention_mask": mask}


def labelled(make: Any, options: dict[str, Any]) -> list[float]:
    """Trained with the loss inside of the model, in windows of two, against the plain loop."""
    accelerator = made(window=2, **options)
    plain = make()
    model = make()
    optimizer, other = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.optim.AdamW(plain.parameters(), lr=0.01),
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, type(plain))
    losses, expected = [], []
    for step in range(6):
        batch = words(8)
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(outputs.loss.item())
        loss = plain(**batch, use_cache=False).loss
        (loss / 2).backward()
        expected.append(loss.item())
        if step % 2:
            other.step()
            other.zero_grad()
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]
    model.eval(), plain.eval()
    with torch.no_grad():
        ours, theirs = model(**words(6)), plain(**words(6), use_cache=False)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-5, rtol=0)
    return losses


@pytest.mark.parametrize("make", [gpt, llama])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_transformers_train_with_their_own_loss(ranks: RankServer, make: Any, schedule: str) -> None:
    ranks(2, labelled, make, {"num_microbatches": 4, "schedule": schedule})
