"""Checkpoints that one rank reads for all, and models whose weights are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator, PartialState, init_empty_weights, load_checkpoint_in_model
from tests.support.ranks import RankServer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def loaded(folder: str, how: str, broadcast: bool) -> dict[str, Any]:
    here = PartialState(cpu=True)
    path = Path(folder)
    if broadcast and here.process_index:
        path = path / "not" / "here"
    if how == "meta":
        with init_empty_weights():
            model = net()
    else:
        torch.manual_seed(here.process_index + 5)
        model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if how == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (here.num_processes,)))
    load_checkpoint_in_model(model, path, broadcast_from_rank0=broadcast)
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}


@pytest.mark.parametrize("how", ["meta", "memory", "sharded"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_all_ranks_get_the_weights(tmp_path: Path, ranks: RankServer, how: str, broadcast: bool) -> None:
    """With ``broadcast_from_rank0`` the files are on the machine of rank 0 only."""
    expected = net().state_dict()
    Accelerator(cpu=True).save_model(net(), tmp_path, max_shard_size=100)
    for found in ranks(2, loaded, str(tmp_path), how, broadcast):
        torch.testing.assert_close(found, dict(expected))


class Doubled(nn.Linear):
    """Doubles what files of its version hold."""

    _version = 2

    def _load_from_state_dict(  # pyright: ignore
        self, state_dict: Any, prefix: str, metadata: Any, *args: Any
    ) -> None:
        if metadata.get("version") == 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


def doubled(folder: str) -> torch.Tensor:
    PartialState(cpu=True)
    model: Any = nn.Sequential(Doubled(2, 2, bias=False))
    load_checkpoint_in_model(model, Path(folder, "m.bin"), broadcast_from_rank0=True)
    return model[0].weight.detach()


def test_all_ranks_know_the_versions_of_modules(tmp_path: Path, ranks: RankServer) -> None:
    state = nn.Sequential(Doubled(2, 2, bias=False)).state_dict()
    torch.save(state, tmp_path / "m.bin")
    for weight in ranks(2, doubled, str(tmp_path)):
        assert torch.equal(weight, state["0.weight"] * 2)


def parts(folder: str) -> dict[str, Any]:
    here = PartialState(cpu=True)
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (here.num_processes,)))
    weight = torch.arange(24.0).view(6, 4)
    mine = weight.chunk(here.num_processes)[here.process_index]
    own = Path(folder, str(here.process_index))
    own.mkdir()
    torch.save({"weight": mine}, own / "pytorch_model.bin")
    load_checkpoint_in_model(model, own, full_state_dict=False)
    return {"weight": model.weight.full_tensor()}  # pyright: ignore[reportAttributeAccessIssue]


def test_each_rank_loads_its_part(tmp_path: Path, ranks: RankServer) -> None:
    for found in ranks(2, parts, str(tmp_path)):
        torch.testing.assert_close(found["weight"], torch.arange(24.0).view(6, 4))


def missing(folder: str) -> str:
    PartialState(cpu=True)
    with pytest.raises(RuntimeError) as caught:
        load_checkpoint_in_model(net(), Path(folder, "no"), broadcast_from_rank0=True)
    return str(caught.value)


def test_all_ranks_learn_that_there_are_no_files(tmp_path: Path, ranks: RankServer) -> None:
    for text in ranks(2, missing, str(tmp_path)):
        assert "there is no file or folder" in text
