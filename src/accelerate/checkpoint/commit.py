"""The commit protocol: a checkpoint is whole and on the disk, or it is not there.

    1. rank 0 draws an id; all ranks write into ``.<name>.tmp-<id>`` beside the target. Every file is flushed
       to the disk and its digest taken as soon as it is written.
    2. every rank tells what it wrote. If one failed, all raise the same error and the folder is removed.
    3. rank 0 checks that it sees all files, and writes the manifest, last.
    4. all agree; then one rename makes the folder the checkpoint.
    5. only now older checkpoints may go.

A target that exists is renamed aside (``.<name>.old-<id>``) just before step 4 and removed after it. A crash
between the two renames is mended by the next load or save: forward if the new folder has its manifest, which
it has, backward otherwise. What the user keeps in the target folder besides the checkpoint moves along.

With ``each_node`` every machine does this on its own disk, and step 4 waits for all machines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from accelerate.checkpoint import manifest as manifests
from accelerate.checkpoint.find import automatic_number, hidden, inspect, working
from accelerate.checkpoint.names import MANIFEST_NAME, is_part
from accelerate.checkpoint.store import Record, Store
from accelerate.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate.checkpoint.manifest import Manifest
    from accelerate.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)


def new_id() -> str:
    """The id of one save; rank 0 draws it."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Report:
    """What one rank wrote: its machine, its files by name, and what its shares tell, by the part's folder."""

    node: int
    host: str
    files: dict[str, Record]
    told: dict[str, Any] = field(default_factory=dict)


@dataclass
class Stage:
    """One save on its way, as one rank sees it.

    Attributes:
        store, name: the target.
        id: the same on all ranks.
        ranks: those that save together.
        each_node: every machine has a target of its own.
        records: what this rank wrote.
    """

    store: Store
    name: str
    id: str
    ranks: Ranks
    each_node: bool = False
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def temp(self) -> str:
        """The folder that is written to."""
        suffix = f"-n{self.ranks.node}" if self.each_node else ""
        return working(self.name, "tmp", self.id) + suffix

    @property
    def folder(self) -> Path:
        """The same as a path, for code that writes files of its own; such files are committed too."""
        return self.store.path(self.temp)

    @property
    def target(self) -> Path:
        """Where the checkpoint will be."""
        return self.store.path(self.name)

    @property
    def commits(self) -> bool:
        """Whether this rank commits: one per target."""
        return self.ranks.writes(self.each_node)

    def open(self) -> None:
        """Makes the folder to write to; the rank that commits mends and clears first."""
        if self.commits:
            refuse_unmovable(self.target)
            heal(self.store, self.name)
            sweep(self.store, self.name, spare=self.id)
        self.store.make(self.temp)

    def write(self, name: str, fill: Callable[[BinaryIO], Any]) -> Any:
        """Writes one file of the checkpoint; returns what ``fill`` returns."""
        folder = Path(name).parent
        if folder.name:
            self.store.make(f"{self.temp}/{folder.as_posix()}")
        returned: list[Any] = []
        record = self.store.write(f"{self.temp}/{name}", lambda file: returned.append(fill(file)))
        self.records[name] = replace(record, rank=self.ranks.rank)
        return returned[0]

    def seal(self, names: Iterable[str]) -> None:
        """Takes files into the checkpoint that were written to ``folder`` directly."""
        for name in names:
            record = self.store.seal(f"{self.temp}/{name}")
            self.records[name] = replace(record, rank=self.ranks.rank)

    def report(self, told: dict[str, Any] | None = None) -> Report:
        """What this rank tells the others."""
        return Report(self.ranks.node, socket.gethostname(), self.records, told or {})

    def close(self, reports: Iterable[Report], describe: Callable[[dict[str, Record]], Manifest]) -> None:
        """Checks that all files are there and writes the manifest; nothing is visible yet."""
        near = [r for r in reports if not self.each_node or r.node == self.ranks.node]
        sizes = self.store.files(self.temp)
        records: dict[str, Record] = {}
        for report in near:
            self._refuse_unseen(report, sizes)
            records.update(report.files)
        # Hooks and parts that write by themselves do not report: their files are sealed here.
        for name in sizes.keys() - records.keys():
            records[name] = replace(self.store.seal(f"{self.temp}/{name}"), rank=self.ranks.rank)
        if self.each_node:
            self._refuse_shared()
        manifest = describe(dict(sorted(records.items())))
        data = manifests.encode(manifest)
        self.store.write(f"{self.temp}/{MANIFEST_NAME}", lambda file: file.write(data))
        for folder in {Path(name).parent.as_posix() for name in records} | {"."}:
            self.store.sync(self.temp if folder == "." else f"{self.temp}/{folder}")

    def publish(self) -> None:
        """Makes the closed folder the checkpoint."""
        swap(self.store, self.temp, self.name, self.id)

    def discard(self) -> None:
        """Removes what was written, after a failure. What cannot be removed is left for the next save."""
        if self.commits:
            with contextlib.suppress(CheckpointError):
                self.store.remove(self.temp)

    def _refuse_unseen(self, report: Report, sizes: dict[str, int]) -> None:
        for name, record in report.files.items():
            if sizes.get(name) == record.size:
                continue
            seen = f"sees {sizes[name]} bytes" if name in sizes else "does not see it"
            raise CheckpointError(
                f"rank {record.rank} wrote {name} ({record.size} bytes) on {report.host}, but rank "
                f"{self.ranks.rank} on {socket.gethostname()} {seen} in {self.folder}",
                why="the machines do not share this folder, or its file system is late",
                fix="save to a folder that all machines share, or use "
                "ProjectConfiguration(save_on_each_node=True)",
            )

    def _refuse_shared(self) -> None:
        others = [entry for entry in self.store.entries() if self._is_other_node(entry)]
        if others:
            raise CheckpointError(
                f"save_on_each_node=True, but the machines share {self.store.root}",
                why="each would replace the other's checkpoint",
                fix="leave out save_on_each_node, or save to a disk of each machine",
            )

    def _is_other_node(self, entry: str) -> bool:
        return hidden(entry) == (self.name, "tmp", self.id) and entry != self.temp


def refuse_unmovable(target: Path) -> None:
    """Refuses a target that cannot be replaced by a rename.

    Raises:
        CheckpointError: it is a file, a mount point, or holds the current directory.
    """
    if not target.exists():
        return
    why = ""
    if not target.is_dir():
        why = "it is a file"
    elif os.path.ismount(target):
        why = "it is the root of a file system, which cannot be renamed"
    elif target in (Path.cwd(), *Path.cwd().parents):
        why = "it holds the current directory, which would vanish under this process"
    if why:
        raise CheckpointError(
            f"{target} cannot be replaced by a new checkpoint in one step",
            why=why,
            fix=f"save into a folder of its own, for example {target / 'checkpoint'}",
        )


def swap(store: Store, temp: str, name: str, id: str) -> None:
    """Makes ``temp`` the folder ``name``; of one that exists, only the user's own files stay.

    Raises:
        CheckpointError: a rename failed, or cannot be made durable; everything is where it was.
    """
    aside = working(name, "old", id)
    steps = [(temp, name)]
    if store.entries(name):
        steps.insert(0, (name, aside))
    done: list[tuple[str, str]] = []
    try:
        for source, target in steps:
            store.rename(source, target)
            done.append((source, target))
        store.sync("")
    except CheckpointError:
        for source, target in reversed(done):
            store.rename(target, source)
        raise
    if len(steps) == 1:
        return
    try:
        _settle(store, name, aside)
    except CheckpointError as error:  # the checkpoint is committed; the next load or save tries again
        logger.warning("%s is committed, but what it replaced is still in %s: %s", name, aside, error)


def _settle(store: Store, name: str, aside: str) -> None:
    """Moves the user's own files from the replaced folder to the new one, and removes the rest."""
    try:
        old = manifests.read(store.path(aside))
    except CheckpointError:
        old = None
    owned = {file.partition("/")[0] for file in old.files} if old else set[str]()
    present = set(store.entries(name))
    for entry in store.entries(aside):
        if entry not in owned and entry not in present and not is_part(entry):
            store.rename(f"{aside}/{entry}", f"{name}/{entry}")
    store.sync(name)
    store.remove(aside)


def heal(store: Store, name: str) -> None:
    """Finishes a replacement of ``name`` that a crash interrupted; does nothing otherwise."""
    working_folders = [(entry, h) for entry in store.entries() if (h := hidden(entry)) and h[0] == name]
    for aside, (_, role, id_) in working_folders:
        if role != "old":
            continue
        if not store.is_folder(name):
            ready = [e for e, h in working_folders if h[1:] == ("tmp", id_) and _has_manifest(store, e)]
            result = "finished" if ready else "undone"
            logger.warning("the save of %s was interrupted; it is %s now", store.path(name), result)
            store.rename(ready[0] if ready else aside, name)
            store.sync("")
        if store.is_folder(aside):
            _settle(store, name, aside)


def _has_manifest(store: Store, name: str) -> bool:
    try:
        return manifests.read(store.path(name)) is not None
    except CheckpointError:
        return False


def sweep(store: Store, name: str, spare: str = "") -> None:
    """Removes working folders that interrupted saves of ``name`` have left; ``spare`` is an id to keep."""
    for entry in store.entries():
        found = hidden(entry)
        if found and found[0] == name and found[1] != "old" and found[2] != spare:
            store.remove(entry)


def retain(store: Store, committed: str, limit: int | None) -> None:
    """Removes the oldest numbered checkpoints beyond ``limit``, and what interrupted saves have left.

    Call it after ``committed`` is committed; that one is never removed. A folder vanishes by one rename
    before its files are deleted, so what is left by a crash is not taken for a checkpoint.
    """
    newest = automatic_number(committed)
    assert newest is not None
    found = [(n, entry) for entry in store.entries() if (n := automatic_number(entry)) is not None]
    whole = [entry for _, entry in sorted(found) if (c := inspect(store, entry)) and not c.problem]
    doomed = whole[: max(0, len(whole) - limit)] if limit is not None else []
    for entry in doomed:
        if entry != committed:
            gone = working(entry, "gone", new_id())
            store.rename(entry, gone)
            store.remove(gone)
    for entry in store.entries():
        found_hidden = hidden(entry)
        number = automatic_number(found_hidden[0]) if found_hidden else None
        if number is not None and number <= newest and found_hidden and found_hidden[1] != "old":
            store.remove(entry)
