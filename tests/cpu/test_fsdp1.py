"""Version 1 of sharding, torch's class around each part: the numbers and refusals of a prepared model."""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.long_run import long_run_param, select_cases
from tests.support.numbers import Numbers, close, same
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_jobs import LENGTHS, in_windows, train_two, trained_two, weigh, weighed
from tests.support.sharded_models import (
    INITIALIZERS,
    UNFILLED,
    adamw,
    batches,
    loss_of,
    plain,
    share,
    tiny,
    to_empty,
)

STEPS = 8
LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
# Four processes as two machines of two.
TWO_COPIES: dict[str, Any] = {**LAYERS, "replicate_size": 2}


def accelerator_of(options: dict[str, Any], precision: str = "no", window: int = 1, **more: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **options)
    return Accelerator(
        fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=window, **more
    )


def whole(accelerator: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Every value by the user's names, on every rank."""
    from accelerate.utils import broadcast_object_list

    (state,) = broadcast_object_list([accelerator.get_state_dict(model)])
    return state


def params_in_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: state[name] for name, _ in tiny().named_parameters()}


# --- the numbers of one process


def trained(options: dict[str, Any], window: int, precision: str = "no", alone: bool = False) -> Any:
    accelerator = accelerator_of(options, precision, window)
    assert (accelerator.distributed_type, accelerator.is_fsdp2) == ("FSDP", False)
    assert accelerator.strategy.name == "fsdp1"
    # Every rank begins with other weights: those of rank 0 count.
    model = tiny(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses, norms = [], []
    for words in batches(STEPS):
        with accelerator.accumulate(model):
            mine = share(words, accelerator.process_index, accelerator.num_processes)
            loss = loss_of(model, mine)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    state = whole(accelerator, model)
    own = [part._handle.flat_param.detach().clone() for part in model.modules() if hasattr(part, "_handle")]
    return (losses, norms, params_in_state(state)), own if alone else None


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": {**LAYERS, "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
    "grads": {**LAYERS, "sharding_strategy": "SHARD_GRAD_OP", "limit_all_gathers": False},
    "copies": {**LAYERS, "sharding_strategy": "NO_SHARD"},
    "size": {
        "auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "sharding_strategy": "HYBRID_SHARD",
    },
    "recomputed": {
        **LAYERS, "activation_checkpointing": True, "cpu_offload": True, "backward_prefetch": "NO_PREFETCH",
    },
}  # fmt: skip
WINDOWS = [("whole", 1), ("layers", 4), ("grads", 4), ("copies", 1), ("size", 1), ("recomputed", 1)]


NORM_TYPES = (1.0, 2.0, float("inf"), float("-inf"), -2.0)


def norms(use_orig_params: bool) -> list[float]:
    from accelerate.core.errors import SettingError

    accelerator = accelerator_of({"use_orig_params": use_orig_params})
    model: Any = nn.Linear(4, 1)
    listed = list(model.parameters())  # before they are flat ones
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.arange(1.0, 5.0)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    assert accelerator.clip_grad_norm_(listed, float("inf")) == norm
    with pytest.raises(SettingError, match="norm_type=0 counts tensors"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=0)
    return [
        accelerator.clip_grad_norm_(model.parameters(), float("inf"), norm_type=p).item() for p in NORM_TYPES
    ]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_norm_is_the_true_one_of_any_type(ranks: RankServer, use_orig_params: bool) -> None:
    """Five elements on two ranks: torch adds a zero, which is none."""
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0])
    expected = [gradient.norm(p).item() for p in NORM_TYPES]
    assert same_on_all(ranks(2, norms, use_orig_params)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "window"), select_cases(product(OPTIONS, (1, 4)), WINDOWS))
def test_it_trains_to_the_numbers_of_one_process(ranks: RankServer, kind: str, window: int) -> None:
    """B7, F3: tied and frozen parameters, two groups, clipping by the true norm, accumulation."""
    ours, _ = same_on_all(ranks(2, trained, OPTIONS[kind], window))
    close(ours, plain(window), 1e-5)


@pytest.mark.parametrize("strategy", [long_run_param("HYBRID_SHARD"), "HYBRID_SHARD_ZERO2"])
def test_hsdp_replicas_stay_equal(ranks: RankServer, strategy: str) -> None:
    """On 2 x 2: the numbers of one process; what ranks 0 and 1 have, ranks 2 and 3 have."""
    found = ranks(4, trained, {**TWO_COPIES, "sharding_strategy": strategy}, 4, "no", True)
    close(same_on_all([numbers for numbers, _ in found]), plain(4), 1e-5)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(found[one][1], found[other][1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def flat_ones(scale: float) -> tuple[Numbers, int]:
    """With ``use_orig_params=False`` optimizers hold flat parameters; this one was made before them."""
    accelerator = accelerator_of({**LAYERS, "use_orig_params": False, "ignored_modules": "frozen"})
    model = tiny(accelerator.process_index)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if scale:
        # It has stepped with whole parameters.
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    losses, norms = [], []
    for words in batches(STEPS):
        loss = loss_of(model, share(words, accelerator.process_index, 2))
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    return (losses, norms, params_in_state(whole(accelerator, model))), held


@pytest.mark.parametrize("stepped", [False, True])
def test_optimizers_follow_to_flat_parameters(ranks: RankServer, stepped: bool) -> None:
    """Also with what they keep for each parameter."""
    ours, held = same_on_all(ranks(2, flat_ones, float(stepped)))
    assert held == 3
    model = tiny()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses, norms = [], []
    for words in [next(batches(1))] * stepped + list(batches(STEPS)):
        loss = loss_of(model, words)
        loss.backward()
        losses.append(loss.item())
        if len(losses) > stepped:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    close(ours, (losses[stepped:], norms, dict(model.named_parameters())), 1e-5)


# --- number formats, after the fact


def formats(options: dict[str, Any], precision: str) -> dict[str, Any]:
    accelerator = accelerator_of({**LAYERS, **options}, precision)
    model: Any = tiny()
    seen: dict[str, Any] = {}
    model.layers[0].up.register_forward_hook(
        lambda module, args, output: seen.update(weight=module.weight.dtype, input=args[0].dtype)
    )
    model, _ = accelerator.prepare(model, adamw(model))
    output = model(next(batches(1)))
    accelerator.backward(output.float().square().mean())
    flats = [part._handle.flat_param for part in model.modules() if hasattr(part, "_handle")]
    handle = model.layers[0]._handle
    state = accelerator.get_state_dict(model)
    return {
        **seen,
        "output": output.dtype,
        "rest": {flat.dtype for flat in flats},
        "gradient": {flat.grad.dtype for flat in flats},
        "reduced": handle._reduce_dtype,
        "buffer": model.scale.dtype,
        "saved": {value.dtype for value in state.values()} or {torch.float32},
    }


def test_every_number_format_is_what_was_said(ranks: RankServer) -> None:
    """B8: weights and moments rest in float32, whatever computes; on the real tensors."""
    half, full = torch.bfloat16, torch.float32
    found = same_on_all(ranks(2, formats, {}, "bf16"))
    assert found == {
        "weight": half, "input": half, "output": full, "rest": {full}, "gradient": {full},
        "reduced": full, "buffer": full, "saved": {full},
    }  # fmt: skip
    policy = {"param_dtype": "bf16", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}
    found = same_on_all(ranks(2, formats, {"mixed_precision_policy": policy}, "no"))
    assert found == {
        "weight": half, "input": half, "output": half, "rest": {full}, "gradient": {full},
        "reduced": half, "buffer": half, "saved": {full},
    }  # fmt: skip


def test_bf16_trains_to_the_numbers_of_autocast(ranks: RankServer) -> None:
    ours, _ = same_on_all(ranks(2, trained, LAYERS, 1, "bf16"))
    close(ours, plain(1, half=True), 2e-2)
    assert {value.dtype for value in ours[2].values()} == {torch.float32}


def train_with_overflow() -> tuple[int, bool, bool]:
    from accelerate.utils import GradScalerKwargs

    accelerator = accelerator_of(LAYERS, "fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**18)])
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for words in batches(10):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        # One rank alone sees the overflow.
        if accelerator.process_index == 1 and optimizer.skipped_steps == 0:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.fill_(float("inf"))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    values = whole(accelerator, model).values()
    finite = all(bool(torch.isfinite(value).all()) for value in values)
    return optimizer.skipped_steps, accelerator.optimizer_step_was_skipped, finite


def test_fp16_scales_and_skips_together(ranks: RankServer) -> None:
    """B6: what is not finite on one rank is skipped on all."""
    skipped, last, finite = same_on_all(ranks(2, train_with_overflow))
    assert skipped > 0
    assert not last
    assert finite


def clip_part() -> tuple[list[bool], list[float], bool]:
    """Clip a layer that rank 1 has alone; rank 0 has none of its gradients."""
    accelerator = accelerator_of({"use_orig_params": True}, "fp16")
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 64.0})
    head = model.get_parameter("1.weight")
    skipped, scales = [], []
    for factor in (1.0, math.inf, 1.0):
        accelerator.backward(model(torch.ones(2, 16)).sum() * factor)
        accelerator.clip_grad_norm_([head], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scales.append(accelerator.scaler.get_scale())
    return skipped, scales, head.numel() == 16


def test_fp16_clips_a_layer_that_one_rank_holds(ranks: RankServer) -> None:
    outcomes = ranks(2, clip_part)
    assert [each[:2] for each in outcomes] == [([False, True, False], [64.0, 32.0, 32.0])] * 2
    assert [each[2] for each in outcomes] == [False, True]


def clip_two() -> tuple[list[bool], list[float]]:
    """Two models: both are clipped before both step; rank 0 trains no element of the first."""
    accelerator = accelerator_of({"use_orig_params": True}, "fp16")
    pairs = []
    for frozen in ("0", "1"):
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False))
        model.get_submodule(frozen).requires_grad_(False)
        pairs.append((model, torch.optim.SGD(model[1 - int(frozen)].parameters(), lr=0.1)))
    prepared: Any = accelerator.prepare(*pairs[0], *pairs[1])
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 64.0})
    skipped, scales = [], []
    for factor in (1.0, math.inf, 1.0):
        for model in prepared[::2]:
            accelerator.backward(model(torch.ones(2, 16)).sum() * factor)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in prepared[1::2]:
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
    return skipped, scales


def test_fp16_scales_alike_where_one_rank_trains_nothing_of_an_optimizer(ranks: RankServer) -> None:
    """Its gradients were taken for cleared there: the scale was another one, and then the ranks waited."""
    skipped = [False, False, True, True, False, False]
    assert same_on_all(ranks(2, clip_two)) == (skipped, [64.0, 32.0, 32.0])


# --- the loop


def stepped(accelerator: Any, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """The gradients, seen by what a step of SGD at rate 1 changes."""
    before = params_in_state(whole(accelerator, model))
    optimizer.step()
    after = params_in_state(whole(accelerator, model))
    optimizer.zero_grad()
    return {name: before[name] - after[name] for name in before}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def weighted(lengths: list[int], window: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of one step; rows are dealt to micro-batches and ranks in order."""
    accelerator = accelerator_of({**LAYERS, **options}, window=window)
    model = tiny()
    model, optimizer = accelerator.prepare(model, sgd(model))
    weigh(accelerator, model, lengths, window)
    return stepped(accelerator, model, optimizer)


@pytest.mark.parametrize(
    ("lengths", "window", "options"),
    [
        (LENGTHS, 1, {}),
        ([0, 0, 2, 5, 6, 1, 0, 4], 4, {}),
        ([2, 5, 0, 0, 6, 1, 3, 0], 2, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ([2, 5, 0, 0, 6, 1, 3, 0], 4, {"sharding_strategy": "NO_SHARD"}),
    ],
    ids=str,
)
def test_gradients_weighted_by_items_are_those_of_one_batch(
    ranks: RankServer, lengths: list[int], window: int, options: dict[str, Any]
) -> None:
    """B1, B9: also where a micro-batch of one rank has no item, and its loss is NaN."""
    ours = same_on_all(ranks(2, weighted, lengths, window, options))
    zeros = {name: torch.zeros_like(p) for name, p in tiny().named_parameters()}
    same(ours, zeros | weighed(lengths), 1e-6)


def windows(options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five micro-batches in windows of two, the last is shorter; the loader's end is not known before."""
    from torch.utils.data import DataLoader

    accelerator = accelerator_of({**LAYERS, **options})
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    rows: Any = torch.cat(list(batches(5, rows=4)))
    loader = accelerator.prepare(DataLoader(rows, batch_size=2))
    norms = []
    for window in accelerator.windows(loader, 2):
        for words in window:
            accelerator.backward(loss_of(model, words))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, params_in_state(whole(accelerator, model))


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}], ids=str)
def test_windows_close_with_what_they_hold(ranks: RankServer, options: dict[str, Any]) -> None:
    """B2: gradients that are kept back are scaled too."""
    norms, values = same_on_all(ranks(2, windows, options))
    expected, model = in_windows(list(batches(5, rows=4)))
    assert norms == pytest.approx(expected, abs=1e-5)
    same(values, dict(model.named_parameters()), 1e-5)


def dropped(options: dict[str, Any]) -> tuple[float, float, float, dict[str, torch.Tensor]]:
    """A micro-batch without synchronising is dropped by ``zero_grad``; then comes a whole step."""
    accelerator = accelerator_of({**LAYERS, **options})
    model = tiny()
    model, optimizer = accelerator.prepare(model, sgd(model))
    rank = accelerator.process_index
    first, second = batches(2)
    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            pass  # the outer one goes on
        accelerator.backward(loss_of(model, share(first, rank, 2)))
    accelerator.sync_gradients = False
    so_far = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.sync_gradients = True
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, share(second, rank, 2)))
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    with accelerator.no_sync(model):
        loss = loss_of(model, share(second, rank, 2))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
    twice = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    return so_far.item(), norm.item(), twice.item(), stepped(accelerator, model, optimizer)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_zero_grad_drops_what_was_kept_back(ranks: RankServer, strategy: str) -> None:
    """B4, B7: the norm so far is that of this rank; the dropped micro-batch leaves nothing behind."""
    first, second = batches(2)
    for rank, (so_far, norm, twice, found) in enumerate(ranks(2, dropped, {"sharding_strategy": strategy})):
        model = tiny()
        loss_of(model, share(first, rank, 2)).backward()
        assert so_far == pytest.approx(nn.utils.get_total_norm(grads(model)).item(), abs=1e-5)
        model.zero_grad()
        loss_of(model, second).backward()
        assert norm == pytest.approx(nn.utils.get_total_norm(grads(model)).item(), abs=1e-5)
        assert twice == pytest.approx(2 * norm, rel=1e-5)
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = (2 * grad).clamp(-1e-3, 1e-3)
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def two_models() -> dict[str, torch.Tensor]:
    """B8: two models and two optimizers; only one trains in the second half; it is evaluated."""
    accelerator = accelerator_of(LAYERS, window=2)
    # Whole values of the outermost part stay after an evaluation: a step must not leave them.
    one, two = train_two(accelerator, evaluate=True)
    found = params_in_state(whole(accelerator, one))
    more = params_in_state(whole(accelerator, two))
    return {**found, **{f"two.{name}": value for name, value in more.items()}}


def test_two_models_train_side_by_side(ranks: RankServer) -> None:
    """B8; and an evaluation between a backward and its step."""
    ours = same_on_all(ranks(2, two_models))
    one, two = (dict(model.named_parameters()) for model in trained_two())
    same(ours, {**one, **{f"two.{name}": value for name, value in two.items()}}, 1e-5)


# --- the prepared model


def kept() -> dict[str, Any]:
    accelerator = accelerator_of(LAYERS)
    user = tiny()
    model, optimizer = accelerator.prepare(user, adamw(user))
    own = accelerator.strategy.parameters(model)
    mine = sum(p.numel() for p in own)
    state = model.state_dict()
    gathered = accelerator.get_state_dict(accelerator.unwrap_model(model))
    # Another Accelerator finds it wrapped.
    other = accelerator_of(LAYERS)
    return {
        "taken over": other.prepare(model) is model and list(other.strategy.models) == [model],
        "unwraps": accelerator.unwrap_model(model) is user,
        "class": type(model).__name__,
        "attribute": model._no_split_modules,
        "share": mine / sum(p.numel() for p in tiny().parameters()),
        "held": all(any(p is o for o in own) for g in optimizer.param_groups for p in g["params"]),
        "again": accelerator.prepare(model) is model,
        "state": {name: value.shape for name, value in state.items()},
        "gathered": list(gathered),
        "saves": accelerator.strategy.saves_sharded,
        "type": str(accelerator.distributed_type),
    }


def test_the_model_is_torchs_wrapper(ranks: RankServer) -> None:
    """F13 as far as it goes: what torch's class does not have is the user's; every process holds half."""
    first, second = ranks(2, kept)
    for found in (first, second):
        assert all(found[fact] for fact in ("unwraps", "held", "again", "taken over"))
        assert (found["class"], found["attribute"]) == ("FullyShardedDataParallel", ("Block",))
        assert 0.4 < found["share"] < 0.6
        assert found["state"] == {name: value.shape for name, value in tiny().state_dict().items()}
        assert not found["saves"]
    assert first["gathered"] == list(tiny().state_dict())
    assert second["gathered"] == []


def loaded_once(kind: str) -> dict[str, torch.Tensor]:
    init = INITIALIZERS.get(kind)
    accelerator = accelerator_of({**LAYERS, "cpu_ram_efficient_loading": True, "param_init_fn": init})
    with torch.device("meta" if accelerator.process_index or kind != "once" else "cpu"):
        model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, next(batches(1))))
    optimizer.step()
    assert model.head.weight is model.embed.weight
    return whole(accelerator, model)


def test_only_rank_0_needs_the_weights(ranks: RankServer) -> None:
    """The others may have a model on the meta device; ties hold."""
    values = same_on_all(ranks(2, loaded_once, "once"))
    model = tiny()
    optimizer = adamw(model)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)
    filled = same_on_all(ranks(2, loaded_once, "filled"))
    assert torch.equal(filled["frozen.weight"], torch.full((8, 8), 0.25))
    with pytest.raises(RanksError, match=r"embed\.weight is on the meta device, on rank 0 too") as caught:
        ranks(2, loaded_once, "nowhere")
    assert caught.value.causing_kinds() == {"PrepareError"}


def forward_after_init(kind: str, original: bool) -> None:
    options = {**LAYERS, "use_orig_params": original, "param_init_fn": INITIALIZERS[kind]}
    accelerator = accelerator_of(options if original else {**options, "ignored_modules": "frozen"})
    with torch.device("meta"):
        model = tiny()
    accelerator.prepare(model)(next(batches(1)))


@pytest.mark.parametrize(("kind", "first"), UNFILLED.items())
@pytest.mark.parametrize("original", [True, False])
def test_values_that_a_param_init_fn_does_not_give(
    ranks: RankServer, kind: str, first: str, original: bool
) -> None:
    """Memory as it was is no value."""
    with pytest.raises(RanksError, match=rf"there are no values in {re.escape(first)}") as caught:
        ranks(2, forward_after_init, kind, original)
    assert caught.value.causing_kinds() == {"PrepareError"}


def buffer_without_values() -> None:
    model = tiny()
    model.register_buffer("scale", torch.empty(3, device="meta"))
    accelerator_of(LAYERS).prepare(model)


def test_a_buffer_without_values(ranks: RankServer) -> None:
    """As a parameter."""
    with pytest.raises(RanksError, match="scale is on the meta device, on rank 0 too") as caught:
        ranks(2, buffer_without_values)
    assert caught.value.causing_kinds() == {"PrepareError"}


def loaded_after_init() -> bool:
    accelerator = accelerator_of({**LAYERS, "param_init_fn": to_empty})
    with torch.device("meta"):
        model = tiny()
    model = accelerator.prepare(model)
    accelerator.strategy.load_model(model, tiny().state_dict())
    model(next(batches(1)))
    state = whole(accelerator, model)
    return all(torch.equal(state[name], value) for name, value in tiny().state_dict().items())


def test_values_by_a_load_after_a_param_init_fn(ranks: RankServer) -> None:
    """The usual to_empty leaves all of them to a load."""
    assert same_on_all(ranks(2, loaded_after_init))


def refused(case: str) -> str:
    """Return the error of a mistake that every rank makes."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from accelerate.core.errors import AccelerateError

    flat = {"use_orig_params": False} if case in ("frozen", "groups", "some") else {}
    more = {"frozen": {}, "groups": {"ignored_modules": "frozen"}, "some": {"ignored_modules": "frozen"}}
    own = {"values": {"sync_module_states": False}, "class": {"transformer_cls_names_to_wrap": ["Blok"]}}
    accelerator = accelerator_of({**LAYERS, **flat, **more.get(case, {}), **own.get(case, {})})
    model: Any = tiny(accelerator.process_index if case == "values" else 0)
    optimizer = adamw(model)
    if case == "types":
        model.layers[0].up.half()
    elif case == "ignored":
        accelerator.strategy.plugin.ignored_modules = "head"
    elif case == "groups":
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD([{"params": trained[:3]}, {"params": trained[3:]}], lr=0.1)
    elif case == "some":
        optimizer = torch.optim.SGD(model.layers[0].up.parameters(), lr=0.1)
    elif case == "wrapped":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif case == "strange":
        optimizer = adamw(tiny(3))
    try:
        accelerator.prepare(model, optimizer)
    except AccelerateError as error:
        return str(error)
    return ""


def test_what_prepare_refuses(ranks: RankServer) -> None:
    """Clear words on every rank, and nothing is changed by then."""
    for case, words in {
        "frozen": "frozen.weight is frozen, in one FSDP unit",
        "groups": "the parameters of one FSDP unit in several groups",
        "some": "or only some of them",
        "values": "the weights of rank 1 are not those of rank 0",
        "class": "did you mean 'Block'",
        "types": "parameters of several dtypes in one FSDP unit",
        "ignored": "ignored modules hold trained parameters",
        "wrapped": "wrapped in torch's FullyShardedDataParallel already",
        "strange": "holds parameters of no prepared model",
    }.items():
        said = same_on_all(ranks(2, refused, case))
        assert words in said, (case, said)


def saved_alone(training: bool) -> None:
    accelerator = accelerator_of(LAYERS)
    model = accelerator.prepare(tiny())
    if accelerator.is_main_process:
        model.state_dict()
    elif training:
        accelerator.backward(loss_of(model, next(batches(1))))
    else:
        accelerator.wait_for_everyone()


def test_a_state_that_one_rank_asks_for_is_no_endless_wait(ranks: RankServer) -> None:
    """C5, D3"""
    for training in (False, True):
        for outcome in ranks.outcomes(2, saved_alone, training, grace=30):
            assert outcome.status == "raised"
            assert training or "state_dict" in outcome.message


def told(options: dict[str, Any]) -> list[tuple[str, bool, str]]:
    accelerator = accelerator_of(options)
    accelerator.prepare(tiny())
    return sorted(
        (e.option, not e.is_failure, e.why) for e in accelerator.strategy.option_statuses(accelerator._models)
    )


def test_what_became_of_the_options(ranks: RankServer) -> None:
    """F15: read back from torch's records."""
    found = same_on_all(
        ranks(
            2,
            told,
            {
                **LAYERS, "sharding_strategy": "HYBRID_SHARD", "cpu_offload": True, "use_orig_params": True,
                "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False,
                "activation_checkpointing": True, "state_dict_type": "LOCAL_STATE_DICT",
            },
        )
    )  # fmt: skip
    said = {option: (fine, why) for option, fine, why in found}
    assert all(fine for fine, _ in said.values()), said
    assert "one replica, which is FULL_SHARD" in said["fsdp_sharding_strategy"][1]
    assert "compute on the host" in said["fsdp_offload_params"][1]
    assert said["fsdp_activation_checkpointing"][1] == "2 units"
    assert len(said) >= 9


def frozen_later(original: bool, freeze: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Change what trains after ``prepare``, and train on."""
    accelerator = accelerator_of({**LAYERS, "use_orig_params": original})
    model = tiny().requires_grad_(True)
    if original:
        model.layers[1].requires_grad_(freeze)
        model.embed.requires_grad_(freeze)
    said = ""
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for words in batches(3):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        optimizer.step()
        optimizer.zero_grad()
        if original:
            model.embed.requires_grad_(not freeze)
            model.layers[1].requires_grad_(not freeze)
            continue
        with pytest.raises(ValueError, match="flat") as error:
            model.embed.requires_grad_(False)
        said = str(error.value)
        model.layers.requires_grad_(True)  # whole units
    return accelerator.get_state_dict(model), said


@pytest.mark.parametrize("freeze", [True, False])
def test_what_trains_may_change_after_prepare(ranks: RankServer, freeze: bool) -> None:
    """G6: with the user's parameters it takes effect, to the numbers of one process."""
    model = tiny().requires_grad_(True)
    changing = (model.layers[1], model.embed)
    for part in changing:
        part.requires_grad_(freeze)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for words in batches(3):
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in changing:
            part.requires_grad_(not freeze)
    state, _ = ranks(2, frozen_later, True, freeze)[0]
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def test_what_trains_cannot_change_inside_a_flat_parameter(ranks: RankServer) -> None:
    """G6: refused by name, not ignored."""
    said = same_on_all([said for _, said in ranks(2, frozen_later, False, True)])
    assert said.startswith("embed.requires_grad_(False) after prepare, with use_orig_params=False")


def hooked() -> None:
    text = "hooks of layers.0.up.weight are not called under FSDP1"
    model: Any = tiny()
    model.layers[0].up.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.warns(UserWarning, match=text):
        accelerator_of(LAYERS).prepare(model, adamw(model))
    model = tiny()
    model, _ = accelerator_of(LAYERS).prepare(model, adamw(model))
    for name, parameter in model.named_parameters():
        if "layers.0" in name and name.endswith("up.weight"):
            parameter.register_hook(lambda gradient: gradient * 0)
    with pytest.warns(UserWarning, match=text):
        loss_of(model, next(batches(1)))


def test_hooks_of_parameters_are_warned_of(ranks: RankServer) -> None:
    """torch computes with views of a flat parameter: a mask of gradients was ignored without a word."""
    ranks(2, hooked)
