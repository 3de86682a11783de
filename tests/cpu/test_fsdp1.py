"""Version 1 of sharding, torch's class around each part: the numbers and refusals of a prepared model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cpu.test_fsdp2 import Numbers, close, plain
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, loss_of, share, tiny

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


def parameters_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    return (losses, norms, parameters_of(state)), own if alone else None


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**LAYERS, "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
        {**LAYERS, "sharding_strategy": "SHARD_GRAD_OP", "limit_all_gathers": False},
        {**LAYERS, "sharding_strategy": "NO_SHARD"},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "sharding_strategy": "HYBRID_SHARD"},
        {**LAYERS, "activation_checkpointing": True, "cpu_offload": True, "backward_prefetch": "NO_PREFETCH"},
    ],
    ids=["whole", "layers", "grads", "copies", "size", "recomputed"],
)
def test_it_trains_to_the_numbers_of_one_process(
    ranks: RankServer, options: dict[str, Any], window: int
) -> None:
    """B7, F3: tied and frozen parameters, two groups, clipping by the true norm, accumulation."""
    ours, _ = same_on_all(ranks(2, trained, options, window))
    close(ours, plain(window), 1e-5)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_copies_of_shards_stay_equal(ranks: RankServer, strategy: str) -> None:
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
    return (losses, norms, parameters_of(whole(accelerator, model))), held


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


def overflowing() -> tuple[int, bool, bool]:
    from accelerate.utils import GradScalerKwargs

    accelerator = accelerator_of(LAYERS, "fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**24)])
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for words in batches(30):
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
    skipped, last, finite = same_on_all(ranks(2, overflowing))
    assert skipped > 0
    assert not last
    assert finite
