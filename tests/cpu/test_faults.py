"""Disks that are full, slow, not to be written, or give back something else: errors that all ranks share.

Every fault is made by the operating system or in the bytes, so it meets whatever writes and reads the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pytest

from tests.support import tracer
from tests.support.crash import Place, Training, foreign
from tests.support.ranks import RankServer, same_on_all
from tests.support.tracer import Change


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Generator[Path]:
    """A file system of its own, in memory; skips the test where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", *options, str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"not allowed here: {' '.join(command)}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def save_first(place: Place) -> dict[str, str]:
    training = Training(2, place)
    prints = training.prints()
    training.save()
    return prints


def refused(place: Place) -> tuple[str, bool]:
    """The error of a save, and whether the training is as it was."""
    from accelerate.core.errors import CheckpointError

    training = Training(3, place)
    before = training.prints()
    try:
        training.save()
    except CheckpointError as error:
        return str(error), training.prints() == before
    return "saved", True


def loaded(place: Place) -> tuple[str, dict[str, str]]:
    """The error of a load, empty if there is none, and what the training is then."""
    from accelerate.core.errors import CheckpointError

    training = Training(5, place)
    before = training.prints()
    try:
        training.load()
    except CheckpointError as error:
        assert training.prints() == before, "the objects were changed"
        return str(error), before
    return "", training.prints()


WAYS = ("fixed", "fixed/async", "fixed/sharded", "fixed/fsdp")


@pytest.mark.parametrize("name", WAYS)
def test_a_full_disk(ranks: RankServer, tmp_path: Path, name: str) -> None:
    """D2: the error names a file and what is free; the checkpoint before is whole, nothing else is left."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "none") as disk:
        place = Place(name, disk)
        prints = ranks(2, save_first, place)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "other").write_bytes(b"x" * (free - 8192))
        text, same = same_on_all(ranks(2, refused, place))
        assert "No space left on device" in text
        assert "cannot write" in text
        assert "are free there" in text
        assert same or name == "fixed/async"  # which has trained on
        assert sorted(os.listdir(disk)) == ["other", "run"]
        (disk / "other").unlink()
        assert [found for _, found in ranks(2, loaded, place)] == prints


def test_a_disk_that_cannot_be_written(ranks: RankServer, tmp_path: Path) -> None:
    place = Place("fixed", tmp_path / "disk")
    place.root.mkdir()
    prints = ranks(2, save_first, place)
    with mounted(place.root, "--bind", str(place.root)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place.root)], check=True)
        text, same = same_on_all(ranks(2, refused, place))
        assert "Read-only file system" in text
        assert "choose a folder on a file system that can be written" in text
        assert same
        assert [found for _, found in ranks(2, loaded, place)] == prints


def slow(place: Place) -> list[str]:
    """A save in which rank 1's disk takes its time, until rank 0 has written all of its own files."""
    training = partial(Training, 3, place)
    if os.environ["RANK"] == "0":
        training().save()
        return []
    seen: list[str] = []

    def look(_: int, change: Change) -> str:
        if change.call == "fsync" and not seen:
            folder, others = (place.root / change.path).parent, {"random_states_0.pkl", "optimizer.bin"}
            deadline = time.monotonic() + 30
            while not others <= set(os.listdir(folder)) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.extend(os.listdir(folder))
        return ""

    def work(begin: Callable[[], None]) -> str:
        member = training()
        begin()
        return member.save()

    assert tracer.run(work, place.root, look).result() == "run"
    return seen


@pytest.mark.skipif(bool(tracer.available()), reason=tracer.available())
def test_a_slow_disk_of_one_rank(ranks: RankServer, tmp_path: Path) -> None:
    """D5: all wait for the last file; nothing is committed before it is on the disk."""
    place = Place("fixed", tmp_path)
    ranks(2, save_first, place)
    _, seen = ranks(2, slow, place)
    assert {"random_states_0.pkl", "random_states_1.pkl", "optimizer.bin"} <= set(seen)
    assert "manifest.json" not in seen
    same_on_all([text for text, _ in ranks(2, loaded, place)])
    assert foreign(tmp_path / "run") == ["config3.json"]
    assert os.listdir(tmp_path) == ["run"]


def damaged_copies(place: Place, root: Path) -> list[tuple[str, str, Place]]:
    """(file, what was done to it, place) for every file of a checkpoint and every kind of damage."""
    found = []
    run = place.root / "run"
    files = [file.relative_to(run) for file in sorted(run.rglob("*")) if file.is_file()]
    for file in files:
        for how in ("flipped", "truncated", "longer", "missing"):
            if how == "missing" and (file.name == "manifest.json" or file.match("random_states_*.pkl")):
                continue  # what is left is a folder of the public format, or can do without them
            copy = place.copy(root / f"{len(found)}")
            target = copy.root / "run" / file
            data = bytearray(target.read_bytes())
            data[len(data) // 2] ^= 1
            target.unlink()
            if how != "missing":
                target.write_bytes(
                    {"truncated": data[: len(data) // 2], "longer": data + b"x"}.get(how, data)
                )
                shutil.copystat(run / file, target)  # a disk that damages a file does not change its time
            found.append((file.as_posix(), how, copy))
    return found


def load_all(name: str, places: list[Place]) -> list[str]:
    """The error of each; one training takes none of them."""
    from accelerate.core.errors import CheckpointError

    training, texts = Training(5, places[0]), []
    before = training.prints()
    for place in places:
        training.move(place)
        try:
            training.load()
        except CheckpointError as error:
            texts.append(str(error))
        else:
            texts.append("")
    assert training.prints() == before, "the objects were changed"
    return texts


@pytest.mark.parametrize("name", ["fixed", "fixed/sharded", "fixed/fsdp"])
def test_every_kind_of_damage_to_every_file(ranks: RankServer, tmp_path: Path, name: str) -> None:
    """D2: all ranks name the file in the same words, and nothing is changed in memory or on the disk."""
    place = Place(name, tmp_path / "whole")
    place.root.mkdir()
    ranks(2, save_first, place)
    copies = damaged_copies(place, tmp_path)
    texts = same_on_all(ranks(2, load_all, name, [copy for _, _, copy in copies]))
    for (file, how, copy), text in zip(copies, texts, strict=True):
        assert file in text, f"{how} {file}: {text or 'loaded'}"
        if how == "missing":
            assert "missing" in text, text
        if how == "flipped" and file != "manifest.json":
            assert "its digest is" in text, text
            assert "expected" in text, text
        if how in ("truncated", "longer") and file != "manifest.json":
            assert "expected" in text, text
        assert foreign(copy.root / "run") == [n for n in ["config2.json"] if (n, how) != (file, "missing")]
    assert len(copies) > 20
