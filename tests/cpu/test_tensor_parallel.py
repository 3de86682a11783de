"""Layers shared by processes, alone and beside other dimensions of a mesh: the numbers of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.support.parity import (
    PLAN,
    ROWS,
    Numbers,
    adamw,
    close,
    decoder,
    loader,
    loss_of,
    plain,
)
from tests.support.ranks import RankServer

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "tensor": (2, {"tp_size": 2}),
    "copies": (2, {"dp_replicate_size": 2}),
    "tensor_and_shards": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "tensor_and_copies": (4, {"dp_replicate_size": 2, "tp_size": 2}),
    "copies_of_shards": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
}


def made(sizes: dict[str, Any], plan: dict[str, Any] | None = None, **more: Any) -> Any:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import TorchTensorParallelConfig

    handler = TorchTensorParallelConfig(plan=PLAN if plan is None else plan)
    config = ParallelismConfig(**sizes, tp_handler=handler if "tp_size" in sizes else None)
    return Accelerator(parallelism_config=config, **more)


def prepared(sizes: dict[str, int], window: int) -> Numbers:
    accelerator = made(sizes, gradient_accumulation_steps=window)
    share = accelerator.strategy.share
    # Every rank begins with other weights: those of rank 0 count.
    model = decoder(accelerator.process_index)
    model, optimizer, data = accelerator.prepare(model, adamw(model), loader(ROWS // share.count))
    losses, norms = [], []
    for batch in data:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    assert model.head.weight is model.embed.weight
    return losses, norms, accelerator.get_state_dict(model)


def both_windows(sizes: dict[str, int]) -> tuple[Numbers, Numbers]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Slicing a flattened dim")
        return prepared(sizes, 1), prepared(sizes, 4)


@pytest.mark.parametrize("mesh", MESHES)
def test_it_trains_to_the_numbers_of_one_process(ranks: RankServer, mesh: str) -> None:
    """The true norm at tp=1 and tp=2, also of what every process has whole (PAINS 48)."""
    processes, sizes = MESHES[mesh]
    every = ranks(processes, both_windows, sizes)
    for place, window in enumerate((1, 4)):
        first = every[0][place]
        close(first, plain(window), 1e-5)
        for rank in every[1:]:
            assert rank[place][:2] == first[:2]
            assert rank[place][2] == {}
