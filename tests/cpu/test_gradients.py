"""Gradients of several processes and micro-batches: those of one process with one big batch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accelerate.core.errors import PrepareError
from tests.support.ranks import RankServer, same_on_all

LENGTHS = [1, 6, 2, 5, 6, 1, 3, 4]
UNEVEN = [6, 1, 1, 5, 1, 2, 6, 6]  # no split of these is even
WORDS = 11
Batch = tuple[torch.Tensor, torch.Tensor]


def text(lengths: list[int]) -> list[Batch]:
    """One row (ids, labels) per length; labels beyond it are ignored ones."""
    rows = []
    for number, length in enumerate(lengths):
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(WORDS, (1, 6), generator=draw)
        labels = torch.randint(WORDS, (1, 6), generator=draw)
        labels[0, length:] = -100
        rows.append((ids, labels))
    return rows


def joined(rows: list[Batch]) -> Batch:
    return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])


class Reader(nn.Module):
    """Words to logits; ``frozen`` and ``spare`` are never trained and never used."""

    def __init__(self, dtype: torch.dtype = torch.float64, sparse: bool = False, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8, sparse=sparse, dtype=dtype)
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(8, WORDS, dtype=dtype)
        self.spare = nn.Linear(2, 2) if spare else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embed(ids)).tanh())


def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """The mean loss over the words that count, NaN without one, and their number."""
    ids, labels = batch
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss, int((labels != -100).sum())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to_dense().clone() for name, grad in found.items()}


def one_batch(rows: list[Batch], **options: Any) -> dict[str, torch.Tensor]:
    """The gradients of the plain loop with everything in one batch."""
    model = Reader(**options)
    if any((labels != -100).any() for _, labels in rows):
        loss_of(model, joined(rows))[0].backward()
    return gradients(model)


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The greatest difference relative to the greatest gradient."""
    assert found.keys() >= wanted.keys()
    size = max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / size


def share(rows: list[Batch], rank: int, size: int, window: int) -> list[Batch]:
    """The micro-batches of one rank: a window takes all rows."""
    mine = rows[rank::size]
    per = len(mine) // window
    return [joined(mine[i * per : (i + 1) * per]) for i in range(window)]


def weighted(windows: list[int], dtype: torch.dtype, by_windows: bool) -> list[tuple[int, float, float]]:
    """Per window size: the error of three steps with weights, and of one without them."""
    from accelerate import Accelerator

    found = []
    for window in windows:
        accelerator = Accelerator(gradient_accumulation_steps=1 if by_windows else window)
        model = Reader(dtype)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        size, rank = accelerator.num_processes, accelerator.process_index
        worst = plain = 0.0
        for step, lengths in enumerate((LENGTHS, [6, 0, 0, 1, 2, 0, 0, 5], LENGTHS[::-1], UNEVEN)):
            rows = text(lengths)
            parts = share(rows, rank, size, window)
            weights = step < 3
            steps = [parts] if by_windows else [[part] for part in parts]
            for group in accelerator.windows(parts, window) if by_windows else steps:
                for part in group:
                    with accelerator.accumulate(model) if not by_windows else accelerator.autocast():
                        loss, items = loss_of(model, part)
                        accelerator.backward(loss, **({"num_items": items} if weights else {}))
            difference = error(gradients(model), one_batch(rows, dtype=dtype))
            worst, plain = (max(worst, difference), plain) if weights else (worst, difference)
            optimizer.step()
            optimizer.zero_grad()
        found.append((window, worst, plain))
    return found


@pytest.mark.parametrize("by_windows", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_make_any_split_the_gradient_of_one_batch(
    ranks: RankServer, size: int, by_windows: bool
) -> None:
    """B1, and B9: the second step has processes and micro-batches without any word."""
    windows = [window for window in (1, 2, 4) if window * size <= len(LENGTHS)]
    found = same_on_all(ranks(size, weighted, windows, torch.float64, by_windows))
    assert max(worst for _, worst, _ in found) < 1e-12
    assert max(plain for *_, plain in found) > 1e-2, "the mean of means is another gradient"


def test_weights_are_exact_in_single_precision_too(ranks: RankServer) -> None:
    for _, worst, _ in same_on_all(ranks(2, weighted, [1, 2, 4], torch.float32, False)):
        assert worst < 1e-6


# Two steps are reduced as they are, then every matrix is compressed.
POWER = {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"ddp": {"find_unused_parameters": True}, "model": {"spare": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}},
    "static": {"ddp": {"static_graph": True}},
    "small buckets": {"ddp": {"bucket_cap_mb": 0.001}},
    "buckets of torch": {"ddp": {"bucket_cap_mb": None}},
    "sparse": {"model": {"sparse": True}},
    "each": {"plugin": {"sync_each_batch": True}},
    "bf16": {"mixed_precision": "bf16", "near": 0.03},
    "fp16": {"mixed_precision": "fp16", "near": 0.02},
    "fp16 hook": {"ddp": {"comm_hook": "fp16"}, "near": 0.01, "far": 5e-5},
    "bf16 hook": {"ddp": {"comm_hook": "bf16"}, "near": 0.03, "far": 5e-4},
    "power of full rank": {
        "ddp": {"comm_hook": "power_sgd", "comm_state_option": {**POWER, "matrix_approximation_rank": 8}},
        "near": 1e-5,
    },
    "power of rank 1": {
        "ddp": {"comm_hook": "power_sgd", "comm_state_option": {**POWER, "matrix_approximation_rank": 1}},
        "near": 1.0,
        "far": 1e-2,
    },
}


def set_up(setting: str, window: int) -> tuple[Any, Any, Any]:
    """An Accelerator of one of the settings, with its model and optimizer."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import GradientAccumulationPlugin

    given = SETTINGS[setting]
    accelerator = Accelerator(
        mixed_precision=given.get("mixed_precision"),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window, **given.get("plugin", {})),
        kwargs_handlers=[DistributedDataParallelKwargs(**given.get("ddp", {}))],
    )
    model = Reader(torch.float32, **given.get("model", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def in_setting(setting: str) -> list[tuple[float, float]]:
    """Per step: the error of the gradients, and of the norm that clipping sees."""
    accelerator, model, optimizer = set_up(setting, 2)
    found = []
    # Steps without a word on rank 1 in the last micro-batch, in which gradients are reduced, and in the
    # first, in which they are with sync_each_batch.
    for lengths in (LENGTHS, [1, 6, 2, 3, 6, 0, 3, 0], [1, 0, 2, 0, 6, 3, 3, 4], LENGTHS[::-1]):
        rows = text(lengths)
        for part in share(rows, accelerator.process_index, accelerator.num_processes, 2):
            with accelerator.accumulate(model):
                loss, items = loss_of(model, part)
                accelerator.backward(loss, num_items=torch.tensor(items))
        wanted = one_batch(rows, dtype=torch.float32)
        true_norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
        # Torch has no norm of sparse gradients.
        norm = true_norm if setting == "sparse" else accelerator.clip_grad_norm_(model.parameters(), math.inf)
        assert not accelerator.optimizer_step_was_skipped
        found.append((error(gradients(model), wanted), abs(float(norm / true_norm) - 1)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_go_with_every_way_of_reducing_and_computing(ranks: RankServer, setting: str) -> None:
    near, far = SETTINGS[setting].get("near", 2e-6), SETTINGS[setting].get("far", -1.0)
    numbers = same_on_all(ranks(2, in_setting, setting))
    for difference, norm in numbers:
        assert difference < near
        assert norm < near
    assert numbers[-1][0] > far, "what compresses rounds"


def corners() -> dict[str, Any]:
    """What is rare: no item at all, several backwards, other contexts, other kinds of numbers."""
    accelerator, model, optimizer = set_up("plain", 1)
    size, rank = accelerator.num_processes, accelerator.process_index
    found: dict[str, Any] = {}
    rows = text(LENGTHS)
    mine = share(rows, rank, size, 2)
    wanted = one_batch(rows, dtype=torch.float32)

    for part in share(text([0] * 8), rank, size, 1):  # the very first call of all
        loss, items = loss_of(model, part)
        assert math.isnan(loss)
        accelerator.backward(loss, num_items=items)
    found["nothing"] = all(bool((grad == 0).all()) for grad in gradients(model).values())
    found["nothing is a gradient"] = gradients(model).keys() == wanted.keys()
    optimizer.step()
    optimizer.zero_grad()

    for part in mine:  # two backwards that both reduce
        loss, items = loss_of(model, part)
        accelerator.backward(loss, num_items=float(items))
    found["twice"] = error(gradients(model), wanted) < 2e-6
    optimizer.zero_grad()

    with accelerator.no_sync(model):
        loss, items = loss_of(model, mine[0])
        accelerator.backward(loss, num_items=items)
    loss, items = loss_of(model, mine[1])
    accelerator.backward(loss, num_items=items)
    found["no_sync"] = error(gradients(model), wanted) < 2e-6
    model.zero_grad(set_to_none=False)  # not by the optimizer

    with accelerator.no_sync(model):
        loss, items = loss_of(model, mine[0])
        accelerator.backward(loss, num_items=items)
        loss, items = loss_of(model, mine[1])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss, num_items=items)
    found["triggered"] = error(gradients(model), wanted) < 2e-6
    optimizer.step()
    optimizer.zero_grad()

    loss, items = loss_of(model, mine[0])
    accelerator.backward(loss, num_items=items * 1e-3)  # any weights: the same gradient in proportion
    proportional = gradients(model)
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, mine[0])[0], num_items=items * 1e3)
    found["proportional"] = error(gradients(model), proportional) < 2e-6
    optimizer.zero_grad()
    return found


def test_rare_uses_of_weights(ranks: RankServer) -> None:
    for size in (1, 2):
        found = same_on_all(ranks(size, corners))
        assert found == dict.fromkeys(found, True)


def refused() -> list[str]:
    """The errors of wrong uses; after each, the next begins with cleared gradients."""
    accelerator, model, optimizer = set_up("plain", 2)
    batch = joined(text(LENGTHS))
    said = []

    def attempt(*calls: dict[str, Any]) -> None:
        def run() -> None:
            for call in calls:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch)[0], **call)
                    optimizer.step()

        with pytest.raises(PrepareError) as caught:
            run()
        said.append(caught.value.what)
        accelerator.sync_gradients, accelerator.step = True, 0
        optimizer.zero_grad()

    attempt({}, {"num_items": 3})
    attempt({"num_items": 3}, {})
    for wrong in (-1, math.nan, math.inf, "three", torch.ones(2)):
        attempt({"num_items": wrong})
    attempt({"num_items": 3, "learning_rate": 0.1})
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch)[0], num_items=2)
    with accelerator.accumulate(model), pytest.raises(PrepareError) as caught:
        optimizer.step()  # the last micro-batch had no backward
    said.append(caught.value.what)
    return said


def test_wrong_weights_are_refused_by_every_rank(ranks: RankServer) -> None:
    said = same_on_all(ranks(2, refused))
    mixed = "backward was called with num_items and without it"
    expected = [mixed, mixed, "num_items is -1", "num_items is nan", "num_items is inf"]
    expected += [
        "num_items is",
        "num_items is a tensor of 2",
        "does not go with",
        "weighted by items and not",
    ]
    for text_, part in zip(said, expected, strict=True):
        assert part in text_


def static_and_empty() -> str:
    accelerator, model, _ = set_up("static", 1)
    batch = joined(text([0] * 8))
    with pytest.raises(PrepareError) as caught:
        accelerator.backward(loss_of(model, batch)[0], num_items=0)
    return caught.value.what


def test_a_static_graph_needs_something_to_learn_from(ranks: RankServer) -> None:
    assert "static_graph=True" in same_on_all(ranks(2, static_and_empty))


def adversaries(how: str) -> dict[str, bool]:
    """B8: a generator and a discriminator with their own optimizers, and other weights for each."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    size, rank = accelerator.num_processes, accelerator.process_index

    def parts() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Linear(3, 4).double(), nn.Linear(4, 1).double()

    generator, judge = parts()
    rates = (torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1))
    generator, judge, first, second = accelerator.prepare(generator, judge, *rates)
    twins = parts()
    draw = torch.Generator().manual_seed(5)
    same = True
    for _ in range(3):
        noise = torch.randn(8, 3, generator=draw, dtype=torch.float64)
        real = torch.randn(8, 4, generator=draw, dtype=torch.float64)
        # The discriminator counts all of its rows, the generator those with a positive first number.
        for part in range(2):
            rows = slice((part * size + rank) * 8 // size // 2, (part * size + rank + 1) * 8 // size // 2)
            with accelerator.accumulate(generator, judge):
                z, x = noise[rows], real[rows]
                kept = z[:, 0] > 0
                score = judge(generator(z).detach()).mean() - judge(x).mean()
                accelerator.backward(score, **({"num_items": len(z)} if how == "items" else {}))
                judge.requires_grad_(False)
                if how == "items":
                    value = -judge(generator(z[kept])).mean()
                    accelerator.backward(value, num_items=int(kept.sum()))
                else:
                    accelerator.backward(-judge(generator(z)).mean())
                judge.requires_grad_(True)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        plain_adversaries(twins, noise, real, how)
        pairs = zip((generator, judge), twins, strict=True)
        same &= all(torch.allclose(a.weight, b.weight, rtol=0, atol=1e-12) for a, b in pairs)
    return {"same": same, "moved": not torch.equal(generator.weight, parts()[0].weight)}


def plain_adversaries(
    models: tuple[nn.Module, nn.Module], noise: torch.Tensor, real: torch.Tensor, how: str
) -> None:
    """The same step by one process with one batch."""
    generator, judge = models
    kept = noise[noise[:, 0] > 0] if how == "items" else noise
    losses = (-judge(generator(kept)).mean(), judge(generator(noise).detach()).mean() - judge(real).mean())
    found = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, models, strict=True)]
    for model, grads in zip(models, found, strict=True):
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.data -= 0.1 * grad


@pytest.mark.parametrize("how", ["mean", "items"])
@pytest.mark.parametrize("size", [1, 2])
def test_two_models_with_two_optimizers_train_as_on_one_process(
    ranks: RankServer, size: int, how: str
) -> None:
    """B8."""
    assert same_on_all(ranks(size, adversaries, how)) == {"same": True, "moved": True}


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter(torch.arange(5.0)[:, None].double() + 1)


def epoch_with_fillers(kind: str) -> list[float]:
    """Five samples in steps of four; a loss over the rows that are real, weighted by their number."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    dispatch = {"dispatched stream": True, "sharded stream": False}.get(kind)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(0.5)
    data: Any = Stream() if "stream" in kind else list(Stream())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch_size = 4 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    weights: list[float] = []
    for batch in loader:
        real = len(batch) if loader.real is None else loader.real
        loss = (model(batch[:real]) - 1).square().mean()
        accelerator.backward(loss, num_items=real)
        optimizer.step()
        optimizer.zero_grad()
        user: Any = accelerator.unwrap_model(model)
        weights.append(user.weight.item())
    return weights


@pytest.mark.parametrize("kind", ["map-style", "sharded stream", "dispatched stream"])
def test_samples_that_fill_the_last_step_can_weigh_nothing(ranks: RankServer, kind: str) -> None:
    weight, expected = 0.5, []
    for rows in (torch.arange(1.0, 5).double(), torch.tensor([5.0]).double()):
        weight -= 0.01 * float((2 * rows * (weight * rows - 1)).mean())
        expected.append(weight)
    assert same_on_all(ranks(2, epoch_with_fillers, kind)) == pytest.approx(expected, abs=1e-12)
    assert same_on_all(ranks(1, epoch_with_fillers, kind)) == pytest.approx(expected, abs=1e-12)


def two_blocks(together: bool) -> list[str]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    one, two = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            if together:
                with accelerator.accumulate(one, two):
                    accelerator.backward(one(batch).mean() + two(batch).mean())
                continue
            for model in (one, two):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
    return [str(each.message) for each in caught if "accumulate()" in str(each.message)]


def test_two_blocks_of_accumulation_in_one_batch_are_warned_of(ranks: RankServer) -> None:
    """One count for both: with two steps, the windows close in the second block alone."""
    for texts, *_ in (ranks(1, two_blocks, False), ranks(2, two_blocks, False)):
        assert len(texts) == 1
        assert "never step; put both into one block" in texts[0]
    assert ranks(1, two_blocks, True) == [[]]


def clipped_on_several_meshes(norm_type: float) -> tuple[float, float, list[torch.Tensor]]:
    """Clip a plain gradient and two that are sharded over meshes of the program; also by value.

    Before that, the norm in the middle of a window.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "ep")]
    values = torch.arange(1.0, 9.0).reshape(2, 4)
    parameters: list[Any] = [nn.Parameter(torch.zeros(2, 4))]
    parameters += [nn.Parameter(distribute_tensor(values, mesh, [Shard(1)])) for mesh in meshes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) + values.max()
    accelerator.gradient_state.sync_gradients = False
    local_norm = accelerator.clip_grad_norm_(parameters, 0.5, norm_type)
    accelerator.gradient_state.sync_gradients = True
    accelerator.clip_grad_value_(parameters, 4.0)
    norm = accelerator.clip_grad_norm_(iter(parameters), 0.5, norm_type)
    assert type(norm) is type(local_norm) is torch.Tensor
    whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in parameters]
    return local_norm.item(), norm.item(), whole


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_of_several_meshes_are_clipped_by_one_norm(ranks: RankServer, norm_type: float) -> None:
    """As of a program that shards by itself: tensor and expert parallel layers in a replicated model."""
    local_norm, norm, gradients = same_on_all(ranks(2, clipped_on_several_meshes, norm_type))
    assert local_norm == torch.linalg.vector_norm(torch.full((16,), 8.0), norm_type)
    expected = torch.linalg.vector_norm(torch.full((24,), 4.0), norm_type)
    assert norm == pytest.approx(expected.item())
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.full((2, 4), 4.0) * 0.5 / expected)
