"""The window loop on several processes: when gradients travel, and what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.core.errors import PrepareError
from tests.support.ranks import RankServer, same_on_all


class Stream(IterableDataset[torch.Tensor]):
    """Numbers from 0; it has no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(torch.arange(float(self.count)))


def walked(kind: str, count: int, n: int, models: str) -> list[tuple[int, str, float, bool]]:
    """Per window: micro-batches, flags, the gradient, and whether it travelled in the last of them only."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=2,  # not what the windows are
        dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatched"),
    )
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    data: Any = TensorDataset(torch.arange(float(count))) if kind == "map" else Stream(count)
    loader = accelerator.prepare(DataLoader(data, batch_size=1))
    found = []
    for window in accelerator.windows(loader, n, models=model if models == "given" else None):
        local, flags, quiet = 0.0, "", True
        for batch in window:
            x = (batch[0] if kind == "map" else batch).view(-1, 1)
            before = 0.0 if model.weight.grad is None else float(model.weight.grad)
            accelerator.backward(model(x).sum())
            local = float(model.weight.grad) - before
            if not accelerator.sync_gradients:
                quiet &= abs(local - float(x) / n) < 1e-6
            flags += "T" if accelerator.sync_gradients else "F"
        found.append((window.count, flags, round(float(model.weight.grad), 5), quiet))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("models", ["all", "given"])
@pytest.mark.parametrize("kind", ["map", "stream", "dispatched"])
def test_gradients_travel_once_per_window_and_are_its_mean(ranks: RankServer, kind: str, models: str) -> None:
    """B2: 5 micro-batches per rank in windows of 4: the last step's gradient is the whole mean."""
    found = [row for rows in ranks(2, walked, kind, 10, 4, models) for row in rows]
    assert found == [(4, "FFFT", 3.5, True), (1, "T", 8.5, True)] * 2
    found = same_on_all(ranks(2, walked, kind, 14, 4, models))
    assert found == [(4, "FFFT", 3.5, True), (3, "FFT", pytest.approx(10.5), True)]


def left() -> list[str]:
    """What every rank is told when a window was left, and that training goes on after it."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1))
    said = []
    for window in accelerator.windows(loader, 4):
        for batch in window:
            accelerator.backward(model(batch[0].view(-1, 1)).sum())
            if window.count == 2:
                break
        break
    with pytest.raises(PrepareError) as error:
        optimizer.step()
    said.append(error.value.what)
    optimizer.zero_grad()
    for window in accelerator.windows(loader, 2):
        for batch in window:
            accelerator.backward(model(batch[0].view(-1, 1)).sum())
        said.append(f"{float(model.weight.grad):.1f}")
        optimizer.zero_grad()
    return said


def test_a_left_window_is_refused_on_every_rank(ranks: RankServer) -> None:
    said = same_on_all(ranks(2, left))
    assert said == ["optimizer.step() after a window that was left in micro-batch 2 of 4", "1.5", "5.5"]


def interleaved() -> tuple[str, list[int], list[int], list[list[int]]]:
    """Two training loaders in step, an evaluation in the middle of every second window, broken or whole."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    numbers = [TensorDataset(torch.arange(start, start + 10)) for start in (0, 100)]
    one, two, evaluation = accelerator.prepare(
        *(DataLoader(data, batch_size=1) for data in numbers),
        DataLoader(TensorDataset(torch.arange(5)), batch_size=1),
    )
    flags, of_two, evaluated, first = "", [], [], []
    for step, ((a,), (b,)) in enumerate(zip(one, two, strict=True)):
        for x in (a, b):
            with accelerator.accumulate(model):
                accelerator.backward(model(x.view(1, 1).float()).sum())
                if step % 2:
                    seen: list[int] = []
                    for (y,) in evaluation:
                        seen += accelerator.gather_for_metrics(y).tolist()
                        if x is a:
                            break
                    evaluated.append(seen)
                flags += "T" if accelerator.sync_gradients else "F"
        first += accelerator.gather(a).tolist()
        of_two += accelerator.gather_for_metrics(b).tolist()
    return flags, first, of_two, evaluated


def test_interleaved_loops_keep_flags_and_samples(ranks: RankServer) -> None:
    """B4."""
    flags, first, second, evaluated = same_on_all(ranks(2, interleaved))
    assert flags == "FTFTFTFTFT"
    assert first == list(range(10))
    assert second == list(range(100, 110))
    assert evaluated == [[0, 1], [0, 1, 2, 3, 4]] * 2
