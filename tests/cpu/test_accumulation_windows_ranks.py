"""The window loop on several processes: when gradients travel, and what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.core.errors import PrepareError
from tests.support.ranks import RankServer, same_on_all
from tests.support.torch_versions import is_torch


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


def cut_into_micro_batches(kind: str) -> list[list[bool]]:
    """For each batch of two epochs, which of its micro-batches close a window."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=4, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    model = accelerator.prepare(nn.Linear(1, 1))
    data: Any = range(40) if kind == "map" else Stream(40)
    loader = accelerator.prepare(DataLoader(data, batch_size=16))
    flags: list[list[bool]] = []
    for _ in range(2):
        for batch in loader:
            flags.append([])
            for part in batch.split(4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(part.float().view(-1, 1)).sum())
                    flags[-1].append(accelerator.sync_gradients)
    return flags


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_shorter_last_batch_that_is_cut_closes_its_window(ranks: RankServer, kind: str) -> None:
    """The last step, of 8 samples, is divided equally: 4 for each rank, which are one micro-batch."""
    flags = same_on_all(ranks(2, cut_into_micro_batches, kind))
    assert flags == [[False, False, False, True], [True]] * 2


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


# ---------------------------------------------------------------- saved in the middle of a window

KINDS = ("ddp", "fsdp", "fsdp1")


def weighted(kind: str, folder: str, begin: int = 0, load: str = "", again: str = "") -> list[list[float]]:
    """Weights after each step of six micro-batches in windows of three, whose ranks have other items.

    ``again`` is a checkpoint after the third that is loaded when the first micro-batch here is done.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import broadcast_object_list

    version = {"fsdp": 2, "fsdp1": 1}.get(kind)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version) if version else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, fsdp_plugin=plugin)
    torch.manual_seed(begin)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if load:
        accelerator.load_state(load)
    weights, rank, size = [], accelerator.process_index, accelerator.num_processes
    for number in range(begin, 6):
        if again and number == begin + 1:
            accelerator.load_state(again)
        if again and begin < number < 3:
            continue
        # Of two shares of 1 and 2 rows each rank takes its own, a single process both.
        shares = [torch.arange(2.0 * (share + 1)).view(-1, 2) + number for share in range(2)]
        rows = torch.cat(shares) if size == 1 else shares[(rank + number) % 2]
        with accelerator.accumulate(model):
            accelerator.backward(model(rows / 5).square().mean(), num_items=len(rows))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            state = accelerator.get_state_dict(model) if kind == "fsdp1" else dict(model.named_parameters())
            (state,) = broadcast_object_list([state]) if kind == "fsdp1" else (state,)
            weights.append([x for p in state.values() for x in full(p).flatten().tolist()])
        if folder:
            accelerator.save_state(f"{folder}/{kind}-{number + 1}")
    return weights


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def saved_in_windows(folder: str) -> list[Any]:
    return [weighted(kind, folder) for kind in KINDS]


def resumed_in_windows(folder: str) -> list[Any]:
    """Of each kind under each kind, after one, two and five micro-batches."""
    pairs = [(one, other) for one in KINDS for other in KINDS]
    return [
        (one, other, begin, weighted(other, "", begin, f"{folder}/{one}-{begin}"))
        for one, other in pairs
        for begin in (1, 2, 5)
    ]


def test_an_open_window_of_weighted_losses_goes_on(ranks: RankServer, tmp_path: Path) -> None:
    """G2: on the same ranks to the bit, under another strategy or on one process to rounding.

    FSDP1 reduces them, and FSDP2 of torch 2.15 takes no unsharded gradients before its first forward: each
    rank gets the mean of all.
    """
    whole = dict(zip(KINDS, same_on_all(ranks(2, saved_in_windows, str(tmp_path))), strict=True))
    for one, other, begin, weights in same_on_all(ranks(2, resumed_in_windows, str(tmp_path))):
        expected = whole[one][begin // 3 :]
        if one == other and not (one == "fsdp1" or (one == "fsdp" and is_torch(">=2.15"))):
            assert weights == expected, (one, begin)
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    (alone,) = ranks(1, resumed_in_windows, str(tmp_path))
    for one, _, begin, weights in alone:
        torch.testing.assert_close(
            torch.tensor(weights), torch.tensor(whole[one][begin // 3 :]), rtol=1e-5, atol=1e-6
        )


def interrupted_twice(folder: str) -> list[Any]:
    """Of each kind: saved after one micro-batch of a window and after two, or left for another checkpoint."""
    results = []
    for kind in KINDS:
        expected = weighted(kind, f"{folder}/whole")
        weighted(kind, f"{folder}/second", 1, f"{folder}/whole/{kind}-1")
        resumed = weighted(kind, "", 2, f"{folder}/second/{kind}-2")
        dropped = weighted(kind, "", 1, f"{folder}/whole/{kind}-1", again=f"{folder}/whole/{kind}-3")
        results.append((kind, expected, resumed, dropped))
    return results


def test_a_window_that_is_interrupted_twice_goes_on(ranks: RankServer, tmp_path: Path) -> None:
    """torch's FSDP1 puts the gradients of a resumed window aside: a second checkpoint lacked them."""
    for kind, expected, resumed, dropped in same_on_all(ranks(2, interrupted_twice, str(tmp_path))):
        close = pytest.approx(expected[0], rel=1e-5, abs=1e-6), pytest.approx(expected[1], rel=1e-5, abs=1e-6)
        assert resumed == list(close), kind
        assert dropped == [close[1]], kind
