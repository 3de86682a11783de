"""Version 1 of sharding, torch's class around each part: the numbers, files and refusals of a prepared model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cpu.test_fsdp2 import Numbers, close, plain
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_models import Tiny, adamw, batches, loss_of, share, tiny

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
