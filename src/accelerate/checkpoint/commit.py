"""The commit protocol: a checkpoint is whole and on the disk, or it is not there.

    1. rank 0 draws an id; all ranks write into a folder of that id (``Store.temp``), which does not count as
       a checkpoint. Every file is made durable and its digest taken as soon as it is written.
    2. every rank tells what it wrote. If one failed, all raise the same error and the folder is removed.
    3. rank 0 checks that it sees all files, and writes the manifest, last.
    4. all agree; then one step of the store makes the folder the checkpoint.
    5. only now older checkpoints may go.

In a folder of a file system step 4 is a rename, see ``swap.py``; in a remote store it is the manifest that is
put under the checkpoint's name, see ``remote.py``.

With ``each_node`` every machine does this on its own disk, and step 4 waits for all machines.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from accelerate.checkpoint import manifest as manifests
from accelerate.checkpoint.find import automatic_number, inspect
from accelerate.checkpoint.names import MANIFEST_NAME
from accelerate.checkpoint.store import Record, Store
from accelerate.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate.checkpoint.manifest import Manifest
    from accelerate.checkpoint.ranks import Ranks


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
        return self.store.temp(self.name, self.id) + suffix

    @property
    def folder(self) -> Path:
        """The same as a path, for code that writes files of its own; such files are committed too."""
        return self.store.path(self.temp)

    @property
    def target(self) -> str:
        """Where the checkpoint will be, for errors."""
        return self.store.label(self.name)

    @property
    def commits(self) -> bool:
        """Whether this rank commits: one per target."""
        return self.ranks.writes(self.each_node)

    def open(self) -> None:
        """Makes the folder to write to; the rank that commits mends and clears first."""
        if self.each_node and self.store.shared:
            raise CheckpointError(
                f"save_on_each_node=True, but {self.store.label()} is one place for all machines",
                why="each would replace the other's checkpoint",
                fix="leave out save_on_each_node",
            )
        if self.commits:
            self.store.refuse(self.name)
            self.store.heal(self.name)
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
        """What this rank tells the others, after all of it has written what it writes."""
        self.seal(self.store.loose(self.temp))
        return Report(self.ranks.node, socket.gethostname(), self.records, told or {})

    def close(self, reports: Iterable[Report], describe: Callable[[dict[str, Record]], Manifest]) -> None:
        """Checks that all files are there and writes the manifest; nothing is visible yet."""
        near = [r for r in reports if not self.each_node or r.node == self.ranks.node]
        sizes = self.store.files(self.temp)
        records: dict[str, Record] = {}
        for report in near:
            self._refuse_unseen(report, sizes)
            self._refuse_twice(report, records)
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
        self.store.publish(self.temp, self.name, self.id)

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
                f"{self.ranks.rank} on {socket.gethostname()} {seen} in {self.store.label(self.temp)}",
                why="the machines do not share this folder, or its file system is late",
                fix="save to a folder that all machines share, or use "
                "ProjectConfiguration(save_on_each_node=True)",
            )

    def _refuse_twice(self, report: Report, records: dict[str, Record]) -> None:
        for name, record in report.files.items():
            other = records.get(name, record)
            if other.digest != record.digest:
                raise CheckpointError(
                    f"rank {other.rank} and rank {record.rank} both wrote {name}, with different content",
                    why="only one of the two is in the checkpoint",
                    fix="write it on the main process only, or under a name with the rank in it",
                )

    def _refuse_shared(self) -> None:
        same = [leftover for leftover in self.store.leftovers(self.name) if leftover.id == self.id]
        others = [leftover for leftover in same if leftover.folder != self.temp]
        if others:
            raise CheckpointError(
                f"save_on_each_node=True, but the machines share {self.store.label()}",
                why="each would replace the other's checkpoint",
                fix="leave out save_on_each_node, or save to a disk of each machine",
            )


def sweep(store: Store, name: str, spare: str = "") -> None:
    """Removes what interrupted saves of ``name`` have left; ``spare`` is an id to keep."""
    for leftover in store.leftovers(name):
        if leftover.role != "old" and leftover.id != spare:
            store.remove(leftover.folder)


def retain(store: Store, committed: str, limit: int | None) -> None:
    """Removes the oldest numbered checkpoints beyond ``limit``, and what interrupted saves have left.

    Call it after ``committed`` is committed; that one is never removed.
    """
    newest = automatic_number(committed)
    assert newest is not None
    for entry in _beyond(store, limit) if limit is not None else []:
        if entry != committed:
            store.retire(entry, new_id())
    for leftover in store.leftovers():
        number = automatic_number(leftover.name)
        if number is not None and number <= newest and leftover.role != "old":
            store.remove(leftover.folder)


def _beyond(store: Store, limit: int) -> list[str]:
    """The oldest complete numbered checkpoints, all but ``limit`` of them."""
    found = sorted((n, entry) for entry in store.entries() if (n := automatic_number(entry)) is not None)
    whole = [entry for _, entry in found if (c := inspect(store, entry)) and not c.problem]
    return whole[: max(0, len(whole) - limit)]
