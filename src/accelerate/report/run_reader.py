"""Runs read from the files of the jsonl tracker and of ``accelerate launch --record``, while they grow."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from accelerate.core.errors import SettingError
from accelerate.report.records import RunRecord

_RANK_FILE = re.compile(r"rank_(\d+)\.jsonl")


class RecordFile:
    """A file of records, read from where the last look ended.

    Args:
        path: the file.

    Attributes:
        is_torn: the last line is not whole: it is being written, or never will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_torn = False
        self._offset, self._file = 0, os.stat(path).st_ino

    @property
    def was_replaced(self) -> bool:
        """True if this is not the file that was read: another one, or a shorter one."""
        status = os.stat(self.path)
        return status.st_size < self._offset or status.st_ino != self._file

    def read_new(self) -> Iterator[dict[str, Any] | None]:
        """Yield the records since the last call; None for a line that is none.

        Nothing of a file that begins with another record than the start of a run: it is no file of a run.
        """
        self.is_torn = False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    self.is_torn = True
                    return
                record = _parse(line) if line.strip() else {}
                if self._offset == 0 and record and not _is_start(record):
                    return
                self._offset += len(line)
                if record != {}:
                    yield record


def _is_start(record: dict[str, Any]) -> bool:
    """Return whether a run begins with the record. Both its writers put the name and the time into it."""
    return isinstance(record.get("start"), str) and isinstance(record.get("time"), float | int)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = _decode(line)
    except ValueError:  # also of bytes that are no text
        return None
    return record if isinstance(record, dict) else None


_decode = msgspec.json.Decoder().decode


class _TrackerRuns:
    """The runs of one file of the jsonl tracker: runs of one name follow each other."""

    def __init__(self, path: Path) -> None:
        self.runs: list[RunRecord] = []
        self._file = RecordFile(path)
        self._bad_lines = 0  # before the first run

    @property
    def was_replaced(self) -> bool:
        """True if the file is another one now."""
        return self._file.was_replaced

    def update(self) -> int:
        """Read what is new; return the number of records."""
        count, path = 0, self._file.path
        for record in self._file.read_new():
            count += 1
            if record is not None and (_is_start(record) or not self.runs):
                self.runs.append(
                    RunRecord(str(record.get("start", path.stem)), path, bad_lines=self._bad_lines)
                )
                self._bad_lines = 0
            if record is not None:
                self.runs[-1].add(record)
            elif self.runs:
                self.runs[-1].bad_lines += 1
            else:
                self._bad_lines += 1
        _mark_torn(self.runs[-1:], self._file)
        return count


class _RecordedRuns:
    """The runs of a folder with a file for each rank.

    The starts of a run have the same id on all ranks. Where they have none, the n-th of each rank is one run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, RecordFile] = {}
        self._runs: dict[str, RunRecord] = {}
        self._run_ids: dict[int, str | None] = {}  # by rank: of the run that its file is in
        self._starts_without_id = Counter[int]()

    @property
    def runs(self) -> list[RunRecord]:
        """The runs, in the order in which they began."""
        return sorted(self._runs.values(), key=lambda run: run.start)

    @property
    def was_replaced(self) -> bool:
        """True if a file is another one now, or gone."""
        return any(not file.path.exists() or file.was_replaced for file in self._files.values())

    def update(self) -> int:
        """Read what is new, also files of ranks that have begun since; return the number of records."""
        for path in self._folder.iterdir():
            match = _RANK_FILE.fullmatch(path.name)
            if match is not None and int(match[1]) not in self._files:
                self._files[int(match[1])] = RecordFile(path)
        return sum(self._update_rank(rank, file) for rank, file in sorted(self._files.items()))

    def _update_rank(self, rank: int, file: RecordFile) -> int:
        count, id = 0, self._run_ids.get(rank)
        for record in file.read_new():
            count += 1
            if record is not None and _is_start(record):
                self._starts_without_id[rank] += not record.get("run")
                id = str(record.get("run") or self._starts_without_id[rank])
            id = id or next(iter(self._runs), "1")  # lines before the first start
            run = self._runs.get(id)
            if run is None:
                run = self._runs[id] = RunRecord(self._folder.name, self._folder)
            if record is None:
                run.bad_lines += 1
            else:
                run.add(record, rank)
        self._run_ids[rank] = id
        _mark_torn([self._runs[id]] if id else self.runs[:1], file)
        return count


def _mark_torn(runs: list[RunRecord], file: RecordFile) -> None:
    for run in runs:
        run.torn_files.discard(file.path)
        run.torn_files |= {file.path} if file.is_torn else set()


class RunReader:
    """Reads the runs of some files and folders, and later only what was appended since.

    Args:
        paths: a file of the jsonl tracker; a folder of ``accelerate launch --record``; a folder of such.

    Attributes:
        version: changes when there was something new.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.version = 0
        self._paths = [Path(path) for path in paths]
        self._sources: dict[Path, _TrackerRuns | _RecordedRuns] = {}

    def update(self) -> list[RunRecord]:
        """Read what is new; return all runs, those known before as the same objects.

        Raises:
            SettingError: a path is missing, or holds no records.
        """
        known, self._sources = self._sources, {}
        runs: list[RunRecord] = []
        for path in self._paths:
            read: list[RunRecord] = []
            for place, kind in _find_sources(path):
                source = known.get(place)
                if source is None or source.was_replaced:
                    source = kind(place)
                    self.version += 1
                self._sources[place] = source
                self.version += source.update() > 0
                read += source.runs
            if not read:
                raise SettingError(
                    f"{path} holds no records of a run",
                    why="a run is recorded in files that end in .jsonl and begin with its name and time",
                    fix='train with Accelerator(log_with="jsonl", project_dir="runs"), '
                    "or accelerate launch --record runs/name",
                )
            runs += read
        _tell_apart(runs)
        return runs


def read_runs(paths: Iterable[str | Path]) -> list[RunRecord]:
    """Read every run of some files and folders, once; see ``RunReader``."""
    return RunReader(paths).update()


def _find_sources(path: Path) -> Iterator[tuple[Path, type[_TrackerRuns | _RecordedRuns]]]:
    """Yield the files of trackers and the folders of recorded runs at a path, with what reads them."""
    if not path.exists():
        raise SettingError(f"there is no {path}", fix="give a .jsonl file, or the folder of a recorded run")
    if path.is_file():
        yield path, _TrackerRuns
        return
    files = sorted(path.rglob("*.jsonl"))
    for folder in dict.fromkeys(file.parent for file in files if _RANK_FILE.fullmatch(file.name)):
        yield folder, _RecordedRuns
    for file in files:
        if not _RANK_FILE.fullmatch(file.name):
            yield file, _TrackerRuns


def _tell_apart(runs: list[RunRecord]) -> None:
    """Add the name of the file to names that several runs have, and a number where that is the same too."""
    names = Counter(run.run_name for run in runs)
    for run in runs:
        several = names[run.run_name] > 1 and run.path.stem != run.run_name
        run.name = f"{run.run_name} ({run.path.stem})" if several else run.run_name
    total, seen = Counter(run.name for run in runs), Counter[str]()
    for run in runs:
        name = run.name
        seen[name] += 1
        if total[name] > 1:
            run.name = f"{name} ({seen[name]} of {total[name]})"
