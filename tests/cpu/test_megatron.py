"""Training by megatron-core on processes, with the patches of tests/support/megatron.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.ranks import RankServer

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers")

ROWS, LENGTH, WORDS = 4, 12, 67
State = dict[str, torch.Tensor]
# Numbers of a run: losses, norms before clipping, learning rates, the weights at its end.
Run = tuple[list[float], list[float], list[float], State]


def gpt2() -> Any:
    """Tied embeddings, a vocabulary that does not divide, a frozen layer norm."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.transformer.h[0].ln_2.requires_grad_(False)
    return model


def llama() -> Any:
    """Groups of queries that share a key, gated layers, an output layer of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as transformers' scripts make them."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    small = [p for name, p in trained if p.dim() < 2]
    large = [p for name, p in trained if p.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}],
        lr=1e-2,
        eps=1e-3,  # gradients that are zero but for rounding stay without effect
    )


def samples(batches: int) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens, some with padding at their end."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(2, WORDS, (batches * ROWS, LENGTH), generator=chance)
    rows = []
    for number, row in enumerate(ids):
        length = LENGTH - 3 * (number % 2)
        mask = (torch.arange(LENGTH) < length).long()
        rows.append({"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(mask == 0, -100)})
    return rows


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def plainly(kind: str, steps: int, window: int) -> Run:
    """What the user would write for one process."""
    model = MODELS[kind]()
    optimizer = optimizer_of(model)
    scheduler = schedule(optimizer)
    losses, norms, rates = [], [], []
    batches = iter(DataLoader(samples(steps * window), batch_size=ROWS))  # type: ignore[arg-type]
    for _ in range(steps):
        whole = [next(batches) for _ in range(window)]
        tokens = [(batch["labels"][:, 1:] != -100).sum() for batch in whole]
        for batch, count in zip(whole, tokens, strict=True):
            loss = model(**batch).loss
            losses.append(loss.item())
            (loss * count / sum(tokens)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, rates, {name: value.detach().clone() for name, value in model.state_dict().items()}


def accelerator_of(window: int = 1, precision: str = "no", **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, MegatronLMPlugin
    from tests.support.megatron import on_cpu

    on_cpu()
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        megatron_lm_plugin=MegatronLMPlugin(**options),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window, step_scheduler_once=True),
    )


def prepared(accelerator: Any, kind: str, batches: int) -> tuple[Any, Any, Any, Any]:
    model = MODELS[kind]()
    if accelerator.process_index:  # the weights of process 0 count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    optimizer = optimizer_of(model)
    scheduler = schedule(optimizer)
    loader = DataLoader(samples(batches), batch_size=ROWS // accelerator.strategy.share.count)  # type: ignore[arg-type]
    return accelerator.prepare(model, optimizer, loader, scheduler)


def trained(kind: str, steps: int, window: int, precision: str = "no", **options: Any) -> Run:
    """The same loop with the few lines changed."""
    accelerator = accelerator_of(window, precision, **options)
    model, optimizer, loader, scheduler = prepared(accelerator, kind, steps * window)
    return looped(accelerator, model, optimizer, loader, scheduler)


def looped(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Run:
    losses, norms, rates = [], [], []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(over_copies(accelerator, batch, loss))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms, rates, accelerator.get_state_dict(model)


def over_copies(accelerator: Any, batch: Mapping[str, torch.Tensor], loss: torch.Tensor) -> float:
    """The mean over the tokens of all copies of the model."""
    count = (batch["labels"][:, 1:] != -100).sum()
    both = accelerator.reduce(torch.stack([loss.detach() * count, count.float()]), "sum")
    return (both[0] / both[1]).item()


def check(ours: Run, plain: Run, near: float = 1e-5) -> None:
    assert ours[0] == pytest.approx(plain[0], abs=near)
    assert ours[1] == pytest.approx(plain[1], abs=near)
    assert ours[2] == pytest.approx(plain[2])
    assert ours[3].keys() == plain[3].keys()
    for name, value in plain[3].items():
        torch.testing.assert_close(
            ours[3][name], value, rtol=0, atol=10 * near, msg=lambda m, n=name: f"{n}: {m}"
        )


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp_degree": 2, "num_micro_batches": 2},
    "dp": {},
    "pp": {"pp_degree": 2, "num_micro_batches": 2},
    "sharded": {"use_distributed_optimizer": True},
}


def in_all_layouts() -> dict[tuple[str, str], tuple[Run, float]]:
    """One program after another, in processes that have imported the engine once."""
    from megatron.core import parallel_state

    found = {}
    for name, options in LAYOUTS.items():
        for kind in MODELS:
            started = time.monotonic()
            found[kind, name] = trained(kind, 3, 2, **options), time.monotonic() - started
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def runs(ranks: RankServer) -> list[dict[tuple[str, str], tuple[Run, float]]]:
    return ranks(2, in_all_layouts, timeout=240)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_as_the_users_own_model_does(runs: Any, kind: str, layout: str) -> None:
    """B1, B7: losses, norms, rates and weights, with accumulation and micro-batches of unequal tokens."""
    ours, theirs = (run[kind, layout][0] for run in runs)
    print(runs[0][kind, layout][1])
    assert ours[:3] == theirs[:3]
    assert not theirs[3], "states are whole on process 0 only"
    check(ours, plainly(kind, 3, 2))
