"""The commit protocol: a save that fails or dies anywhere leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from accelerate.checkpoint import discovery, layout, load, rank_group, save
from accelerate.checkpoint.file_access import CheckpointNotFoundError
from accelerate.checkpoint.layout import CheckpointContents, StatefulAdapter
from accelerate.checkpoint.rank_group import BackgroundSaveChannel, CheckpointPeerError, CheckpointRankGroup
from accelerate.checkpoint.storage import FileRecord, LocalCheckpointStorage
from accelerate.core.errors import CheckpointError, SettingError, find_failed_rank
from accelerate.utils import ProjectConfiguration, constants
from tests.support.control_trees import run_save_channels
from tests.support.long_run import select_cases


class ProcessKilled(BaseException):
    """The process dies here: no clean-up runs."""


class Faulty(LocalCheckpointStorage):
    """A store in which the n-th write operation goes wrong.

    A file counts three times: before it is made, half written, and written but not sealed.

    Attributes:
        at: number of the operation, from 1.
        dies: that operation and all later ones raise Killed; otherwise it alone fails like a disk.
        count: operations so far.
    """

    def __init__(self, root: Path, at: int, dies: bool) -> None:
        super().__init__(root)
        self.at, self.dies, self.count = at, dies, 0

    def tick(self) -> None:
        self.count += 1
        if self.dies and self.count >= self.at:
            raise ProcessKilled
        if self.count == self.at:
            raise OSError(28, "No space left on device")

    def refuse_if_killed(self, path: Path) -> None:
        from accelerate.checkpoint.file_access import file_errors

        with file_errors("write", path):
            self.tick()

    def make_folder(self, folder: str) -> None:
        self.refuse_if_killed(self.path(folder))
        super().make_folder(folder)

    def write(self, name: str, fill: Callable[[BinaryIO], Any]) -> FileRecord:
        def half(file: BinaryIO) -> None:
            self.tick()
            whole = BytesIO()
            fill(whole)
            data = whole.getvalue()
            file.write(data[: len(data) // 2])
            self.tick()
            file.write(data[len(data) // 2 :])
            self.tick()

        return super().write(name, half)

    def rename(self, source: str, target: str) -> None:
        self.refuse_if_killed(self.path(target))
        super().rename(source, target)

    def sync(self, folder: str) -> None:
        self.refuse_if_killed(self.path(folder))
        super().sync(folder)

    def remove(self, name: str) -> None:
        # Removing is not one step either: half of a folder may be gone.
        self.refuse_if_killed(self.path(name))
        path = self.path(name)
        if path.is_dir() and (files := sorted(p for p in path.rglob("*") if p.is_file())):
            files[0].unlink()
            self.refuse_if_killed(path)
        super().remove(name)


class Box:
    """A state of one number, saved in every kind of part."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": torch.full((3,), self.value)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"][0].item()


def box(value: float = 0.0) -> CheckpointContents:
    return CheckpointContents([Box(value)], [Box(value)], [Box(value)], custom=[Box(value)], step=int(value))


def value_of(loaded: Callable[[CheckpointContents], load.CheckpointLoadResult]) -> float:
    """The number in a checkpoint; all parts must agree about it."""
    parts = box(-1)
    step = loaded(parts).step
    values = {b.value for b in (*parts.models, *parts.optimizers, *parts.schedulers, *parts.custom)}
    assert values == {float(step)}, f"a mixture of checkpoints: {values}, step {step}"
    return values.pop()


def project(folder: Path, limit: int | None = None, iteration: int = 0) -> ProjectConfiguration:
    return ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=limit, iteration=iteration
    )


class Scenario:
    """A folder with an older checkpoint, and a way to save the next one and to load the newest."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.limit = 1 if name == "limited" else None
        if name in ("fresh", "replaced", "inside"):
            save.save(box(1), root / "old" if name == "fresh" else root / "run")
            if name != "fresh":
                (root / "run" / "notes.txt").write_text("mine")
            if name == "inside":  # the current directory is not renamed
                os.chdir(root / "run")
        else:
            save.save(box(1), project=project(root, self.limit))

    def save(self, store: Callable[[Path], Any] = LocalCheckpointStorage) -> None:
        if self.name in ("fresh", "replaced", "inside"):
            save.save(box(2), self.root / "run", store=store)
        else:
            save.save(box(2), project=project(self.root, self.limit, iteration=1), store=store)

    def load(self) -> float:
        if self.name == "fresh":
            try:
                return value_of(lambda parts: load.load(parts, self.root / "run"))
            except CheckpointNotFoundError:
                return value_of(lambda parts: load.load(parts, self.root / "old"))
        if self.name in ("replaced", "inside"):
            return value_of(lambda parts: load.load(parts, self.root / "run"))
        return value_of(lambda parts: load.load(parts, project=project(self.root, self.limit)))

    def leftovers(self) -> list[str]:
        folder = self.root / "checkpoints" if self.name in ("numbered", "limited") else self.root
        folder = self.root / "run" if self.name == "inside" else folder
        return [name for name in os.listdir(folder) if name.startswith(".")]


NAMES = ("fresh", "replaced", "inside", "limited", "numbered")


@pytest.mark.parametrize(
    ("name", "dies"),
    select_cases(
        [(name, dies) for name in NAMES for dies in (True, False)],
        [("fresh", False), *((name, dies) for name in NAMES[1:4] for dies in (True, False))],
    ),
    ids=lambda value: {True: "killed", False: "failed"}.get(value),
)
def test_a_save_that_stops_at_any_write_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, name: str, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: at every operation of a save; then the next save succeeds and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    seen: set[float] = set()
    for at in range(1, 1000):
        root = tmp_path / str(at)
        scenario = Scenario(name, root)
        faulty = Faulty(root, at, dies)
        stores: list[Faulty] = []

        def store(folder: Path, faulty: Faulty = faulty, stores: list[Faulty] = stores) -> Faulty:
            faulty.root = folder
            stores.append(faulty)
            return faulty

        error = None
        try:
            scenario.save(store)
        except (ProcessKilled, CheckpointError) as caught:
            error = caught
        stopped = error is not None
        assert isinstance(error, ProcessKilled if dies else CheckpointError) or not stopped
        assert dies or not stopped or "No space left on device" in str(error)
        value = scenario.load()
        seen.add(value)
        if not stopped:
            assert value == 2
        if stopped and not dies:
            assert value == 1, "an error means that nothing has changed"
            assert scenario.leftovers() == []
        if name in ("replaced", "inside"):
            assert (root / "run" / "notes.txt").read_text() == "mine"
        if faulty.count < at:
            break
        if value == 1:
            scenario.save()
            assert scenario.load() == 2
        if name in ("fresh", "replaced", "inside"):
            scenario.save()
        else:
            save.save(box(3), project=project(root, scenario.limit, iteration=2))
        assert scenario.leftovers() == []
    assert at >= 20
    assert seen == {1.0, 2.0}


def test_the_error_of_a_full_disk_says_how_much_is_free(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)cannot write .*No space left.*are free there"):
        save.save(box(), tmp_path / "c", store=lambda root: Faulty(root, 3, dies=False))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*file"):
        save.save(box(), tmp_path / "file" / "c")


# ---------------------------------------------------------------- newest, retention, numbers


def numbers(folder: Path) -> list[int]:
    return sorted(int(name.rpartition("_")[2]) for name in os.listdir(folder / "checkpoints"))


def test_the_oldest_go_by_number_and_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    """D5: 9, 10, 11 are numbers, not text."""
    settings = project(tmp_path, limit=3)
    for step in range(12):
        path = save.save(box(step), project=settings)
        assert path == tmp_path / "checkpoints" / f"checkpoint_{step}"
        assert settings.iteration == step + 1
        assert numbers(tmp_path) == list(range(max(0, step - 2), step + 1))
    assert value_of(lambda parts: load.load(parts, project=project(tmp_path))) == 11


def test_a_save_under_another_name_counts(tmp_path: Path) -> None:
    """As in 1.15, where scripts name folders by ``save_iteration``."""
    settings = project(tmp_path, limit=3)
    settings.automatic_checkpoint_naming = False
    save.save(box(0), tmp_path / "best", project=settings)
    settings.automatic_checkpoint_naming = True
    save.save(box(1), project=settings)
    assert (numbers(tmp_path), settings.iteration) == ([1], 2)


def test_the_last_committed_checkpoint_outlives_a_failing_save(tmp_path: Path) -> None:
    settings = project(tmp_path, limit=1)
    save.save(box(1), project=settings)
    with pytest.raises(CheckpointError):
        save.save(box(2), project=settings, store=lambda root: Faulty(root, 12, dies=False))
    assert settings.iteration == 1
    assert value_of(lambda parts: load.load(parts, project=project(tmp_path))) == 1


def test_what_cannot_be_removed_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(LocalCheckpointStorage):
        def remove(self, name: str) -> None:
            raise CheckpointError(f"cannot remove {name}")

    settings = project(tmp_path, limit=1)
    save.save(box(1), project=settings)
    save.save(box(2), project=settings, store=Stubborn)
    assert "checkpoint_1 is committed, but an older one could not be removed" in caplog.text
    assert value_of(lambda parts: load.load(parts, project=project(tmp_path))) == 2
    save.save(box(3), project=settings)
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"]


def test_numbering_goes_on_after_a_resume(tmp_path: Path) -> None:
    """D4: save, save, new process, load, save."""
    settings = project(tmp_path)
    save.save(box(1), project=settings)
    save.save(box(2), project=settings)
    again = project(tmp_path)
    loaded = load.load(box(), project=again)
    assert (loaded.iteration, again.iteration) == (1, 2)
    assert save.save(box(3), project=again).name == "checkpoint_2"


def test_resuming_from_an_older_one_numbers_after_all_that_are_there(tmp_path: Path) -> None:
    settings = project(tmp_path)
    for step in range(3):
        save.save(box(step), project=settings)
    again = project(tmp_path)
    assert load.load(box(), tmp_path / "checkpoints" / "checkpoint_0", project=again).step == 0
    assert again.iteration == 3


def test_a_taken_number_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """A ValueError, as in the public package; nothing of the other run is touched."""
    save.save(box(1), project=project(tmp_path))
    with pytest.raises(ValueError, match=r"(?s)checkpoint_0 exists already.*load_state\(\).*iteration=1"):
        save.save(box(2), project=project(tmp_path))
    assert value_of(lambda parts: load.load(parts, project=project(tmp_path))) == 1


def test_a_run_keeps_its_checkpoints_beside_those_of_another(tmp_path: Path) -> None:
    """It was started anew in the folder of a run that kept its newest two: they are older than its first."""
    other, settings = project(tmp_path, limit=2, iteration=6), project(tmp_path, limit=2)
    for step in (6, 7):
        save.save(box(step), project=other)
    with pytest.warns(UserWarning, match=r"checkpoint_7 the newest: those of this run begin at checkpoint_8"):
        save.save(box(100), project=settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save.save(box(101), project=settings)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_8", "checkpoint_9"]
    assert value_of(lambda parts: load.load(parts, project=project(tmp_path))) == 101
    assert settings.iteration == 10


def test_what_an_interrupted_save_left_does_not_take_the_number(tmp_path: Path) -> None:
    """D1: a half folder of the public package, which writes in place."""
    half = tmp_path / "checkpoints" / "checkpoint_0"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    save.save(box(1), project=project(tmp_path))
    assert value_of(lambda parts: load.load(parts, project=project(tmp_path))) == 1


def test_the_newest_committed_one_is_taken_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D1: a half checkpoint, a damaged one, an interrupted save and a stranger's folder lie beside it."""
    settings = project(tmp_path)
    for step in (9, 10, 11, 12, 13):
        settings.iteration = step
        save.save(box(step), project=settings)
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_13" / "manifest.json").unlink()
    (folder / "checkpoint_13" / "random_states_0.pkl").unlink(missing_ok=True)
    (folder / "checkpoint_12" / "optimizer.bin").write_bytes(b"")
    (folder / "checkpoint_11" / "manifest.json").write_text("{}")
    (folder / ".checkpoint_14.tmp-0123456789ab").mkdir()
    (folder / "checkpoint_15").mkdir()
    (folder / "logs").mkdir()
    loaded = load.load(box(), project=project(tmp_path))
    assert (loaded.step, loaded.path.name) == (10, "checkpoint_10")
    reasons = {text.partition(" ")[0]: text for text in loaded.ignored}
    assert set(reasons) == {
        ".checkpoint_14.tmp-0123456789ab", "checkpoint_11", "checkpoint_12", "checkpoint_13", "checkpoint_15",
    }  # fmt: skip
    assert "interrupted" in reasons[".checkpoint_14.tmp-0123456789ab"]
    assert "manifest.json is damaged" in reasons["checkpoint_11"]
    assert "optimizer.bin has 0 bytes" in reasons["checkpoint_12"]
    assert "no random_states_0.pkl" in reasons["checkpoint_13"]
    assert "no part" in reasons["checkpoint_15"]
    assert all(text in caplog.text for text in loaded.ignored)


def test_no_complete_checkpoint_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no folder that looks like one"):
        load.load(box(), project=project(tmp_path))
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint_0 \(it holds no part"):
        load.load(box(), project=project(tmp_path))


def save_at(folder: Path, name: str, value: float, day: int) -> None:
    """A checkpoint saved on a given day."""
    path = save.save(box(value), folder / name)
    committed = layout.decode_manifest((path / "manifest.json").read_bytes(), path)
    assert committed is not None
    then = datetime(2030, 1, day, tzinfo=timezone.utc).isoformat()
    (path / "manifest.json").write_bytes(layout.encode_manifest(replace(committed, saved=then)))


def test_folders_with_other_names_are_ordered_by_the_time_of_saving(tmp_path: Path) -> None:
    save_at(tmp_path, "epoch_9", 1, day=2)
    save_at(tmp_path, "epoch_10", 2, day=1)
    assert discovery.latest_checkpoint(tmp_path)[0].name == "epoch_10"
    save_at(tmp_path, "best", 3, day=4)
    save_at(tmp_path, "step_500", 4, day=3)
    assert discovery.latest_checkpoint(tmp_path)[0].name == "best"
    assert [c.name for c in discovery.candidates(LocalCheckpointStorage(tmp_path))] == [
        "epoch_10",
        "epoch_9",
        "step_500",
        "best",
    ]


@pytest.mark.parametrize("torn", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", None])
def test_a_folder_of_the_public_package_counts_only_if_nothing_is_torn(
    tmp_path: Path, torn: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = project(tmp_path)
    save.save(box(1), project=settings)
    parts = box(2)
    parts.rng = True
    path = save.save(parts, project=settings)
    (path / "manifest.json").unlink()
    if torn:
        data = (path / torn).read_bytes()
        (path / torn).write_bytes(data[: len(data) - 40])
    newest, ignored = discovery.latest_checkpoint(tmp_path / "checkpoints")
    assert newest.name == ("checkpoint_0" if torn else "checkpoint_1")
    assert bool(ignored) == bool(torn)
    if torn:
        assert torn in ignored[0]
    else:
        assert load.load(parts, project=project(tmp_path)).step == 2
        assert "has no manifest" in caplog.text


def test_retention_counts_folders_of_the_public_package_and_leaves_half_ones(tmp_path: Path) -> None:
    settings = project(tmp_path, limit=2)
    for step in range(2):
        parts = box(step)
        parts.rng = True
        (save.save(parts, project=settings) / "manifest.json").unlink()
    half = tmp_path / "checkpoints" / "checkpoint_2"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    settings.iteration = 3
    save.save(box(3), project=settings)
    assert numbers(tmp_path) == [1, 2, 3]


def test_retention_never_removes_what_was_just_committed(tmp_path: Path) -> None:
    """A run that is numbered from the start again beside higher numbers."""
    settings = project(tmp_path, limit=1, iteration=7)
    save.save(box(7), project=settings)
    settings.iteration = 3
    save.save(box(3), project=settings)
    assert numbers(tmp_path) == [3, 7]


def test_a_manifest_of_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    path = save.save(box(1), tmp_path / "c")
    committed = layout.decode_manifest((path / "manifest.json").read_bytes(), path)
    assert committed is not None
    (path / "manifest.json").write_bytes(layout.encode_manifest(replace(committed, format=2)))
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1"):
        load.load(box(), path)


# ---------------------------------------------------------------- a folder per machine


def nodes(size: int) -> list[CheckpointRankGroup]:
    return [
        CheckpointRankGroup(rank=node, size=size, local_rank=0, local_size=1, node=node)
        for node in range(size)
    ]


def test_machines_that_share_a_folder_may_not_each_commit_it(tmp_path: Path) -> None:
    stages = [
        save.CommitTransaction(LocalCheckpointStorage(tmp_path), "c", ".c.tmp-", "aa", ranks, each_node=True)
        for ranks in nodes(2)
    ]
    for stage in stages:
        stage.open()
        stage.write("x", lambda file: file.write(b"1"))
    with pytest.raises(CheckpointError, match="save_on_each_node=True, but the machines share"):
        stages[0].write_manifest(
            [stage.report() for stage in stages], lambda files: layout.Manifest("aa", 0, 2, files)
        )


def test_a_file_that_another_machine_wrote_elsewhere_is_named(tmp_path: Path) -> None:
    here, there = (
        save.CommitTransaction(LocalCheckpointStorage(tmp_path / str(r.rank)), "c", ".c.tmp-", "aa", r)
        for r in nodes(2)
    )
    for stage in (here, there):
        stage.open()
        stage.write(f"random_states_{stage.ranks.rank}.pkl", lambda file: file.write(b"1"))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)rank 1 wrote random_states_1.pkl .*does not see it.*no model is sharded, .*each_node",
    ):
        here.write_manifest([here.report(), there.report()], lambda files: layout.Manifest("aa", 0, 2, files))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(SettingError, match="total_limit of ProjectConfiguration is 0"):
        ProjectConfiguration(total_limit=0)


def test_the_project_configuration_is_the_public_one() -> None:
    plain = ProjectConfiguration()
    assert (plain.project_dir, plain.logging_dir, plain.automatic_checkpoint_naming) == (None, None, False)
    assert (plain.total_limit, plain.iteration, plain.save_on_each_node) == (None, 0, False)
    plain.set_directories("a")
    plain.set_directories("b")
    assert (plain.project_dir, plain.logging_dir) == ("b", "a")
    assert ProjectConfiguration("a", "b").logging_dir == "b"


def test_automatic_naming_needs_a_project_folder() -> None:
    with pytest.raises(SettingError, match="needs a project_dir"):
        save.save(box(), project=ProjectConfiguration(automatic_checkpoint_naming=True))


def test_a_replacement_that_died_between_its_renames_is_finished_by_a_load(tmp_path: Path) -> None:
    """D1: forward if the new one is whole, back if it is not."""
    for whole in (True, False):
        root = tmp_path / str(whole)
        old, new = save.save(box(1), root / "run"), save.save(box(2), root / "new")
        (old / "notes.txt").write_text("mine")
        if not whole:
            (new / "manifest.json").unlink()
        old.rename(root / ".run.old-ab")
        new.rename(root / ".run.tmp-ab")
        assert value_of(lambda parts, run=root / "run": load.load(parts, run)) == (2 if whole else 1)
        assert (root / "run" / "notes.txt").read_text() == "mine"
        shutil.rmtree(root)


def test_a_file_system_that_flushes_no_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some network file systems refuse to; another error of theirs counts."""
    fsync, codes = os.fsync, [errno.EINVAL]

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(codes[0], os.strerror(codes[0]))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    for codes[0] in (errno.EINVAL, errno.ENOTSUP):
        save.save(box(1), tmp_path / "runs" / "c")
    codes[0] = errno.EIO
    with pytest.raises(CheckpointError, match="Input/output error"):
        save.save(box(2), tmp_path / "runs" / "c")


def test_an_empty_folder_is_replaced_where_none_may_be_renamed_onto(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On Windows."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    (tmp_path / "c").mkdir()
    for value in (1, 2):
        save.save(box(value), tmp_path / "c")
        assert value_of(lambda fresh: load.load(fresh, tmp_path / "c")) == value
    assert os.listdir(tmp_path) == ["c"]


def test_a_part_failing_to_give_its_state_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def fail() -> Any:
        raise KeyError("moment")

    with pytest.raises(CheckpointError, match=r"(?s)could not save the checkpoint .*KeyError: 'moment'"):
        save.save(CheckpointContents(optimizers=[StatefulAdapter("odd", fail, dict)]), tmp_path / "c")
    assert os.listdir(tmp_path) == []


THREADS_READ_FIRST = """if True:
    import importlib.util, json, sys, threading
    from accelerate.checkpoint import layout

    sys.setswitchinterval(1e-6)
    entry = layout.ManifestEntry("model.safetensors", "Linear", {"weight": ("float32", [1, 2])})
    data = layout.encode_manifest(layout.Manifest("a", 1, 1, {}, {"models": [entry]}))
    for number in range(100):
        spec = importlib.util.spec_from_file_location(f"fresh_{number}", layout.__file__)
        fresh = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        barrier, read = threading.Barrier(4), []

        def work():
            barrier.wait()
            read.append(fresh.decode_manifest(data, "manifest.json"))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(read) == 4 and all(each == read[0] for each in read), read
"""


def test_threads_may_read_the_first_manifests_of_a_process() -> None:
    """As a resume does, in a folder of several checkpoints. The interpreter crashed, now and then."""
    done = subprocess.run([sys.executable, "-c", THREADS_READ_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"


def test_the_names_are_those_of_the_public_format() -> None:
    assert [layout.file_name("models", i) for i in (0, 1)] == ["model.safetensors", "model_1.safetensors"]
    assert [layout.file_name("torch_models", i) for i in (0, 2)] == [
        "pytorch_model.bin",
        "pytorch_model_2.bin",
    ]
    assert (
        constants.SAFE_WEIGHTS_PATTERN_NAME.format(suffix="-00001-of-00002")
        == "model-00001-of-00002.safetensors"
    )
    assert constants.WEIGHTS_PATTERN_NAME.format(suffix="") == constants.WEIGHTS_NAME == "pytorch_model.bin"
    own = """model.safetensors pytorch_model_fsdp_0 optimizer_0 optimizer_1.bin pytorch_model manifest.json
        random_states_12.pkl scaler.pt dl_state_dict_1.bin sampler.bin sampler_1_rank2.bin pytorch_model_1
        pytorch_model_fsdp.bin pytorch_model_fsdp_1.bin pytorch_model_fsdp_1_rank2.bin"""
    foreign = """model-00001-of-00002.safetensors notes.txt optimizer.txt models logs config.json
        scheduler scheduler_1 optimizer sampler pytorch_model_best.bin pytorch_model_fsdp pytorch_model_ema"""
    assert all(map(layout.is_checkpoint_name, own.split()))
    assert not any(map(layout.is_checkpoint_name, foreign.split()))


def failure_of(texts: list[str]) -> str:
    """What all ranks raise if each fails with one of these texts."""

    def exchange(outcome: Any, merge: Callable[[list[Any]], Any]) -> Any:
        return merge([(CheckpointError(text), None) for text in texts])

    with (
        pytest.raises(CheckpointError) as caught,
        CheckpointRankGroup(size=len(texts), channel=exchange).collective_section("save"),
    ):
        pass
    return str(caught.value)


def test_a_failure_of_many_ranks_is_told_once() -> None:
    assert failure_of(["the disk is full"] * 512) == "ranks 0-511 of 512: the disk is full"
    mixed = ["full", "gone", "full", "full", *(f"{number} is damaged" for number in range(100))]
    first, *others, last = failure_of(mixed).splitlines()
    assert first == "ranks 0, 2-3 of 104: full"
    assert others[:2] == ["rank 1 of 104: gone", "rank 4 of 104: 0 is damaged"]
    assert (len(others), last) == (7, "and 94 more ranks")


def test_an_error_of_ours_is_in_a_traceback_once() -> None:
    def fail(error: Exception) -> CheckpointError:
        def exchange(outcome: Any, merge: Callable[[list[Any]], Any]) -> Any:
            return merge([outcome, outcome])

        with (
            pytest.raises(CheckpointError) as caught,
            CheckpointRankGroup(size=2, channel=exchange).collective_section("load"),
        ):
            raise error
        return caught.value

    damaged, disk = CheckpointError("it is damaged", fix="load another one"), OSError("the disk is full")
    text = "".join(traceback.format_exception(fail(damaged)))
    assert text.count("it is damaged") == text.count("load another one") == text.count("Traceback") == 1
    # What the package has not raised itself stays, also below an error of the package.
    assert fail(disk).__cause__ is disk
    damaged.__cause__ = disk
    assert fail(damaged).__cause__ is disk
    # A rank that fails because of another one goes on naming it.
    lost = CheckpointPeerError("rank 1 is gone")
    lost.failed_rank = 1
    assert find_failed_rank(fail(lost)) == 1


def test_all_ranks_of_a_save_in_the_background_hear_why_one_has_left_it() -> None:
    """Also those that are no neighbours of it in the tree."""

    def save(rank: int, channel: BackgroundSaveChannel) -> Any:
        assert channel.combine(rank, sum) == 10
        if rank == 3:
            raise OSError("the disk is full")
        return channel.combine(rank, sum)

    def killed(rank: int, channel: BackgroundSaveChannel) -> Any:
        if rank == 3:
            channel._tree.close()  # as its process would end
        return channel.combine(rank, sum) if rank != 3 else None

    outcomes = run_save_channels(5, save)
    assert str(outcomes.pop(3)) == "the disk is full"
    assert {error.why for error in outcomes} == {"rank 3 has given up: the disk is full"}
    outcomes = run_save_channels(5, killed)
    assert outcomes.pop(3) is None
    assert {error.why for error in outcomes} == {"rank 3 is gone: it was killed, or does not answer"}


def test_a_rank_that_does_not_come_to_a_save_in_the_background_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def save(rank: int, channel: BackgroundSaveChannel) -> Any:
        channel.timeout = 30.0 if rank else 0.1
        assert rank < 2 or ended.wait(30)
        try:
            return channel.combine(rank, sum)
        finally:
            ended.set()

    reasons = {error.why for error in run_save_channels(4, save)}
    assert reasons == {"one of ranks 2-3 was not ready within 0.1 s"}
    monkeypatch.setattr(rank_group, "DEAD_AFTER", 0.2)
    reasons = {error.why for error in run_save_channels(3, save, absent=[2])}
    assert reasons == {"a rank is gone: not all have begun to write"}
