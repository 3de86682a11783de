"""Random states of two processes: different where they should be, equal where they were asked to be."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.world import rng
from accelerate.world import world as worlds
from tests.support.ranks import RankServer


def states() -> dict[str, Any]:
    rng.set_seed(10, device_specific=True)  # before the world is open
    early = torch.rand(3).tolist()
    world = worlds.open(cpu=True)
    rng.set_seed(10, device_specific=True)
    own = torch.rand(3).tolist()
    generator = torch.Generator().manual_seed(100 + world.rank)
    rng.synchronize_rng_states(["torch", "generator"], generator=generator)
    return {
        "early": early,
        "own": own,
        "torch": torch.rand(3).tolist(),
        "generator": torch.rand(3, generator=generator).tolist(),
        "order": torch.randperm(8, generator=rng.generator(10, "order", 0)).tolist(),
        "data": rng.derive(10, "data", world.rank, 0, 0),
    }


def test_ranks_differ_until_they_are_synchronized(ranks: RankServer) -> None:
    """A8: the order is equal on all ranks, augmentation differs."""
    first, second = ranks(2, states)
    assert first["early"] == first["own"]
    assert first["own"] != second["own"]
    assert first["data"] != second["data"]
    for shared in ("torch", "generator", "order"):
        assert first[shared] == second[shared]
    torch.manual_seed(10)
    assert torch.rand(3).tolist() == first["own"], "rank 0 keeps the seed as it is"
    assert torch.rand(3).tolist() == first["torch"], "and its generator, which the others got"
