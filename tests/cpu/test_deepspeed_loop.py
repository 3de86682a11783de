"""ZeRO by the DeepSpeed engine: losses weighted by items, and layers of experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.core.packages import installed
from tests.cpu.test_deepspeed import ASKED, engine
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, share, tiny

pytestmark = [
    pytest.mark.skipif(not installed("deepspeed"), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]
# Words that each process learns from in each micro-batch, of 4 x 4: one has none, so its mean is NaN.
COUNTS = ((16, 3), (5, 0), (7, 16), (1, 2), (0, 9))
CLIP = 0.3


def masked(words: torch.Tensor, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, labels) of one process; labels beyond its count say nothing."""
    mine = share(words, rank, 2)
    labels = mine[:, 1:].clone().flatten()
    labels[COUNTS[step][rank] :] = -100
    return mine, labels


def mean_of(model: nn.Module, words: torch.Tensor, labels: torch.Tensor, how: str = "mean") -> torch.Tensor:
    logits = model(words[:, :-1]).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, labels, reduction=how)


def reference(rows: list[torch.Tensor]) -> tuple[nn.Module, list[float]]:
    """One process: the mean over all words of a window of three, and of the short one after it."""
    model = tiny()
    optimizer = adamw(model)
    norms = []
    for window in (range(3), range(3, 5)):
        for step in window:
            for rank in range(2):
                mean_of(model, *masked(rows[step], rank, step), how="sum").backward()
        items = sum(sum(COUNTS[step]) for step in window)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= items
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def weighted(kind: str, precision: str) -> None:
    """A window of three micro-batches, and a short one."""
    rows = list(batches(5))
    plain, norms = reference(rows)
    within = 1e-5 if precision == "no" else 2e-2
    accelerator, model, optimizer = engine(ASKED[kind], mixed_precision=precision)
    mine = [masked(words, accelerator.process_index, step) for step, words in enumerate(rows)]
    found = []
    for window in accelerator.windows(mine, 3):
        for words, labels in window:
            accelerator.backward(mean_of(model, words, labels), num_items=(labels != -100).sum())
        found.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx(norms, rel=within, abs=within)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name].float(), value, rtol=0, atol=within, msg=name)


def items() -> list[str]:
    from accelerate.core.errors import PrepareError

    every = [(kind, "no") for kind in ("0", "1", "2", "3", "2 offload")] + [(k, "bf16") for k in "0123"]
    for kind, precision in every:
        weighted(kind, precision)
    accelerator, model, optimizer = engine(ASKED["2"], window=2)
    words, labels = masked(next(batches(1)), accelerator.process_index, 0)
    with accelerator.accumulate(model):
        accelerator.backward(mean_of(model, words, labels), num_items=3)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(PrepareError, match="with num_items and without it"):
        accelerator.backward(mean_of(model, words, labels))
    with pytest.raises(PrepareError, match="was not computed by the model"):
        accelerator.backward(torch.zeros((), requires_grad=True), num_items=0)
    return [" ".join(each) for each in every]


def test_losses_are_weighted_by_items(ranks: RankServer) -> None:
    """The mean over all words of a window on all processes, in every stage; no items add nothing."""
    assert len(same_on_all(ranks(2, items, timeout=200))) == 9
