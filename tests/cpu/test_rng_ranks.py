"""Random states of two processes: different where they should be, equal where they were asked to be."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import set_seed, synchronize_rng_states
from tests.support.ranks import RankServer


class Augmented(Dataset[tuple[int, float]]):
    """Eight samples: their index, and a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def states() -> dict[str, Any]:
    set_seed(10, device_specific=True)  # before the world is open
    early = torch.rand(3).tolist()
    accelerator = Accelerator(cpu=True)
    set_seed(10, device_specific=True)
    own = torch.rand(3).tolist()
    generator = torch.Generator().manual_seed(100 + accelerator.process_index)
    synchronize_rng_states(["torch", "generator"], generator=generator)
    found: dict[str, Any] = {
        "early": early,
        "own": own,
        "torch": torch.rand(3).tolist(),
        "generator": torch.rand(3, generator=generator).tolist(),
    }
    set_seed(10, device_specific=True)
    loader = accelerator.prepare(DataLoader(Augmented(), batch_size=2, shuffle=True))
    indices, data = zip(*loader, strict=True)
    return {**found, "indices": torch.cat(indices).tolist(), "data": torch.cat(data).tolist()}


def test_ranks_differ_until_they_are_synchronized(ranks: RankServer) -> None:
    """A8: the order is equal on all ranks, augmentation differs."""
    first, second = ranks(2, states)
    assert first["early"] == first["own"]
    assert first["own"] != second["own"]
    assert not set(first["data"]) & set(second["data"])
    assert sorted(first["indices"] + second["indices"]) == list(range(8)), "the order is the same"
    for shared in ("torch", "generator"):
        assert first[shared] == second[shared]
    torch.manual_seed(10)
    assert torch.rand(3).tolist() == first["own"], "rank 0 keeps the seed as it is"
    assert torch.rand(3).tolist() == first["torch"], "and its generator, which the others got"
