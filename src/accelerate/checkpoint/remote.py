"""Checkpoints behind a URL, through fsspec: ``s3://``, ``gs://``, ``az://``, ``memory://`` and others.

An object store cannot rename, and a folder is only the beginning of a name; one object appears whole or not
at all. So a save uploads below the target, into ``<name>/files-<id>/``, which is a checkpoint in itself, and
is committed by one object: ``<name>/manifest.json``, whose ``folder`` says ``files-<id>``. It is put last and
replaces that of the checkpoint before in the same step. Then, and only then, the files of the one before go;
on removal the manifest goes first. So at every moment the manifest names files that are all there, and what
it does not name does not count: nothing needs to be mended after a crash, and nothing is copied.

A place where writing one small file is not one step, such as sftp, keeps this only as far as that write does.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from accelerate.checkpoint.file_access import Digester, FileRecord, remote_errors
from accelerate.checkpoint.layout import MANIFEST_NAME, Manifest, encode_manifest, is_checkpoint_name
from accelerate.checkpoint.save_lock import RemoteSaveLock, SaveLock
from accelerate.checkpoint.storage import WorkingFolder, read_manifest
from accelerate.core.errors import CheckpointError, MissingExtraError

logger = logging.getLogger(__name__)

_GENERATION = re.compile(r"files-([0-9a-f]+)")
_CHUNK = 8 * 2**20
_ABSENT = (FileNotFoundError, NotADirectoryError)


class RemoteCheckpointStorage:
    """A store behind a URL, the same for all machines.

    Args:
        root: the URL of the folder above the checkpoints, ``"s3://bucket/run"``. Credentials and addresses
            are those that the driver finds: its environment variables and files, and fsspec's own.

    Raises:
        MissingExtraError: fsspec or the driver of this kind of URL is not installed.
        CheckpointError: there is no such kind of URL, or it cannot be opened.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, root: str) -> None:
        self._root = root if root.endswith("://") else root.rstrip("/")
        self._fs, self._base = _connect(root)
        self._staging: Path | None = None
        self._made_folders: set[str] = set()

    def label(self, name: str = "") -> str:
        if not name:
            return self._root
        return f"{self._root}{'' if self._root.endswith('/') else '/'}{name}"

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._base.rstrip("/"), name) if part)

    def path(self, name: str) -> Path:
        if self._staging is None:
            with remote_errors("make a local folder for", self.label(name)):
                self._staging = Path(tempfile.mkdtemp(prefix="accelerate-upload-"))
            weakref.finalize(self, shutil.rmtree, self._staging, ignore_errors=True)
        folder = self._staging / name
        with remote_errors("make a local folder for", self.label(name)):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def local_path(self, name: str) -> Path | None:
        return None

    # ------------------------------------------------------------ reading

    def fetch(self, name: str, target: Path) -> None:
        with remote_errors(f"fetch {self.label(name)} to", str(target)):
            self._fs.get_file(self._key(name), str(target))

    def read(self, name: str) -> bytes | None:
        with remote_errors("read", self.label(name)):
            try:
                return self._fs.cat_file(self._key(name))
            except FileNotFoundError:
                return None

    def entries(self, folder: str = "") -> list[str]:
        with remote_errors("list", self.label(folder)):
            self._fs.invalidate_cache()  # other machines write too
            try:
                keys = self._fs.ls(self._key(folder), detail=False)
            except _ABSENT:
                return []
        return sorted({name for key in keys if (name := self._relative(key, folder))})

    def _list_files(self, folder: str) -> dict[str, Any]:
        """Return fsspec's details of every file below a folder, by its name relative to it."""
        with remote_errors("list", self.label(folder)):
            self._fs.invalidate_cache()
            try:
                infos = self._fs.find(self._key(folder), detail=True)
            except _ABSENT:
                return {}
        files = {self._relative(key, folder): i for key, i in infos.items() if i["type"] != "directory"}
        return {name: info for name, info in sorted(files.items()) if name}

    def _relative(self, key: str, folder: str) -> str:
        """Return a key relative to ``folder``; empty if it is not below it."""
        above = self._key(folder).strip("/")
        above = f"{above}/" if above else ""
        key = key.strip("/")
        return key[len(above) :] if key.startswith(above) else ""

    def files(self, folder: str) -> dict[str, int]:
        return {name: int(info["size"]) for name, info in self._list_files(folder).items()}

    def is_folder(self, name: str) -> bool:
        return bool(self.entries(name))

    def modified_at(self, name: str) -> datetime:
        infos = self._list_files(name).values()
        return max(map(_modified_time, infos), default=datetime.fromtimestamp(0, timezone.utc))

    # ------------------------------------------------------------ writing

    def make_folder(self, folder: str) -> None:
        if folder in self._made_folders:
            return
        with remote_errors("make the folder", self.label(folder)):
            self._make(self._key(folder))
        self._made_folders.add(folder)

    def _make(self, key: str) -> None:
        """Make missing folders above ``key``, but no bucket, whose name may be misspelt."""
        with suppress(FileExistsError):
            try:
                self._fs.mkdir(key, create_parents=False)
            except FileNotFoundError:
                above = key.rpartition("/")[0]
                if "/" not in above.strip("/"):
                    raise
                self._make(above)
                self._fs.mkdir(key, create_parents=False)

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> FileRecord:
        with remote_errors("write", self.label(name)):
            file = self._fs.open(self._key(name), "wb")
            sink = _RemoteCheckpointFileWriter(file)
            try:
                fill(cast(BinaryIO, sink))
            except BaseException:
                _discard_upload(file)
                raise
            file.close()
        return FileRecord(sink.digester.size, sink.digester.hexdigest())

    def put(self, name: str, data: bytes) -> None:
        """Write a small file as one object, which appears whole or not at all."""
        with remote_errors("write", self.label(name)):
            self._fs.pipe_file(self._key(name), data)

    def seal(self, name: str) -> FileRecord:
        path = self._staging / name if self._staging is not None else None
        if path is None or not path.is_file():
            raise CheckpointError(
                f"{self.label(name)} was not written through this process",
                why="it is neither in the folder that hooks get, nor written by the save",
            )
        with remote_errors(f"upload {path} to", self.label(name)), path.open("rb") as source:
            self.make_folder(name.rpartition("/")[0])
            record = self.write(name, lambda file: shutil.copyfileobj(source, file, _CHUNK))
        path.unlink()
        return record

    def unsealed_files(self, folder: str) -> list[str]:
        if self._staging is None:
            return []
        base = self._staging / folder
        return sorted(path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file())

    def sync(self, folder: str) -> None:
        """Do nothing: objects are visible once they are written."""

    def remove(self, name: str) -> None:
        self._refuse_committed(name)
        with remote_errors("remove", self.label(name)):
            self._made_folders = {
                folder
                for folder in self._made_folders
                if folder != name and not folder.startswith(f"{name}/")
            }
            # The manifest goes first: without it the folder is no checkpoint.
            for key in (self._key(f"{name}/{MANIFEST_NAME}"), self._key(name)):
                with suppress(*_ABSENT):
                    self._fs.rm(key, recursive=key == self._key(name))

    def _refuse_committed(self, name: str) -> None:
        """Refuse to remove the files of a committed manifest, even if its save was told that it failed."""
        above, _, last = name.rpartition("/")
        generation = _GENERATION.fullmatch(last)
        committed = read_manifest(self, above) if generation and above else None
        if committed is not None and committed.folder == last:
            raise CheckpointError(f"{self.label(name)} is not removed", why="it is a committed checkpoint")

    # ------------------------------------------------------------ commits

    def temp_prefix(self, name: str) -> str:
        return f"{name}/files-"

    def publish(self, temp: str, name: str, id: str) -> None:
        written = read_manifest(self, temp)
        if written is None:
            raise CheckpointError(f"{self.label(temp)} has no {MANIFEST_NAME}", why="somebody removed it")
        new = replace(written, folder=temp.rpartition("/")[2])
        try:
            old = read_manifest(self, name)
        except CheckpointError as error:
            logger.warning("a damaged checkpoint is replaced: %s", error)
            old = None
        self._commit_manifest(name, new)
        try:
            self._remove_replaced(name, new, old)
        except CheckpointError as error:  # the checkpoint is committed; the next save tries again
            text = "%s is committed, but what it replaced is still there: %s"
            logger.warning(text, self.label(name), error)

    def _commit_manifest(self, name: str, manifest: Manifest) -> None:
        """Commit the checkpoint: write its manifest, one object."""
        file = f"{name}/{MANIFEST_NAME}"
        try:
            self.put(file, encode_manifest(manifest))
        except CheckpointError:
            # The connection may have broken after the store had taken it.
            if not self._is_committed(name, manifest.id):
                raise

    def _is_committed(self, name: str, id: str) -> bool:
        """Return True if the checkpoint ``name`` is known to be the one of that save."""
        try:
            committed = read_manifest(self, name)
        except CheckpointError:
            return False
        return committed is not None and committed.id == id

    def _remove_replaced(self, name: str, new: Manifest, old: Manifest | None) -> None:
        """Remove the files of the replaced checkpoint; the user's own files stay."""
        owned = {file.partition("/")[0] for file in old.files} if old and not old.folder else set[str]()
        for entry in self.entries(name):
            earlier = _GENERATION.fullmatch(entry) or entry in owned or is_checkpoint_name(entry)
            if earlier and entry not in (new.folder, MANIFEST_NAME):
                self.remove(f"{name}/{entry}")

    def recover(self, name: str) -> None:
        """Do nothing: a commit is one object."""

    def leftovers(self, name: str | None = None) -> list[WorkingFolder]:
        tops: dict[str, set[str]] = {}
        for file in self._list_files(name or ""):
            owner, _, inside = file.partition("/") if name is None else (name, "", file)
            tops.setdefault(owner, set()).add(inside.partition("/")[0])
        leftovers: list[WorkingFolder] = []
        for owner, inside in tops.items():
            generations = {match[1]: entry for entry in inside if (match := _GENERATION.fullmatch(entry))}
            usual = len(generations) == 1 and len(inside) == 2 and MANIFEST_NAME in inside
            if usual or not generations:
                continue  # the usual case: the manifest need not be read
            committed = read_manifest(self, owner)
            committed_folder = committed.folder if committed is not None else ""
            leftovers += [
                WorkingFolder(owner, "tmp", id_, f"{owner}/{entry}")
                for id_, entry in sorted(generations.items())
                if entry != committed_folder
            ]
        return leftovers

    def lock(self, name: str, save: str) -> SaveLock:
        return RemoteSaveLock(self, name, save)

    def retire(self, name: str, id: str) -> None:
        self.remove(name)


class _RemoteCheckpointFileWriter(RawIOBase):
    """A remote file that is being written, with the digest of its bytes so far."""

    def __init__(self, file: Any) -> None:
        self.digester = Digester()
        self._file = file

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data``; return its number of bytes."""
        view = memoryview(data).cast("B")
        # A driver may keep its buffer until a block is full: large tensors go in chunks.
        for start in range(0, len(view), _CHUNK):
            self._file.write(view[start : start + _CHUNK])
        self.digester.update(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.digester.size


def _discard_upload(file: Any) -> None:
    """Discard a half written file: a driver that uploads in blocks must not complete it."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(file, AbstractBufferedFile):
        file.discard()
        file.closed = True
    else:
        file.close()


def _modified_time(info: dict[str, Any]) -> datetime:
    for name in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = info.get(name)
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, timezone.utc)
        if isinstance(value, str):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=timezone.utc)
    return datetime.fromtimestamp(0, timezone.utc)


def _connect(root: str) -> tuple[Any, str]:
    """Return (fsspec's file system, path in it) of a URL."""
    need = f"a checkpoint in {root}"
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import available_protocols, known_implementations
    except ImportError as error:
        raise MissingExtraError("fsspec", need) from error
    scheme = root.partition("://")[0].rpartition("::")[2]
    try:
        with remote_errors("open", root):
            return url_to_fs(root)
    except CheckpointError as error:
        cause = error.__cause__
        implementation = known_implementations.get(scheme, {})
        if isinstance(cause, ImportError):
            raise MissingExtraError(
                _package_to_install(cause, implementation.get("class", "")), need
            ) from cause
        if scheme not in available_protocols():
            error.fix = "look for a typing error, or install the package that brings fsspec this kind of URL"
        raise


def _package_to_install(error: ImportError, driver: str) -> str:
    """Return the package to install: the driver, or what a driver of fsspec's own imports."""
    package = driver.partition(".")[0]
    if package and package != "fsspec":
        return package
    missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    return (missing.name or "fsspec").partition(".")[0]
