"""Stages of layers on gloo processes train to the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
