"""Checkpoints behind URLs: the same promises as in a folder, where nothing can be renamed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from accelerate import Accelerator
from accelerate.checkpoint import checkpoint_maintenance, discovery, load, save, save_lock
from accelerate.checkpoint.discovery import parse_address, split_address
from accelerate.checkpoint.file_access import CheckpointExistsError, CheckpointNotFoundError
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.remote import RemoteCheckpointStorage
from accelerate.checkpoint.save_lock import LockOwner, PlaceInUseError, RemoteSaveLock
from accelerate.core.errors import CheckpointError, MissingExtraError, SettingError
from accelerate.utils import ProjectConfiguration
from tests.null.test_checkpoint_commit import Box, box, value_of
from tests.support.long_run import LONG_RUN, select_cases
from tests.support.objects import ObjectFileSystem, Objects, serving


@pytest.fixture
def objects() -> Generator[Objects]:
    """A fresh object store."""
    with serving() as served:
        yield served


class Shaky(MemoryFileSystem):
    """fsspec's own store in memory, which shows half files and has real folders; fails at its n-th change."""

    protocol = "shaky"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class above
    pseudo_dirs = [""]  # noqa: RUF012
    at, changes, how = 0, 0, ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("shaky://", "memory://"))

    @classmethod
    def fail(cls, at: int, how: str) -> None:
        cls.changes, cls.at, cls.how = 0, at, how

    @classmethod
    @contextmanager
    def change(cls) -> Generator[None]:
        cls.changes += 1
        wrong = cls.changes == cls.at or (cls.how == "gone" and 0 < cls.at <= cls.changes)
        if wrong and cls.how != "unanswered":
            raise ConnectionError("the store does not answer")
        yield
        if wrong:
            raise ConnectionError("the store does not answer")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **kwargs)
        with self.change():
            file = super()._open(path, mode, **kwargs)
        if "data" not in kwargs:
            file.write(b"half")
            with self.change():  # a half file is left
                file.seek(0)
                file.truncate()
        return file

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        for name in self.find(path):
            with self.change():
                super().rm(name)
        if recursive and self.exists(path):
            super().rm(path, recursive=True)


fsspec.register_implementation("shaky", Shaky, clobber=True)


@pytest.fixture(params=["objects", "shaky"])
def remote(request: pytest.FixtureRequest) -> Generator[Remote]:
    """Two kinds of remote stores, empty."""
    if request.param == "shaky":
        Shaky.store.clear()
        Shaky.pseudo_dirs[:] = [""]
        Shaky.fail(0, "")
        yield Remote("shaky://bucket", Shaky)
        return
    with serving() as served:
        yield Remote(served.url, served)


class Remote:
    """A store, seen past the checkpoints.

    Attributes:
        url: of its bucket.
        control: sets what fails, and counts.
    """

    def __init__(self, url: str, control: Any) -> None:
        self.url, self.control = url, control
        self.fs, self.base = fsspec.core.url_to_fs(url)

    def names(self) -> list[str]:
        """All objects, relative to the bucket."""
        self.fs.invalidate_cache()
        return sorted(name.strip("/").removeprefix("bucket/") for name in self.fs.find(self.base))

    def key(self, name: str) -> str:
        return f"{self.base}/{name}"

    def files_folder(self, checkpoint: str) -> str:
        """The folder with a checkpoint's files."""
        return (
            f"{checkpoint}/{json.loads(self.fs.cat_file(self.key(f'{checkpoint}/manifest.json')))['folder']}"
        )


def project(url: str, limit: int | None = None, iteration: int = 0) -> ProjectConfiguration:
    return ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=limit, iteration=iteration)


# ---------------------------------------------------------------- the crash law


class Scenario:
    """A bucket with an older checkpoint, and a way to save the next one and to load the newest."""

    def __init__(self, name: str, remote: Remote, root: str) -> None:
        self.name, self.remote, self.root = name, remote, root
        self.url = f"{remote.url}/{root}"
        self.limit = 1 if name == "limited" else None
        if name in ("fresh", "replaced"):
            save.save(box(1), f"{self.url}/{'old' if name == 'fresh' else 'run'}")
            remote.fs.pipe_file(remote.key(f"{root}/run/notes.txt"), b"mine")
        else:
            save.save(box(1), project=project(self.url, self.limit))

    def save(self, value: float = 2) -> None:
        if self.name in ("fresh", "replaced"):
            save.save(box(value), f"{self.url}/run")
        else:
            settings = project(self.url, self.limit, iteration=1)
            load.load(box(), project=settings)
            save.save(box(value), project=settings)

    def load(self) -> float:
        if self.name == "fresh":
            try:
                return value_of(lambda parts: load.load(parts, f"{self.url}/run"))
            except CheckpointNotFoundError:
                return value_of(lambda parts: load.load(parts, f"{self.url}/old"))
        if self.name == "replaced":
            return value_of(lambda parts: load.load(parts, f"{self.url}/run"))
        return value_of(lambda parts: load.load(parts, project=project(self.url, self.limit)))

    def leftovers(self) -> list[str]:
        """Folders of files that no manifest names."""
        names = [name for name in self.remote.names() if name.startswith(f"{self.root}/")]
        folders = {name.rpartition("/")[0] for name in names if "/files-" in name}
        owners = {folder.rpartition("/")[0] for folder in folders}
        named = {self.remote.files_folder(owner) for owner in owners if f"{owner}/manifest.json" in names}
        return sorted(folders - named)


@pytest.mark.parametrize(
    ("remote", "name", "how"),
    select_cases(
        product(
            ("objects", "shaky"),
            ("fresh", "replaced", "numbered", "limited"),
            ("gone", "refused", "unanswered"),
        ),
        [
            *(("objects", "fresh", "gone"), ("shaky", "fresh", "refused")),
            *(("objects", "replaced", "refused"), ("shaky", "replaced", "gone")),
            *(("objects", "replaced", "unanswered"), ("shaky", "numbered", "gone")),
            *(("objects", "limited", "gone"), ("shaky", "limited", "refused")),
        ],
    ),
    indirect=["remote"],
)
def test_a_save_that_stops_at_any_change_leaves_the_old_or_the_new_checkpoint(
    remote: Remote, name: str, how: str
) -> None:
    """D1: at every object that is put or deleted; then the next save succeeds and leaves nothing behind."""
    seen: set[float] = set()
    every = LONG_RUN or remote.control is Shaky  # the object store by HTTP at every second change
    for at in range(1, 1000, 1 if every else 2):
        scenario = Scenario(name, remote, str(at))
        remote.control.fail(at, how)
        failed = False
        try:
            scenario.save()
        except CheckpointError:
            failed = True
        changes = remote.control.changes
        remote.control.fail(0, "")
        value = scenario.load()
        seen.add(value)
        assert value == (1 if failed else 2), "an error means that nothing has changed"
        if failed and how == "refused":
            assert scenario.leftovers() == []
        if changes < at:
            break
        scenario.save(3)
        assert scenario.load() == 3
        assert scenario.leftovers() == []
        if name in ("fresh", "replaced"):
            assert remote.fs.cat_file(remote.key(f"{at}/run/notes.txt")) == b"mine"
    assert at >= 7
    assert seen == {1.0, 2.0}


def test_a_folder_of_files_that_a_manifest_names_is_never_removed(remote: Remote) -> None:
    """Also by a save that was told that its last request had failed."""
    url = save.save(box(1), f"{remote.url}/a")
    store, name = discovery.locate(url)
    with pytest.raises(CheckpointError, match="it is a committed checkpoint"):
        store.remove(remote.files_folder("a"))
    assert value_of(lambda parts: load.load(parts, url)) == 1
    assert store.leftovers(name) == []


# ---------------------------------------------------------------- names, numbers, retention


def test_a_checkpoint_is_its_url(remote: Remote) -> None:
    url = f"{remote.url}/run/last"
    assert save.save(box(1), url + "/") == url
    assert save.save(box(2), url) == url
    loaded = load.load(box(), url)
    assert (loaded.path, loaded.step) == (url, 2)
    folder = remote.files_folder("run/last")
    assert [n for n in remote.names() if not n.startswith(folder)] == ["run/last/manifest.json"]
    assert f"{folder}/model.safetensors" in remote.names()
    assert f"{folder}/manifest.json" in remote.names()
    # The folder of files is a checkpoint in itself.
    assert load.load(box(), f"{remote.url}/{folder}").step == 2


def test_numbers_go_on_and_the_oldest_go(remote: Remote) -> None:
    """D4, D5: 9, 10, 11 are numbers, not text."""
    settings = project(remote.url, limit=3)
    for step in range(12):
        assert save.save(box(step), project=settings) == f"{remote.url}/checkpoints/checkpoint_{step}"
    owners = {name.split("/")[1] for name in remote.names()}
    assert owners == {"checkpoint_9", "checkpoint_10", "checkpoint_11"}
    again = project(remote.url, limit=3)
    loaded = load.load(box(), project=again)
    assert (loaded.step, loaded.iteration, again.iteration) == (11, 11, 12)
    with pytest.raises(CheckpointExistsError, match=r"checkpoint_9 exists already"):
        save.save(box(), project=project(remote.url, iteration=9))


def test_files_of_all_checkpoints_are_listed_by_the_first_save_of_a_run_alone(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes what interrupted saves have left. The later ones would list more files each time."""
    listed: list[str] = []
    find = ObjectFileSystem.find

    def listing(self: Any, path: str, *args: Any, **options: Any) -> Any:
        listed.append(path)
        return find(self, path, *args, **options)

    monkeypatch.setattr(ObjectFileSystem, "find", listing)
    settings = project(objects.url)
    save.save(box(0), project=settings)
    assert "bucket/checkpoints" in listed
    listed.clear()
    save.save(box(1), project=settings)
    load.load(box(), project=project(objects.url))
    assert listed
    assert "bucket/checkpoints" not in listed
    objects.fail(3, "gone")
    with pytest.raises(CheckpointError):
        save.save(box(2), project=settings)
    objects.fail(0, "")
    assert any("/checkpoint_2/files-" in name for name in objects.stored)
    settings.iteration = 3
    save.save(box(3), project=settings)
    assert "bucket/checkpoints" in listed
    assert not any("/checkpoint_2/" in name for name in objects.stored)


def test_the_newest_committed_one_is_taken_and_the_others_are_named(remote: Remote) -> None:
    """D1: a removed manifest, a damaged one, a missing and a short file, and a stranger's folder."""
    settings = project(remote.url, iteration=8)
    for step in range(8, 13):
        save.save(box(step), project=settings)
    base = "checkpoints/checkpoint_"
    remote.fs.rm(remote.key(f"{base}12/manifest.json"))
    remote.fs.pipe_file(remote.key(f"{base}11/manifest.json"), b"{}")
    remote.fs.rm(remote.key(f"{remote.files_folder(f'{base}10')}/optimizer.bin"))
    remote.fs.pipe_file(remote.key(f"{remote.files_folder(f'{base}9')}/optimizer.bin"), b"half")
    remote.fs.pipe_file(remote.key("checkpoints/logs/a.txt"), b"mine")
    loaded = load.load(box(), project=project(remote.url))
    assert loaded.step == 8
    reasons = {text.partition(" ")[0]: text for text in loaded.ignored}
    assert set(reasons) == {f"checkpoint_{n}" for n in (9, 10, 11, 12)}
    assert "interrupted" in reasons["checkpoint_12"]
    assert "manifest.json is damaged" in reasons["checkpoint_11"]
    assert "optimizer.bin is missing" in reasons["checkpoint_10"]
    assert "optimizer.bin has 4 bytes" in reasons["checkpoint_9"]


def test_a_copy_of_a_remote_checkpoint_is_a_checkpoint(remote: Remote, tmp_path: Path) -> None:
    """A checkpoint as ``aws s3 cp --recursive`` uploads it; replacing it leaves only the user's file."""
    save.save(box(3), f"{remote.url}/a")
    remote.fs.pipe_file(remote.key("a/notes.txt"), b"mine")
    for name in remote.names():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(remote.fs.cat_file(remote.key(name)))
    loaded = load.load(box(), tmp_path / "a")
    assert (loaded.path, loaded.step) == (tmp_path / "a", 3)
    assert discovery.latest_checkpoint(tmp_path)[0].name == "a"
    save.save(box(4), tmp_path / "a")
    assert not [name for name in os.listdir(tmp_path / "a") if name.startswith("files-")]
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert load.load(box(), tmp_path / "a").step == 4


def test_a_local_checkpoint_that_was_uploaded_is_one(remote: Remote, tmp_path: Path) -> None:
    """It is replaced like any other, and nothing of it stays."""
    path = save.save(box(3), tmp_path / "a")
    assert isinstance(path, Path)
    for file in path.iterdir():
        remote.fs.pipe_file(remote.key(f"up/{file.name}"), file.read_bytes())
    assert value_of(lambda parts: load.load(parts, f"{remote.url}/up")) == 3
    save.save(box(4), f"{remote.url}/up")
    assert value_of(lambda parts: load.load(parts, f"{remote.url}/up")) == 4
    folder = remote.files_folder("up")
    assert [n for n in remote.names() if not n.startswith(folder)] == ["up/manifest.json"]


def test_without_a_manifest_a_remote_folder_counts_only_when_it_is_named(
    remote: Remote, tmp_path: Path
) -> None:
    parts = box(3)
    parts.rng = True
    path = save.save(parts, tmp_path / "a")
    for file in Path(path).iterdir():
        if file.name != "manifest.json":
            remote.fs.pipe_file(remote.key(f"up/checkpoint_0/{file.name}"), file.read_bytes())
    assert load.load(parts, f"{remote.url}/up/checkpoint_0").step == 3
    with pytest.raises(CheckpointNotFoundError, match="without which it is not known to be whole"):
        discovery.latest_checkpoint(f"{remote.url}/up")


# ---------------------------------------------------------------- reading


def test_a_flipped_byte_is_found_and_nothing_is_changed(remote: Remote) -> None:
    """D2: the error names the URL of the file, not a temporary copy."""
    url = save.save(box(1), f"{remote.url}/a")
    file = f"{remote.files_folder('a')}/optimizer.bin"
    data = bytearray(remote.fs.cat_file(remote.key(file)))
    data[len(data) // 2] ^= 1
    remote.fs.pipe_file(remote.key(file), bytes(data))
    fresh = box(7)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load.load(fresh, url)
    assert caught.value.what == f"{remote.url}/{file} is damaged"
    assert "its digest is" in caught.value.why
    assert fresh.models[0].value == 7
    # ``accelerate checkpoint verify`` fetches each file.
    checks = checkpoint_maintenance.check_files(
        checkpoint_maintenance.open_checkpoints(str(url)).candidates[0]
    )
    assert [(damage.name, damage.state) for damage in checks] == [("optimizer.bin", "damaged")]


def test_a_missing_object_is_named(remote: Remote) -> None:
    """D2"""
    url = save.save(box(1), f"{remote.url}/a")
    remote.fs.rm(remote.key(f"{remote.files_folder('a')}/model.safetensors"))
    with pytest.raises(CheckpointError, match=r"(?s)/a is damaged.*model.safetensors is missing"):
        load.load(box(), url)


def test_a_checkpoint_that_is_not_there_is_named(remote: Remote) -> None:
    save.save(box(1), f"{remote.url}/run/a")
    with pytest.raises(CheckpointNotFoundError, match=r"(?s)no folder .*/run/b.*/run holds: a"):
        load.load(box(), f"{remote.url}/run/b")
    with pytest.raises(CheckpointNotFoundError, match=r"(?s)/run is not a checkpoint.*newest.*/run/a"):
        load.load(box(), f"{remote.url}/run")


def test_what_is_fetched_is_what_is_needed_and_goes_again(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random states of this rank only; weights alone for who asks for weights alone; no file stays."""
    parts = box(1)
    parts.rng = True
    url = str(save.save(parts, f"{objects.url}/a"))
    folder = f"a/{json.loads(objects.stored['bucket/a/manifest.json'])['folder']}"
    _add_rank(objects, folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[str] = []
    objects.log.clear()
    load.load(parts, url, before=lambda path, manifest: seen.extend(os.listdir(path)))
    fetched = {line.rpartition("/")[2] for line in objects.log if line.startswith(f"GET bucket/{folder}/")}
    assert "random_states_0.pkl" in fetched
    assert not {"random_states_1.pkl", "rank_state_0_1.bin"} & fetched
    assert set(seen) == fetched
    assert os.listdir(tmp_path) == []
    objects.log.clear()
    weights = CheckpointContents([Box()], custom=[Box()])
    load.load(weights, url)
    assert weights.models[0].value == 1
    assert not any("optimizer.bin" in line for line in objects.log)
    assert os.listdir(tmp_path) == []


def test_shards_of_an_optimizer_are_not_fetched_where_only_a_model_is_prepared(objects: Objects) -> None:
    def prepared(with_optimizer: bool) -> tuple[Accelerator, torch.nn.Module]:
        model = torch.nn.Linear(2, 2)
        others = [torch.optim.AdamW(model.parameters())] if with_optimizer else []
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, *others)
        return accelerator, model

    accelerator, model = prepared(with_optimizer=True)
    url = accelerator.save_state(f"{objects.url}/a", sharded=True)
    for with_optimizer in (False, True):
        accelerator, fresh = prepared(with_optimizer)
        objects.log.clear()
        accelerator.load_state(url)
        assert torch.equal(fresh.weight, model.weight)
        fetched = {line.partition("/files-")[2].partition("/")[2] for line in objects.log}
        assert {"pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"} <= fetched
        assert any(name.startswith("optimizer_0/") for name in fetched) == with_optimizer


def _add_rank(objects: Objects, folder: str) -> None:
    """Files of another rank, in both manifests."""
    from dataclasses import replace

    from accelerate.checkpoint import layout

    names = ("random_states_1.pkl", "rank_state_0_1.bin")
    for name in names:
        objects.stored[f"bucket/{folder}/{name}"] = objects.stored[f"bucket/{folder}/random_states_0.pkl"]
    for name in ("bucket/a/manifest.json", f"bucket/{folder}/manifest.json"):
        committed = layout.decode_manifest(objects.stored[name], name)
        files = {**committed.files, **dict.fromkeys(names, committed.files["random_states_0.pkl"])}
        objects.stored[name] = layout.encode_manifest(replace(committed, files=files))


def test_a_local_disk_that_is_too_small_is_told_before_anything_is_fetched(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = save.save(box(1), f"{objects.url}/a")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=r"(?s)are needed in .*are free there.*set TMPDIR"):
        load.load(box(), url)
    assert os.listdir(tmp_path) == []


def test_files_of_hooks_and_parts_are_uploaded(remote: Remote, tmp_path: Path) -> None:
    """Files that hooks write into the given folder are committed, verified and fetched like the rest."""

    class Engine:
        name = "engine"
        text = ""

        def save(self, folder: Path) -> list[str]:
            (folder / "engine").mkdir()
            (folder / "engine" / "a.txt").write_text("state")
            return ["engine/a.txt"]

        def load(self, folder: Path) -> None:
            self.text = (folder / "engine" / "a.txt").read_text()

    def hook(weights: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    engine, parts, seen = Engine(), box(1), []
    parts.own_files = [engine]
    url = save.save(parts, f"{remote.url}/a", before=hook)
    parts.own_files = [other := Engine()]
    loaded = load.load(
        parts, url, before=lambda folder, manifest: seen.append((folder / "config.json").read_text())
    )
    assert (other.text, seen) == ("state", ["{}"])
    assert loaded.manifest is not None
    assert {"engine/a.txt", "config.json"} <= loaded.manifest.files.keys()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("how", "why", "fix"),
    [
        ("refused", "ServerError: the store answers 503", ""),
        ("forbidden", "AccessDenied", "credentials"),
    ],
)
def test_an_error_of_the_store_names_the_url(objects: Objects, how: str, why: str, fix: str) -> None:
    objects.fail(2, how)  # the first object is the lock
    with pytest.raises(CheckpointError) as caught:
        save.save(box(1), f"{objects.url}/a")
    assert caught.value.what.startswith(f"cannot write {objects.url}/a/files-")
    assert why in caught.value.why
    assert fix in caught.value.fix
    assert objects.stored == {}


def test_a_store_that_is_not_reached_is_named() -> None:
    from tests.support.free_ports import free_port

    url = f"objects://127.0.0.1:{free_port()}/bucket/a"
    for call in (lambda: save.save(box(1), url), lambda: load.load(box(1), url)):
        with pytest.raises(CheckpointError, match=r"(?s)cannot .*objects://.*ConnectionRefused") as caught:
            call()
        assert "look at the connection" in caught.value.fix


def test_a_bucket_that_is_not_there_is_not_made(objects: Objects) -> None:
    url = objects.url.replace("/bucket", "/bukcet")
    with pytest.raises(CheckpointError, match=r"(?s)cannot make the folder .*/bukcet/a.*typing error"):
        save.save(box(1), f"{url}/a")
    with pytest.raises(CheckpointNotFoundError, match="no folder"):
        load.load(box(1), f"{url}/a")


def test_a_driver_that_is_not_installed_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("s3fs", "gcsfs", "paramiko"):
        monkeypatch.setitem(sys.modules, package, None)
    for url, package in (("s3://b/a", "s3fs"), ("gs://b/a", "gcsfs"), ("sftp://host/a", "paramiko")):
        with pytest.raises(MissingExtraError) as caught:
            save.save(box(1), url)
        assert caught.value.fix == f"pip install {package}"
        assert url.partition("://")[0] in caught.value.what
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError) as caught:
        load.load(box(1), "s3://b/a")
    assert caught.value.fix == "pip install fsspec"


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)cannot open s4://b.*not known.*typing error"):
        save.save(box(1), "s4://b/a")


def test_a_url_that_became_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a local folder named ``s3:``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"(?s)s3:/bucket/run is a URL that has become a path"):
        save.save(box(1), Path("s3://bucket/run"))
    assert os.listdir(tmp_path) == []


def test_a_url_without_a_folder_is_refused() -> None:
    with pytest.raises(CheckpointNotFoundError, match="names no folder"):
        save.save(box(1), "s3://")


def test_files_are_local_whatever_they_are_called(tmp_path: Path) -> None:
    path = save.save(box(5), f"file://{tmp_path}/a")
    assert path == tmp_path / "a"
    assert "model.safetensors" in os.listdir(tmp_path / "a")
    assert load.load(box(), f"file://{tmp_path}/a").step == 5
    assert discovery.latest_checkpoint(f"file://{tmp_path}")[0].name == "a"
    assert split_address(parse_address("~/a")) == (Path.home().resolve(), "a")
    assert parse_address("file:///C:/runs") == Path("/C:/runs")
    with patch.object(discovery, "os", SimpleNamespace(name="nt", fspath=os.fspath, PathLike=os.PathLike)):
        assert str(parse_address("file:///C:/runs")) == "C:/runs"
        assert str(parse_address("file:////server/runs")) == "//server/runs"


def test_a_machine_has_no_remote_store_of_its_own(remote: Remote) -> None:
    settings = ProjectConfiguration(save_on_each_node=True)
    with pytest.raises(CheckpointError, match=r"(?s)one place for all machines.*leave out save_on_each_node"):
        save.save(box(1), f"{remote.url}/a", project=settings)
    assert remote.names() == []


def test_damage_to_what_is_replaced_is_no_hindrance(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    url = save.save(box(1), f"{remote.url}/a")
    remote.fs.pipe_file(remote.key("a/manifest.json"), b"{}")
    with caplog.at_level(logging.WARNING):
        save.save(box(2), url)
    assert value_of(lambda parts: load.load(parts, url)) == 2
    assert len({name.split("/")[1] for name in remote.names()}) == 2


# ---------------------------------------------------------------- two trainings in one place


def put_lock(remote: Remote, **changes: Any) -> str:
    """Put the lock of another training, which runs on this host, on the checkpoint ``run``."""
    owner = asdict(LockOwner.current("another")) | {"pid": os.getppid()} | changes
    remote.fs.pipe_file(remote.key("a/.run.lock-another"), json.dumps(owner).encode())
    return f"{remote.url}/a/.run.lock-another"


def test_the_second_of_two_trainings_is_refused_by_name(remote: Remote) -> None:
    """G14: what the first is uploading stays; once the first is gone, nothing waits."""
    save.save(box(1), f"{remote.url}/a/run")
    remote.fs.pipe_file(remote.key("a/run/files-0123456789ab/half.bin"), b"half")
    lock = put_lock(remote)
    with pytest.raises(PlaceInUseError, match=f"another training is saving to {remote.url}/a/run") as caught:
        save.save(box(2), f"{remote.url}/a/run")
    assert f"process {os.getppid()} on {socket.gethostname()}" in str(caught.value)
    assert lock in str(caught.value)
    assert "a/run/files-0123456789ab/half.bin" in remote.names()
    assert value_of(lambda parts: load.load(parts, f"{remote.url}/a/run")) == 1
    save.save(box(2), f"{remote.url}/a/beside")
    put_lock(remote, since="2001-01-01T00:00:00+00:00")  # its process is gone
    start = time.perf_counter()
    save.save(box(3), f"{remote.url}/a/run")
    assert time.perf_counter() - start < save_lock.HEARTBEAT, "a restart waited"
    assert not [name for name in remote.names() if "lock" in name or "0123456789ab" in name]


@pytest.mark.parametrize("beats", [True, False])
def test_a_lock_of_another_host_counts_while_it_is_written(
    remote: Remote, beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(save_lock, "DEAD_AFTER", 0.5)
    put_lock(remote, host="elsewhere", beat=0)
    timer = threading.Timer(0.2, put_lock, (remote,), {"host": "elsewhere", "beat": 1})
    if not beats:
        save.save(box(1), f"{remote.url}/a/run")
        return
    timer.start()
    with pytest.raises(PlaceInUseError, match=r"process \d+ on elsewhere"):
        save.save(box(1), f"{remote.url}/a/run")
    timer.join()


def test_one_of_many_takes_the_lock(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.02)
    monkeypatch.setattr(save_lock, "DEAD_AFTER", 5.0)
    store = RemoteCheckpointStorage(f"{remote.url}/a")
    locks = [RemoteSaveLock(store, "run", f"{number}") for number in range(4)]
    for lock in locks:
        lock.owner = dataclasses.replace(lock.owner, host=f"host {lock.name}")

    def take(lock: RemoteSaveLock) -> bool:
        with contextlib.suppress(PlaceInUseError):
            lock.acquire()
            return True
        return False

    with ThreadPoolExecutor(len(locks)) as pool:
        taken = list(pool.map(take, locks))
    assert sum(taken) <= 1
    assert [name for name in remote.names() if "lock" in name] == [
        f"a/.run.lock-{number}" for number, won in enumerate(taken) if won
    ]
    for lock in locks:
        lock.release()
    assert not remote.names()


def test_a_heartbeat_under_way_does_not_put_the_lock_back(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.01)
    store = RemoteCheckpointStorage(f"{remote.url}/a")
    writing, written, puts, put = threading.Event(), threading.Event(), count(), store.put

    def put_slowly(name: str, data: bytes) -> None:
        if next(puts):
            writing.set()
            time.sleep(0.2)
        put(name, data)
        if writing.is_set():
            written.set()

    monkeypatch.setattr(store, "put", put_slowly)
    with RemoteSaveLock(store, "run", "slow"):
        assert writing.wait(30)
    assert written.wait(30)
    assert not remote.names()


class ReturningLockStore:
    """A store with the lock of a save that gives way as it is looked at, and is there again at once."""

    def __init__(self) -> None:
        self.reads, self.own, self.removed = 0, set[str](), list[str]()

    def label(self, name: str = "") -> str:
        return f"memory://{name}"

    def entries(self, folder: str = "") -> list[str]:
        return [".run.lock-other", *self.own]

    def read(self, name: str) -> bytes | None:
        self.reads += 1
        owner = {"host": "elsewhere", "pid": 1, "save": "other", "since": "2026-01-01T00:00:00+00:00"}
        return None if self.reads == 3 else json.dumps({**owner, "beat": self.reads}).encode()

    def put(self, name: str, data: bytes) -> None:
        self.own.add(name)

    def remove(self, name: str) -> None:
        self.removed.append(name)
        self.own.discard(name)


def test_a_lock_that_is_there_again_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves once held the lock both: one removed what the other had just put."""
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.01)
    store = ReturningLockStore()
    with pytest.raises(PlaceInUseError, match="process 1 on elsewhere"):
        RemoteSaveLock(store, "run", "mine").acquire()
    assert ".run.lock-other" not in store.removed


def test_the_owner_writes_its_lock_anew_until_it_is_taken_away(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.01)
    lock = RemoteSaveLock(RemoteCheckpointStorage(f"{remote.url}/a"), "run", "mine")
    threads = set(threading.enumerate())
    with lock:
        begun = set(threading.enumerate()) - threads
        (beat,) = [thread for thread in begun if thread.name == "accelerate-lock"]
        first, end = remote.fs.cat_file(remote.key("a/.run.lock-mine")), time.monotonic() + 20
        while remote.fs.cat_file(remote.key("a/.run.lock-mine")) == first and time.monotonic() < end:
            time.sleep(0.01)
        assert remote.fs.cat_file(remote.key("a/.run.lock-mine")) != first
        while beat.is_alive() and time.monotonic() < end:  # it may be writing just now
            with contextlib.suppress(FileNotFoundError):
                remote.fs.rm(remote.key("a/.run.lock-mine"))
        assert not beat.is_alive()


def test_a_place_that_cannot_be_locked_is_saved_to_with_a_warning(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    """Rights may be given to the checkpoint's own folder alone."""
    objects.fail(1, "forbidden")
    save.save(box(1), f"{objects.url}/a")
    assert "is saved to without a lock against other trainings" in caplog.text
    assert value_of(lambda parts: load.load(parts, f"{objects.url}/a")) == 1


def test_candidates_of_a_remote_folder_are_listed(remote: Remote) -> None:
    for step in (2, 10):
        save.save(box(step), f"{remote.url}/run/step_{step}", ranks=CheckpointRankGroup())
    store, name = discovery.locate(f"{remote.url}/run")
    checkpoints = discovery.candidates(store, name)
    assert [(c.path, c.manifest and c.manifest.step) for c in checkpoints] == [
        (f"{remote.url}/run/step_{step}", step) for step in (2, 10)
    ]


# ---------------------------------------------------------------- the Accelerator


def test_an_accelerator_saves_and_loads_by_url(remote: Remote) -> None:
    """Numbers, hooks, a background save, and the return values of the public methods."""
    settings = ProjectConfiguration(f"{remote.url}/run", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=settings)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert [accelerator.save_state() for _ in range(3)] == [
        f"{remote.url}/run/checkpoints/checkpoint_{number}" for number in range(3)
    ]
    assert {name.split("/")[2] for name in remote.names()} == {"checkpoint_1", "checkpoint_2"}
    settings.automatic_checkpoint_naming = False
    folders: list[str] = []
    accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
    weight = model.weight.detach().clone()
    assert accelerator.save_state(f"{remote.url}/best", async_save=True) == f"{remote.url}/best"
    assert accelerator.wait_for_checkpoint() == f"{remote.url}/best"
    torch.nn.init.zeros_(model.weight)
    assert accelerator.load_state(f"{remote.url}/best").path == f"{remote.url}/best"
    assert torch.equal(model.weight, weight)
    assert not os.path.exists(folders[0])
