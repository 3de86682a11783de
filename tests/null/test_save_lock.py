"""Two trainings that save to one place: the second is refused by name, and nothing of the first is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accelerate import Accelerator
from accelerate.checkpoint import async_save, save, save_lock
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.checkpoint.save_lock import HEARTBEAT, LocalSaveLock, LockOwner
from accelerate.core.errors import CheckpointError
from accelerate.utils import ProjectConfiguration

SAVES = """
import sys, time
from pathlib import Path
from accelerate.checkpoint.save_lock import LocalSaveLock
place = Path(sys.argv[1], sys.argv[2])
lock = LocalSaveLock(place.parent, place.name, "save-of-another")
lock.acquire()
print("locked", flush=True)
time.sleep(120)
"""


@pytest.fixture
def other_training(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that is saving ``name`` in the test's folder."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SAVES, str(tmp_path), name]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "locked\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_of_two_trainings_is_refused_by_name(
    tmp_path: Path, other_training: Callable[[str], subprocess.Popen[str]]
) -> None:
    """G14: what the first is writing stays; once the first is gone, also by SIGKILL, nothing waits."""
    accelerator = Accelerator(cpu=True)
    other = other_training("a")
    unfinished = tmp_path / ".a.tmp-0123456789ab"
    unfinished.mkdir()
    with pytest.raises(
        CheckpointError, match=rf"another training is saving to .*/a\n.*process {other.pid} on "
    ):
        accelerator.save_state(tmp_path / "a")
    assert unfinished.is_dir()
    accelerator.save_state(tmp_path / "b")  # a place of its own
    other.kill()
    other.wait()
    start = time.perf_counter()
    accelerator.save_state(tmp_path / "a")
    assert time.perf_counter() - start < HEARTBEAT, "a restart waited"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_automatic_names_are_one_place(
    tmp_path: Path, other_training: Callable[[str], subprocess.Popen[str]]
) -> None:
    """G14: the limit of one training would remove what another is writing, whatever its number."""
    unfinished = tmp_path / "checkpoints/.checkpoint_0.tmp-0123456789ab"
    unfinished.mkdir(parents=True)
    other_training("checkpoints/checkpoint")
    project = ProjectConfiguration(
        str(tmp_path), automatic_checkpoint_naming=True, iteration=3, total_limit=1
    )
    with pytest.raises(CheckpointError, match="another training is saving"):
        Accelerator(cpu=True, project_config=project).save_state()
    assert unfinished.is_dir()


def test_the_model_of_another_training_is_not_touched(
    tmp_path: Path, other_training: Callable[[str], subprocess.Popen[str]]
) -> None:
    unfinished = tmp_path / ".model.safetensors.tmp-0123456789ab"
    unfinished.touch()
    other_training("weights")
    with pytest.raises(CheckpointError, match="another training is saving"):
        Accelerator(cpu=True).save_model(nn.Linear(1, 1), tmp_path)
    assert unfinished.exists()


def put_lock(path: Path, **changes: Any) -> None:
    owner = asdict(LockOwner.current("another")) | changes
    path.write_text(json.dumps(owner))


def test_a_lock_of_another_host_counts_while_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(save_lock, "DEAD_AFTER", 0.5)
    path = tmp_path / ".a.lock"
    put_lock(path, host="elsewhere", pid=1)
    LocalSaveLock(tmp_path, "a", "mine").acquire()
    put_lock(path, host="elsewhere", pid=1)
    beat = threading.Timer(0.2, path.touch)
    beat.start()
    with pytest.raises(CheckpointError, match="process 1 on elsewhere"):
        LocalSaveLock(tmp_path, "a", "mine").acquire()
    beat.join()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_that_was_never_written_is_stale(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.02)
    monkeypatch.setattr(save_lock, "DEAD_AFTER", 0.1)
    (tmp_path / ".a.lock").write_text(content)
    with LocalSaveLock(tmp_path, "a", "mine"):
        assert LockOwner.read(tmp_path / ".a.lock") is not None
    assert not list(tmp_path.iterdir())


def refuse_link(*paths: Path) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("links", [True, False])
def test_one_of_many_takes_the_lock(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file system has no hard links."""
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    locks = [LocalSaveLock(tmp_path, "a", f"{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(LocalSaveLock._create, locks))
    assert sum(taken) == 1
    assert LockOwner.read(locks[0].path) == locks[taken.index(True)].owner
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]


def test_a_later_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    put_lock(tmp_path / ".a.lock", pid=os.getppid(), since="2001-01-01T00:00:00+00:00")
    with LocalSaveLock(tmp_path, "a", "mine") as lock:
        assert LockOwner.read(lock.path) == lock.owner


def test_the_owner_touches_its_lock_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine of the same save goes on, and does not give back what it does not have."""
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.01)
    with LocalSaveLock(tmp_path, "a", "mine") as lock:
        with LocalSaveLock(tmp_path, "a", "mine"):
            pass
        os.utime(lock.path, (0, 0))
        end = time.monotonic() + 20
        while lock.path.stat().st_mtime < 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 1
    assert not lock.path.exists()


@pytest.mark.parametrize("taken_by", ["nobody", "another save"])
def test_a_lock_that_was_taken_away_is_not_touched_again(
    taken_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ends: the lock of another would look alive for as long as this process runs."""
    caplog.set_level(logging.DEBUG, "accelerate.checkpoint.save_lock")
    monkeypatch.setattr(save_lock, "HEARTBEAT", 0.01)
    before = set(threading.enumerate())
    lock = LocalSaveLock(tmp_path, "a", "mine")
    lock.acquire()
    (beat,) = set(threading.enumerate()) - before
    if taken_by == "nobody":
        lock.path.unlink()
    else:
        put_lock(tmp_path / "other.lock", host="elsewhere")
        (tmp_path / "other.lock").replace(lock.path)
    beat.join(20)
    assert not beat.is_alive()
    lock.release()
    assert lock.path.exists() == (taken_by == "another save")
    assert not caplog.records


@pytest.mark.parametrize("name", [".x.tmp-abc", ".x.gone-0123/a", ".checkpoint_3.old-5f0c"])
def test_a_target_named_like_a_working_folder_is_refused(name: str, tmp_path: Path) -> None:
    """G14: the next save of the checkpoint in the name would remove it."""
    with pytest.raises(CheckpointError, match=r"(?s)cannot be a checkpoint.*working folder"):
        Accelerator(cpu=True).save_state(tmp_path / name)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("in_background", [False, True])
def test_nothing_of_the_lock_stays_after_a_save(in_background: bool, tmp_path: Path) -> None:
    for fails in (True, False):
        contents = CheckpointContents([nn.Linear(1, 1)], custom=[Unsaveable()] if fails else [])
        with contextlib.suppress(CheckpointError):
            save.save(contents, tmp_path / "a", in_background=in_background)
        with contextlib.suppress(CheckpointError):
            async_save.wait()
        assert [p.name for p in tmp_path.iterdir()] == ([] if fails else ["a"])


class Unsaveable:
    """An object whose state cannot be written."""

    def state_dict(self) -> Any:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state: Any) -> None: ...
