"""Checkpoints in an object store on several ranks: each uploads its own files, one commits."""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpoint import load, save
from accelerate.checkpoint.discovery import ProjectConfiguration
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.world import collective
from tests.cpu import test_checkpoint_ranks as local
from tests.support.objects import ObjectFileSystem, Objects, serving
from tests.support.ranks import RankServer, same_on_all


@pytest.fixture
def objects() -> Generator[Objects]:
    """A fresh object store in this process, for all ranks."""
    with serving() as served:
        yield served


def names(objects: Objects) -> list[str]:
    """Objects without the names of the folders of files."""
    return sorted(name.partition("bucket/")[2].replace(f"/{_folder(name)}/", "/") for name in objects.stored)


def _folder(name: str) -> str:
    return next((part for part in name.split("/") if part.startswith("files-")), "files-")


def save_here(url: str) -> tuple[str, tuple[float, float]]:
    return local.save_here(url)


def load_here(url: str, folder: str) -> tuple[Any, ...]:
    tempfile.tempdir = folder
    values = local.load_here(url)
    collective.barrier()
    return (*values, os.listdir(folder))


def test_two_ranks_save_and_load_one_checkpoint(ranks: RankServer, objects: Objects, tmp_path: Path) -> None:
    """One copy is fetched for the machine, and it is gone afterwards."""
    url = f"{objects.url}/run/c"
    saved = ranks(2, save_here, url)
    assert [path for path, _ in saved] == [url, url]
    assert names(objects) == [
        "run/c/manifest.json", "run/c/manifest.json", "run/c/model.safetensors", "run/c/optimizer.bin",
        "run/c/random_states_0.pkl", "run/c/random_states_1.pkl",
    ]  # fmt: skip
    objects.log.clear()
    loaded = ranks(2, load_here, url, str(tmp_path))
    step, weight, lr = same_on_all([values[:3] for values in loaded])
    assert (step, lr) == (3, 4.0)
    assert torch.equal(weight, local.parts(3).models[0].weight)
    assert [values[3] for values in loaded] == [draws for _, draws in saved]
    fetched = [line.rpartition("/")[2] for line in objects.log if "/files-" in line]
    assert sorted(fetched) == [
        "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl",
    ]  # fmt: skip
    assert [values[5] for values in loaded] == [[], []]


def test_another_number_of_ranks_fetches_what_it_has_use_for(
    ranks: RankServer, objects: Objects, tmp_path: Path
) -> None:
    url = f"{objects.url}/c"
    saved = ranks(2, save_here, url)
    objects.log.clear()
    (one,) = ranks(1, load_here, url, str(tmp_path))
    assert one[3] == saved[0][1]
    assert not any("random_states_1" in line for line in objects.log)
    three = ranks(3, load_here, url, str(tmp_path))
    assert "rank 2 and above are derived" in three[0][4][0]


def on_two_machines(url: str, folder: str) -> tuple[int, str]:
    rank = local.open_world().rank
    tempfile.tempdir = folder
    loaded = load.load(local.parts(8, rank), url, ranks=local.machine(rank))
    return loaded.step, local.outcome(lambda: load.load(CheckpointContents([torch.nn.Linear(5, 5)]), url))


def test_each_machine_fetches_for_its_own_ranks(ranks: RankServer, objects: Objects, tmp_path: Path) -> None:
    url = f"{objects.url}/c"
    ranks(2, save_here, url)
    zero, one = ranks(2, on_two_machines, url, str(tmp_path))
    assert zero[0] == one[0] == 3
    assert zero[1] == one[1]
    assert f"from {url}/files-" in zero[1]  # not the temporary copy
    assert os.listdir(tmp_path) == []


def save_numbered(url: str) -> list[str]:
    rank = local.open_world().rank
    settings = ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=2)
    paths = [save.save(local.parts(step, rank), project=settings) for step in range(4)]
    again = ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=2)
    loaded = load.load(local.parts(9, rank), project=again)
    paths += [loaded.path, save.save(local.parts(5, rank), project=again)]
    return [str(path).rpartition("/")[2] for path in paths]


def test_two_ranks_number_and_prune_together(ranks: RankServer, objects: Objects) -> None:
    """D4, D5."""
    folders = same_on_all(ranks(2, save_numbered, objects.url))
    assert folders == [*(f"checkpoint_{i}" for i in range(4)), "checkpoint_3", "checkpoint_4"]
    assert {name.split("/")[1] for name in names(objects)} == {"checkpoint_3", "checkpoint_4"}


def states_of_ranks(url: str) -> tuple[int, int, dict[str, int]]:
    return local.states_of_ranks(url)


def test_files_that_each_rank_writes_by_itself_are_uploaded_by_it(
    ranks: RankServer, objects: Objects
) -> None:
    zero, one = ranks(2, states_of_ranks, f"{objects.url}/c")
    assert (zero[:2], one[:2]) == ((0, 0), (1, 1))
    assert zero[2] == {
        "dl_state_dict.bin": 0, "dl_state_dict_rank1.bin": 1, "engine/rank0.txt": 0, "engine/rank1.txt": 1,
    }  # fmt: skip


def save_with_hook(url: str, same: bool) -> str:
    rank = local.open_world().rank

    def hook(weights: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}" if same else f"{rank}")

    return local.outcome(lambda: save.save(local.parts(1, rank), url, before=hook))


def test_a_file_that_two_ranks_write_differently_is_refused(ranks: RankServer, objects: Objects) -> None:
    url = f"{objects.url}/c"
    assert same_on_all(ranks(2, save_with_hook, url, True)) == "fine"
    text = same_on_all(ranks(2, save_with_hook, url, False))
    assert "rank 0 and rank 1 both wrote config.json, with different content" in text
    assert json.loads(objects.stored["bucket/c/manifest.json"])["files"]["config.json"]["size"] == 2


def load_damaged(url: str) -> tuple[str, bool]:
    return local.load_damaged(url)


@pytest.mark.parametrize("name", ["model.safetensors", "random_states_1.pkl", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "remove"])
def test_damage_is_the_same_error_on_all_ranks(
    ranks: RankServer, objects: Objects, name: str, how: str
) -> None:
    """D2: named by its URL."""
    url = f"{objects.url}/c"
    ranks(2, save_here, url)
    key = next(key for key in sorted(objects.stored, key=len) if key.endswith(name))
    data = bytearray(objects.stored.pop(key))
    data[len(data) // 2] ^= 1
    if how == "flip":
        objects.stored[key] = bytes(data)
    text, unchanged = same_on_all(ranks(2, load_damaged, url))
    assert text.startswith(("CheckpointError: rank", "CheckpointNotFoundError: rank"))
    assert f"{objects.url}/c" in text
    if (name, how) != ("manifest.json", "remove"):  # without it, it was never committed
        assert name in text
    assert unchanged


def save_in(url: str) -> str:
    rank = local.open_world().rank
    return local.outcome(lambda: save.save(local.parts(5, rank), url))


@pytest.mark.parametrize("at", [2, 6, 7])
def test_a_store_that_goes_away_is_the_same_error_on_all_ranks(
    ranks: RankServer, objects: Objects, at: int
) -> None:
    """D1: whoever makes the request that fails; what was there stays."""
    url = f"{objects.url}/c"
    ranks(2, save_here, url)
    objects.fail(at, "gone")
    text = same_on_all(ranks(2, save_in, url))
    objects.fail(0, "")
    assert value_at(url) == ((5, 6.0) if text == "fine" else (3, 4.0))
    assert text == "fine" or f"of 2: cannot write {url}/" in text
    assert at > 6 or text != "fine"
    assert same_on_all(ranks(2, save_in, url)) == "fine"
    assert len(objects.stored) == 6


def value_at(url: str) -> tuple[int, float]:
    fresh = local.parts(8)
    loaded = load.load(fresh, url, ranks=CheckpointRankGroup())
    return loaded.step, fresh.optimizers[0].param_groups[0]["lr"]


def save_and_die(url: str, victim: int, at: int) -> str:
    rank = local.open_world().rank
    if rank == victim:
        _die_at(at)
    return local.outcome(lambda: save.save(local.parts(5, rank), url))


def _die_at(at: int) -> None:
    """This process kills itself instead of making its n-th change."""
    ask, left = ObjectFileSystem.ask, [at]

    def deadly(self: Any, method: str, *args: Any, **kwargs: Any) -> bytes:
        left[0] -= method in ("PUT", "DELETE")
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(self, method, *args, **kwargs)

    ObjectFileSystem.ask = deadly  # type: ignore[method-assign]


@pytest.mark.parametrize(("victim", "at"), [(0, 6), (0, 7), (1, 1)])
def test_a_killed_rank_loses_nothing(ranks: RankServer, objects: Objects, victim: int, at: int) -> None:
    """D1, with SIGKILL; the next save succeeds and clears what was left."""
    url = f"{objects.url}/c"
    ranks(2, save_here, url)
    ends = ranks.outcomes(2, save_and_die, url, victim, at, grace=30)
    assert "SIGKILL" in ends[victim].message
    peer = ends[1 - victim]
    assert peer.status == "returned", peer
    assert "gone" in pickle.loads(peer.value or b"")
    # Rank 0 puts the lock, model, optimizer, random states, the inner manifest, then the one that commits.
    assert value_at(url) == ((5, 6.0) if victim == 0 and at > 6 else (3, 4.0))
    ranks(2, save_here, url)
    assert value_at(url) == (3, 4.0)
    assert len(objects.stored) == 6
