"""The loop around a sharded model: items, windows, accumulation, several models."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.long_run import select_cases
from tests.support.numbers import same
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_jobs import LENGTHS, gradients, in_windows, train_two, trained_two, weigh, weighed
from tests.support.sharded_models import adamw, batches, loss_of, share, tiny, whole
from tests.support.torch_versions import is_torch

LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
WHOLE: dict[str, Any] = {"auto_wrap_policy": "no_wrap"}


def accelerator_of(window: int = 1, **options: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**{**LAYERS, **options})
    return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=window)


def weighted(lengths: list[int], window: int) -> dict[str, torch.Tensor]:
    """Gradients of one step; rows are dealt to micro-batches and ranks in order."""
    accelerator = accelerator_of(window)
    model = tiny()
    model, _ = accelerator.prepare(model, adamw(model))
    weigh(accelerator, model, lengths, window)
    return gradients(model)


UNEVEN = ([0, 0, 2, 5, 6, 1, 0, 4], [2, 5, 0, 0, 6, 1, 3, 0])


@pytest.mark.parametrize(
    ("lengths", "window"),
    select_cases(product((LENGTHS, *UNEVEN), (1, 2, 4)), [(LENGTHS, 1), (UNEVEN[0], 4), (UNEVEN[1], 2)]),
)
def test_gradients_weighted_by_items_are_those_of_one_batch(
    ranks: RankServer, lengths: list[int], window: int
) -> None:
    """B1, B9: also where a micro-batch of one rank has no item, and its loss is NaN."""
    ours = same_on_all(ranks(2, weighted, lengths, window))
    same(ours, weighed(lengths), 1e-6)


def train_head_twice(version: int, sizes: list[list[int]], is_cleared: bool) -> dict[str, torch.Tensor]:
    """One step after backwards of two models in one unit each, of which one rank holds no trained element."""
    accelerator = accelerator_of(fsdp_version=version, use_orig_params=True, **WHOLE)
    nets = [head_model(), head_model()]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=1.0)
    first, second, optimizer = accelerator.prepare(*nets, optimizer)
    if is_cleared:
        accelerator.backward(first(rows_of(4)).square().mean(), num_items=accelerator.process_index)
        first.zero_grad()
    for size in sizes[accelerator.process_index]:
        loss = first(rows_of(size)).square().mean()
        accelerator.backward(loss + second(rows_of(size)).square().mean(), num_items=size)
    optimizer.step()
    return accelerator.get_state_dict(first)


def head_model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    net[0].requires_grad_(False)
    return net


def rows_of(size: int) -> torch.Tensor:
    return torch.randn(size, 64, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_a_rank_without_trained_elements_counts_its_items(
    ranks: RankServer, version: int, is_cleared: bool
) -> None:
    """It has no gradient that tells whether they were changed, or cleared between two backwards."""
    ours, _ = ranks(2, train_head_twice, version, [[3, 2], [1, 5]], is_cleared)
    net = head_model()
    net(torch.cat([rows_of(size) for size in (3, 2, 1, 5)])).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    same(ours, net.state_dict(), 1e-5)


def windows() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five micro-batches in windows of two: the last is shorter."""
    accelerator = accelerator_of()
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    rank, norms = accelerator.process_index, []
    for window in accelerator.windows(list(batches(5)), 2):
        for words in window:
            accelerator.backward(loss_of(model, share(words, rank, 2)))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, whole(model)


def test_windows_close_with_what_they_hold(ranks: RankServer) -> None:
    """B2"""
    norms, values = same_on_all(ranks(2, windows))
    expected, model = in_windows(list(batches(5)))
    assert norms == pytest.approx(expected, abs=1e-5)
    same(values, whole(model), 1e-5)


def streaming(shorter: bool) -> dict[str, torch.Tensor]:
    """A window whose length is not known before its end: what it kept back is scaled afterwards."""
    from torch.utils.data import DataLoader

    accelerator = accelerator_of()
    model = tiny()
    model, _ = accelerator.prepare(model, adamw(model))
    rows = torch.cat(list(batches(3, rows=4)))
    loader = accelerator.prepare(DataLoader(rows, batch_size=2))
    for window in accelerator.windows(loader, 4 if shorter else 3):
        for words in window:
            accelerator.backward(loss_of(model, words))
    return gradients(model)


def test_gradients_that_are_kept_back_are_scaled_too(ranks: RankServer) -> None:
    """B2: three micro-batches in a window planned for four, or for three: the same gradients."""
    short, exact = (same_on_all(ranks(2, streaming, shorter)) for shorter in (True, False))
    for name, value in exact.items():
        torch.testing.assert_close(short[name], value, rtol=0, atol=1e-6)


def dropped() -> tuple[float, float, dict[str, torch.Tensor]]:
    """A micro-batch without synchronising is dropped by ``zero_grad``; then comes a whole step."""
    accelerator = accelerator_of()
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    rank = accelerator.process_index
    first, second = batches(2)
    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            pass  # the outer one goes on
        accelerator.backward(loss_of(model, share(first, rank, 2)))
    accelerator.sync_gradients = False
    so_far = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert type(so_far) is torch.Tensor
    accelerator.sync_gradients = True
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, share(second, rank, 2)))
    found = gradients(model)
    with accelerator.no_sync(model):
        loss = loss_of(model, share(second, rank, 2))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
    doubled = gradients(model)["embed.weight"].norm() / found["embed.weight"].norm()
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    greatest = max(value.abs().max().item() for value in gradients(model).values())
    assert 0 < greatest <= 1e-3 + 1e-9
    return round(so_far.item(), 6), round(doubled.item(), 4), found


def test_zero_grad_drops_what_was_kept_back(ranks: RankServer) -> None:
    """B4, B7: the norm so far is that of this rank; the dropped micro-batch leaves nothing behind."""
    results = ranks(2, dropped)
    model = tiny()
    first, second = batches(2)
    loss_of(model, second).backward()
    for rank, (so_far, doubled, found) in enumerate(results):
        alone = tiny()
        loss_of(alone, share(first, rank, 2)).backward()
        norms = [value.norm() for value in gradients(alone).values()]
        assert so_far == pytest.approx(torch.stack(norms).norm().item(), abs=1e-5)
        assert doubled == pytest.approx(2.0)
        for name, value in gradients(model).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def two_models() -> dict[str, torch.Tensor]:
    """B8: two models and two optimizers; only one trains in the second half."""
    one, two = train_two(accelerator_of(2))
    return {**whole(one), **{f"two.{name}": value for name, value in whole(two).items()}}


def test_two_models_train_side_by_side(ranks: RankServer) -> None:
    """B8"""
    ours = same_on_all(ranks(2, two_models))
    one, two = map(whole, trained_two())
    same(ours, {**one, **{f"two.{name}": value for name, value in two.items()}}, 1e-5)


def norms() -> list[tuple[float, float]]:
    """Ours and torch's own, for several p and with a gradient that is not finite."""
    from accelerate.core.errors import SettingError

    accelerator = accelerator_of()
    model = tiny()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, share(next(batches(1)), accelerator.process_index, 2)))
    found = []
    for p in (1.0, 2.0, float("inf")):
        ours = accelerator.clip_grad_norm_(model.parameters(), float("inf"), norm_type=p)
        grads = torch.cat([grad.flatten() for grad in gradients(model).values()])
        found.append((ours.item(), grads.norm(p).item()))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.to_local().abs_().add_(0.5)  # the powers of rows without words were infinite
    for p in (-2.0, float("-inf")):
        ours = accelerator.clip_grad_norm_(model.parameters(), float("inf"), norm_type=p)
        grads = torch.cat([grad.flatten() for grad in gradients(model).values()])
        found.append((ours.item(), grads.norm(p).item()))
    with pytest.raises(SettingError, match="norm_type=0 counts tensors"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=0)
    if accelerator.process_index == 0:
        next(p for p in model.parameters() if p.grad is not None).grad.to_local()[0] = float("nan")
    found.append((float(accelerator.clip_grad_norm_(model.parameters(), 1.0).isnan()), 1.0))
    return found


def test_the_norm_is_the_true_one(ranks: RankServer) -> None:
    """B7"""
    for ours, true in same_on_all(ranks(2, norms)):
        assert ours == pytest.approx(true, rel=1e-5)


def listed_before() -> dict[str, torch.Tensor]:
    """A step that clips parameters that were listed before ``prepare``, and trains a group of such."""
    accelerator = accelerator_of()
    model = tiny()
    params, layer = list(model.parameters()), list(model.layers[1].parameters())
    optimizer = torch.optim.SGD([p for p in params if all(p is not each for each in layer)], lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    words = share(next(batches(1)), accelerator.process_index, 2)
    loss = loss_of(model, words)
    between = list(model.parameters())  # some are unsharded: the root stays so for the backward
    accelerator.backward(loss)
    optimizer.add_param_group({"params": layer})
    for listed in (params, between):
        norm = accelerator.clip_grad_norm_(model.parameters(), float("inf")).item()
        assert accelerator.clip_grad_norm_(listed, norm / 2).item() == pytest.approx(norm)
    accelerator.clip_grad_value_(params, 1e-3)
    optimizer.step()
    return whole(model)


def test_parameters_that_were_listed_before_prepare_are_clipped_and_trained(ranks: RankServer) -> None:
    """They had no gradient any more: clipping returned 0, and a group that was added never trained."""
    ours = same_on_all(ranks(2, listed_before))
    model = tiny()
    loss_of(model, next(batches(1))).backward()
    norm = nn.utils.get_total_norm(gradients(model).values())
    nn.utils.clip_grad_norm_(model.parameters(), norm.item() / 4)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    same(ours, whole(model), 1e-6)


def thawed() -> tuple[list[str], dict[str, torch.Tensor]]:
    """The warnings and gradients where blocks are frozen in the first forward, one of them in bfloat16."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS), mixed_precision="bf16")
    model = tiny()
    model.layers[0].to(torch.bfloat16).requires_grad_(False)
    model, _ = accelerator.prepare(model, adamw(model))
    model.layers[1].requires_grad_(False)
    words = share(next(batches(1)), accelerator.process_index, 2)
    with torch.no_grad():
        loss_of(model, words)
    model.layers.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(loss_of(model, words))
    messages = [str(each.message) for each in caught]
    return [each for each in messages if "frozen" in each], gradients(model)


def test_blocks_that_are_frozen_in_the_first_forward_train_later(ranks: RankServer) -> None:
    """torch takes the dtypes of gradients there: the backward failed, as of LoRA after a look at the base."""
    warned, ours = same_on_all(ranks(2, thawed))
    assert len(warned) == 1
    assert "layers.0.norm.weight, layers.0.norm.bias" in warned[0]
    assert "train in torch.bfloat16" in warned[0]
    model = tiny()
    for _ in range(2):
        loss_of(model, next(batches(1))).backward()
    halves = {name for name, grad in ours.items() if grad.dtype == torch.bfloat16}
    assert halves == {f"layers.0.{name}" for name, _ in model.layers[0].named_parameters()}
    same({name: grad.float() for name, grad in ours.items()}, gradients(model), 2e-2)


def add_hooks(model: Any) -> tuple[Any, list[str]]:
    """Hooks on gradients of a tied weight and of blocks; a handle of one, and what another has called."""
    calls: list[str] = []
    mask = torch.ones(11, 1)
    mask[:4] = 0
    model.embed.weight.register_hook(lambda gradient: gradient * mask)
    model.layers[0].up.weight.register_hook(lambda gradient: gradient * 3)
    model.layers[1].up.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    return model.layers[1].down.weight.register_hook(lambda gradient: gradient * 5), calls


def hooked(options: dict[str, Any], after: str) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Gradients with all hooks, and after one of them was removed."""
    accelerator = accelerator_of(**options)
    model = tiny()
    optimizer = adamw(model)
    if not after:
        handle, calls = add_hooks(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if after:
        with torch.set_grad_enabled(after == "training"):  # else a look at the untrained model
            loss = loss_of(model, share(next(batches(1)), accelerator.process_index, 2))
        if after == "training":
            accelerator.backward(loss)
            optimizer.zero_grad()
        handle, calls = add_hooks(model)
    numbers = []
    for words in batches(2):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        numbers.append((gradients(model), list(calls)))
        optimizer.zero_grad()
        handle.remove()
    return numbers


@pytest.mark.parametrize(
    ("options", "after"),
    select_cases(
        product(({}, WHOLE), ("", "evaluation", "training")),
        [({}, ""), ({}, "training"), (WHOLE, "evaluation")],
    ),
)
def test_hooks_of_parameters_are_called_after_sharding(
    ranks: RankServer, options: dict[str, Any], after: str
) -> None:
    """fully_shard drops them, and no graph reaches those of sharded parameters: a mask was ignored."""
    results = same_on_all(ranks(2, hooked, options, after))
    model = tiny()
    handle, calls = add_hooks(model)
    for (ours, called), words in zip(results, batches(2), strict=True):
        loss_of(model, words).backward()
        same(ours, gradients(model), 1e-6)
        assert called == calls
        model.zero_grad()
        handle.remove()


def stale() -> list[str]:
    """The warnings of a model that keeps a weight in a list too."""
    model: Any = tiny()
    model.decayed = [model.layers[0].up.weight]
    with pytest.warns(UserWarning, match="that sharding has replaced") as warned:
        accelerator_of().prepare(model, adamw(model))
    return [str(each.message) for each in warned]


def test_a_parameter_that_a_list_keeps_is_warned_of(ranks: RankServer) -> None:
    """What computes with it had the weights of before, and was not trained."""
    for said in ranks(2, stale):
        assert any("Tiny.decayed holds a parameter that sharding has replaced" in each for each in said)


class Branches(nn.Module):
    """A block with three layers of equal shapes, of which a call uses one; a model of two such blocks."""

    _no_split_modules = ("Branches",)

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        if depth:
            self.blocks = nn.ModuleList([Branches(depth - 1), Branches(depth - 1)])
        else:
            self.ways = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        """(batch, 4) -> the same."""
        for block in getattr(self, "blocks", ()):
            x = block(x, way)
        return torch.tanh(self.ways[way](x)) if hasattr(self, "ways") else x


# For each backward of a window, the layer that each of two ranks uses.
WAYS = ("ab", "aa", "ba")


def branches(precision: str = "no") -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Gradients of windows in which ranks use different layers; and those of one process."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(3)
    alone, model = Branches(), Branches()
    model.load_state_dict(alone.state_dict())
    steps = 1 if precision == "no" else 2
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS),
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    rows = torch.rand(2, 4, 4)
    ours: list[dict[str, torch.Tensor]] = []
    expected: list[dict[str, torch.Tensor]] = []
    for ways in (*WAYS, *WAYS[:1]):
        with accelerator.accumulate(model):
            rank = accelerator.process_index
            accelerator.backward(model(rows[rank], ways[rank]).sum())
            for x, way in zip(rows, ways, strict=True):
                (alone(x, way).sum() / 2).backward()
        if accelerator.sync_gradients:
            ours.append(gradients(model))
            expected.append({name: grad / steps for name, grad in gradients(alone).items()})
            alone.zero_grad()
        optimizer.zero_grad()
    return ours, expected


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ranks_that_use_different_layers_of_a_block_get_the_gradients_of_each(
    ranks: RankServer, precision: str
) -> None:
    """torch reduces what a rank has by its place, so that one layer got the gradients of another."""
    for ours, expected in zip(*same_on_all(ranks(2, branches, precision)), strict=True):
        assert ours.keys() == expected.keys(), "a layer that no rank used has a gradient"
        same(ours, expected, 1e-6 if precision == "no" else 2e-2)


class NumberReader(torch.optim.Optimizer):
    """Scales each update by two norms that it reads as numbers, after so many steps without."""

    def __init__(self, params: Any, plain_steps: int = 0) -> None:
        super().__init__(params, {"lr": 0.05})
        self.numbers: list[float] = []
        self.plain_steps = plain_steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """p -= lr * |p| / |grad| * grad."""
        self.plain_steps -= 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.plain_steps >= 0:
                    p.sub_(p.grad, alpha=group["lr"])
                elif p.grad is not None:
                    self.numbers += [p.norm().item(), float(p.grad.norm())]
                    p.sub_(p.grad * (group["lr"] * self.numbers[-2] / (1e-6 + self.numbers[-1])))


def read_numbers(plain_steps: int) -> dict[str, torch.Tensor]:
    accelerator = accelerator_of()
    model = tiny()
    model, optimizer = accelerator.prepare(model, NumberReader(model.parameters(), plain_steps))
    for words in batches(3):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("plain_steps", [0, 2])
def test_numbers_that_an_optimizer_reads_are_those_of_all_shards(ranks: RankServer, plain_steps: int) -> None:
    """torch gives this rank's summand of a norm over shards, so that each rank stepped with another one."""
    ours = same_on_all(ranks(2, read_numbers, plain_steps))
    model = tiny()
    optimizer = NumberReader(model.parameters(), plain_steps)
    for words in batches(3):
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(ours, whole(model), 1e-5)


class Spectrum(nn.Module):
    """Complex parameters: a vector that two ranks share unevenly, and one with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.filter * self.scale).abs().square().mean()


def train_spectrum(optimizer_class: Any, is_prepared: bool) -> dict[str, torch.Tensor]:
    model: nn.Module = Spectrum()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    if is_prepared:
        accelerator = accelerator_of(**WHOLE, mixed_precision_policy="fp32")
        model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        x = torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_prepared:
        assert accelerator.effects()
    return whole(model)


@pytest.mark.skipif(is_torch("<2.10"), reason="gloo takes no complex numbers")
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad"])
def test_optimizers_write_into_uneven_shards_of_complex_parameters(ranks: RankServer, name: str) -> None:
    """torch copies such a shard to view it as real numbers, and the updates were lost."""
    optimizer_class = getattr(torch.optim, name)
    ours = same_on_all(ranks(2, train_spectrum, optimizer_class, True))
    same(ours, train_spectrum(optimizer_class, False), 1e-5)


def read_numbers_after_a_skipped_step() -> tuple[int, list[float]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS), mixed_precision="fp16")
    model = tiny()
    model, optimizer = accelerator.prepare(model, NumberReader(model.parameters()))
    for number, words in enumerate(batches(3)):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        if number == 0:
            model.embed.weight.grad.to_local().fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.skipped_steps, optimizer.optimizer.numbers


def test_numbers_are_those_of_all_shards_also_after_a_skipped_first_step(ranks: RankServer) -> None:
    """The gradient scaler skips the first step: nothing is read in it."""
    skipped, numbers = same_on_all(ranks(2, read_numbers_after_a_skipped_step))
    assert skipped == 1
    assert len(numbers) == 2 * 2 * sum(p.requires_grad for p in tiny().parameters())


def evaluate_in_between(options: dict[str, Any]) -> list[float]:
    """The losses of three steps, with evaluations before each, and weights that are written after these."""
    accelerator = accelerator_of(**options)
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses: list[float] = []
    for words in batches(4):
        rows = share(words, accelerator.process_index, 2)
        with torch.inference_mode():
            loss_of(model, rows)
        loss = loss_of(model, rows)
        with torch.no_grad():
            loss_of(model, rows)
        accelerator.backward(loss)
        with torch.no_grad():
            loss_of(model, rows)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, rows)
            for parameter in model.parameters():
                parameter.data.mul_(0.8)
        losses.append(accelerator.mean_loss(loss.detach()).item())
    return losses


@pytest.mark.parametrize(
    ("version", "strategy"),
    select_cases(product((1, 2), ("FULL_SHARD", "SHARD_GRAD_OP")), [(1, "SHARD_GRAD_OP"), (2, "FULL_SHARD")]),
)
def test_values_written_after_an_evaluation_count(ranks: RankServer, version: int, strategy: str) -> None:
    """torch keeps unsharded values after a forward; without a backward it took them for the newest.

    Those of a first forward in ``inference_mode`` could not be written in a training afterwards.
    """
    options = {"fsdp_version": version, "sharding_strategy": strategy}
    ours = same_on_all(ranks(2, evaluate_in_between, options))
    model = tiny()
    optimizer = adamw(model)
    losses: list[float] = []
    for words in batches(4):
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(0.8)
        losses.append(loss.item())
    assert ours == pytest.approx(losses, abs=1e-5)
