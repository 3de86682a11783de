"""join_uneven_inputs: ranks with different numbers of batches train together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from accelerate.core.errors import PrepareError, SettingError
from tests.support.ranks import RankServer, same_on_all


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(1.0, 8.0)[:, None])


def loader_of(kind: str) -> DataLoader[Any]:
    data: Any = Stream() if kind == "stream" else TensorDataset(torch.arange(1.0, 8.0)[:, None])
    return DataLoader(data, batch_size=1)


def uneven(kind: str, dispatch: bool) -> list[Any]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(kind))
    steps, gradients = 0, []
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            (x,) = batch if kind == "map" else (batch,)
            optimizer.zero_grad()
            accelerator.backward(model(x).sum())
            gradients.append(model.weight.grad.item())
            optimizer.step()
            steps += 1
    after = sum(1 for _ in loader)
    accelerator.wait_for_everyone()
    return [steps, gradients, round(model.weight.item(), 6), after]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_uneven_inputs_train_to_the_end(ranks: RankServer, kind: str, dispatch: bool) -> None:
    """Seven samples on two ranks: the gradient is the sum over both, halved, also in the last step."""
    first, second = ranks(2, uneven, kind, dispatch)
    assert (first[0], second[0]) == (4, 3)
    assert first[1] == [1.5, 3.5, 5.5, 3.5]
    assert second[1] == first[1][:3]
    assert first[2] == pytest.approx(1 - 0.01 * 14)
    assert (first[3], second[3]) == (4, 4), "the option is as before again"


class ShuffledStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(5)[:, None] + 1.0)


class DynamicBatches:
    """Batches of any size, with no ``batch_size``; the order is drawn from the program's generator."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        for index in torch.randperm(5).tolist():
            yield [index]


def unjoined(kind: str) -> list[Any]:
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    accelerator = Accelerator()
    accelerator.even_batches = False
    accelerator.dataloader_config.dispatch_batches = False
    torch.manual_seed(accelerator.process_index)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.arange(1.0, 6.0)[:, None])
    options: dict[str, Any] = {
        "batches": {"batch_sampler": DynamicBatches()},
        "shuffle": {"shuffle": True},
        "generator": {"batch_sampler": BatchSampler(RandomSampler(data, generator=generator), 1, False)},
        "stream": {},
    }[kind]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source: Any = DataLoader(ShuffledStream() if kind == "stream" else data, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader: Any = accelerator.prepare(source)
    left_early = list(islice(loader, 2))
    assert len(left_early) == 2, "all that rank 1 has, and not all of rank 0"
    epochs: list[list[float]] = []
    while sum(map(len, epochs)) < 6:
        epochs.append([])
        for batch in loader:
            x = batch if kind == "stream" else batch[0]
            epochs[-1].append(x.item())
            optimizer.zero_grad()
            accelerator.backward(model(x).pow(2).sum())
            optimizer.step()
            if sum(map(len, epochs)) == 6:
                break
    weight = accelerator.unwrap_model(model).weight.item()
    loader.load_state_dict(gather_object([loader.state_dict()])[0])
    return [epochs, weight, [x.item() for batch in loader for x in batch]]


@pytest.mark.parametrize("kind", ["batches", "shuffle", "generator", "stream"])
def test_ranks_with_more_batches_train_into_the_next_epoch(ranks: RankServer, kind: str) -> None:
    """Five samples on two ranks, six steps each: rank 0 ends its second epoch, and rank 1 its third."""
    (first, weight, rest), (second, same_weight, other_rest) = ranks(2, unjoined, kind)
    assert ([len(epoch) for epoch in first], [len(epoch) for epoch in second]) == ([3, 3], [2, 2, 2])
    for epoch in (0, 1):
        assert sorted(first[epoch] + second[epoch]) == [1, 2, 3, 4, 5], "one order, shared out"
    assert sorted(rest + other_rest) == [1, 2, 3, 4, 5], "the epoch after that of rank 0's state"
    assert (len(rest), set(rest) & set(second[2])) == (3, set()), "the one that rank 1 has come to"
    expected = 1.0
    for one, other in zip(chain(*first), chain(*second), strict=True):
        expected -= 0.01 * expected * (one**2 + other**2)
    assert weight == same_weight == pytest.approx(expected, abs=1e-6)


def refused() -> list[str]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    found: list[str] = []
    for given in ([], [nn.Linear(1, 1)], ["a"]):
        with pytest.raises(PrepareError) as error:
            accelerator.join_uneven_inputs(given).__enter__()
        found.append(error.value.what)
    return found


def test_what_cannot_join_is_refused(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, refused)) == [
        "join_uneven_inputs was given no model",
        "a Linear cannot join processes that have more inputs",
        "a str cannot join processes that have more inputs",
    ]


def sharded() -> list[Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    lengths: list[Any] = []
    for strict in (False, True):
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), strict=strict)
        model, loader = accelerator.prepare(nn.Linear(1, 1), loader_of("map"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with accelerator.join_uneven_inputs([model], even_batches=False):
                    lengths.append(sum(model(x).numel() for (x,) in loader))
            except SettingError as error:
                lengths.append(error.what)
        lengths.append(
            [str(each.message).partition(":")[0] for each in caught if "join_" in str(each.message)]
        )
    return lengths


def test_it_has_no_effect_beside_ddp(ranks: RankServer) -> None:
    """As in 1.x: the loader keeps its fillers, and process 0 warns; a strict run is refused."""
    text = "join_uneven_inputs has no effect under the strategy 'fsdp'"
    assert ranks(2, sharded) == [[4, [text], text, []], [4, [], text, []]]


def alone() -> int:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, loader = accelerator.prepare(nn.Linear(1, 1), loader_of("map"))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        return sum(1 for _ in loader)


def test_one_process_needs_nothing_for_it(ranks: RankServer) -> None:
    assert ranks(1, alone) == [7]
