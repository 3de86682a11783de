"""Law 7: same loss. Every strategy trains to the numbers of the plain single-process loop.

On one process bit by bit; on several within 1e-6 of one process that takes their batches as one, because a
mean of means rounds otherwise than a mean. The data are walked in order, so that step k sees the same samples
in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.long_run import long_run_param
from tests.support.packages import is_installed
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.strategies import strategy_names

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")

GLOBAL_BATCH, STEPS, EPOCHS = 8, 6, 3
# How a user asks for a strategy: (variables, with {n} for the number of processes; world sizes it is for).
# A new one must be added here.
ASKED: dict[str, tuple[dict[str, str], tuple[int, ...]]] = {
    "single": ({}, (1,)),
    "ddp": ({}, (2, 4)),
    "fsdp": ({"ACCELERATE_USE_FSDP": "true"}, (2, 4)),
    "fsdp1": ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, (2, 4)),
    "deepspeed": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        (2,),  # its import costs seconds in every rank
    ),
    "deepspeed_mesh": (
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "{n}",
        },
        (2,),
    ),
    "xla": ({}, ()),  # tests/xla, on PyTorch/XLA; several processes in tests/cpu/test_xla_strategy.py
    "xla_spmd": ({}, ()),
    "megatron": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, (2, 4)),
    "parallelism": (
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "{n}"},
        (2, 4),
    ),
}
# Makes the kwargs handler of a strategy that is asked for by one; ASKED has its numbers of processes.
HANDLERS: dict[str, Callable[[], Any]] = {}
# Packages that a strategy cannot do without.
NEEDS = {"deepspeed": "deepspeed", "deepspeed_mesh": "deepspeed"}
# What trains models of one kind only, and refuses the law's small one in words: where it is held to this law.
ELSEWHERE = {"megatron": "tests/cpu/test_megatron.py, by language models of transformers"}
Numbers = tuple[list[float], list[list[float]]]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A small model with a frozen layer and a tied weight, its optimizer, and data of six global batches."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 8)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), inner, nn.Tanh(), inner, frozen, nn.Linear(8, 1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    x = torch.randn(STEPS * GLOBAL_BATCH, 4)
    return model, optimizer, TensorDataset(x, x.sin().sum(1, keepdim=True))


def numbers(losses: list[float], state: dict[str, torch.Tensor]) -> Numbers:
    """With the parameters of a whole state, in the model's order."""
    return losses, [state[name].flatten().tolist() for name, _ in parts()[0].named_parameters()]


def raw_loop(precision: str, window: int) -> Numbers:
    """The plain loop: what the user would write without this package."""
    model, optimizer, data = parts()
    losses = []
    loader = DataLoader(data, batch_size=GLOBAL_BATCH)
    for step, (x, y) in enumerate(chain.from_iterable(loader for _ in range(EPOCHS)), 1):
        context = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
        with context:
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        (loss / window).backward()
        losses.append(loss.item())
        if step % window == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return numbers(losses, model.state_dict())


def prepared_loop(precision: str, window: int, asked: str = "") -> tuple[Numbers, str]:
    """The same loop with the few lines changed; the batch is split over the ranks."""
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=window,
        kwargs_handlers=[HANDLERS[asked]()] if asked in HANDLERS else None,
    )
    model, optimizer, data = parts()
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in chain.from_iterable(loader for _ in range(EPOCHS)):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    # A state that is gathered is whole on the main process.
    (state,) = broadcast_object_list([accelerator.get_state_dict(model)])
    return numbers(losses, state), accelerator.strategy.name


def close(one: Numbers, two: Numbers) -> None:
    """Losses and weights are equal within 1e-6."""
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(two[0]), rtol=0, atol=1e-6)
    for a, b in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-6)


def test_every_strategy_is_under_this_law() -> None:
    missing = set(strategy_names()) - ASKED.keys()
    assert not missing, f"say in ASKED how to ask for {sorted(missing)}"


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_process_trains_like_the_plain_loop(ranks: RankServer, precision: str, window: int) -> None:
    (plain,) = ranks(1, raw_loop, precision, window)
    (ours,) = ranks(1, prepared_loop, precision, window)
    assert ours == (plain, "single")
    epochs = torch.tensor(plain[0]).view(EPOCHS, STEPS).mean(1)
    assert epochs[-1] < 0.9 * epochs[0], "the loop learns nothing, so equality would say nothing"


@pytest.mark.parametrize(("n", "window"), [(2, 1), (4, 3), long_run_param(2, 3), long_run_param(4, 1)])
@pytest.mark.parametrize("strategy", [name for name in ASKED if name != "single"])
def test_several_processes_train_like_one(ranks: RankServer, strategy: str, n: int, window: int) -> None:
    texts, sizes = ASKED[strategy]
    variables = {name: text.format(n=n) for name, text in texts.items()}
    if strategy not in strategy_names() or n not in sizes:
        pytest.skip(f"{strategy} is not for {n} processes here")
    if not is_installed(NEEDS.get(strategy, "torch")):
        pytest.skip(f"the package {NEEDS[strategy]} is not installed")
    if strategy in ELSEWHERE:
        refuses_the_model(ranks, strategy, variables)
        return
    (plain,) = ranks(1, raw_loop, "no", window)
    ours, chosen = same_on_all(ranks(n, prepared_loop, "no", window, strategy, env=variables))
    assert chosen == strategy
    close(ours, plain)


def refuses_the_model(ranks: RankServer, strategy: str, variables: dict[str, str]) -> None:
    """Nothing else trains instead: without its devices or its package, or with them, by the kind of model."""
    assert (Path(__file__).parents[2] / ELSEWHERE[strategy].partition(",")[0]).exists()
    with pytest.raises(RanksError) as caught:
        ranks(2, prepared_loop, "no", 1, env=variables)
    assert caught.value.causing_kinds() in ({"DeviceError"}, {"MissingExtraError"})


def test_a_second_run_gives_the_same_bits(ranks: RankServer) -> None:
    assert ranks(2, prepared_loop, "no", 2) == ranks(2, prepared_loop, "no", 2)
