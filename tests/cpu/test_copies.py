"""A tensor that one rank has goes to the others, which do not know its shape; parameters of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import PartialState
from accelerate.core.errors import CollectiveError
from accelerate.utils.operations import GatheredParameters, copy_tensor_to_devices
from tests.support.ranks import RankServer, same_on_all

TENSORS = (
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).t(),
    torch.tensor(7),
    torch.zeros(0, 4, dtype=torch.int8),
)


def _copies(owner: int) -> list[torch.Tensor]:
    here = PartialState(cpu=True)
    return [copy_tensor_to_devices(t if here.process_index == owner else None) for t in TENSORS]


@pytest.mark.parametrize("owner", [0, 1])
def test_the_others_get_it(owner: int, ranks: RankServer) -> None:
    for sent, got in zip(TENSORS, same_on_all(ranks(2, _copies, owner)), strict=True):
        assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
        assert torch.equal(sent, got)


def _owners(owners: list[int]) -> str:
    here = PartialState(cpu=True)
    with pytest.raises(CollectiveError) as caught:
        copy_tensor_to_devices(TENSORS[0] if here.process_index in owners else None)
    return str(caught.value)


@pytest.mark.parametrize("owners", [[], [0, 1]])
def test_exactly_one_rank_has_it(owners: list[int], ranks: RankServer) -> None:
    assert f"but {len(owners)} of 2 have one" in same_on_all(ranks(2, _owners, owners))


def test_a_lone_process_keeps_it() -> None:
    assert copy_tensor_to_devices(TENSORS[0]) is TENSORS[0]
    with pytest.raises(CollectiveError):
        copy_tensor_to_devices()


def test_parameters_that_deepspeed_did_not_partition_are_whole() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for given in (parameter, [parameter], iter([parameter])):
        with GatheredParameters(given, modifier_rank=0):
            assert parameter.shape == (2,)


def test_partitioned_parameters_go_to_their_deepspeed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType, SimpleNamespace

    asked: list[Any] = []

    class Gathered:
        def __init__(self, params: Any, **given: Any) -> None:
            asked.append((params, given))

        def __enter__(self) -> None:
            asked.append("in")

        def __exit__(self, *_: object) -> None:
            asked.append("out")

    engine = ModuleType("deepspeed")
    engine.zero = SimpleNamespace(GatheredParameters=Gathered)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", engine)
    parameter = nn.Parameter(torch.ones(2))
    parameter.ds_id = 1  # type: ignore[attr-defined]
    # A generator, as of model.parameters(), can be read once only.
    with GatheredParameters(iter([parameter]), modifier_rank=1):
        asked.append("inside")
    with GatheredParameters([parameter], enabled=False):
        pass
    assert asked == [([parameter], {"modifier_rank": 1, "fwd_module": None}), "in", "inside", "out"]
