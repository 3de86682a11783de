"""Addresses of checkpoints: paths of local folders, URLs of remote ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

from accelerate.checkpoint.errors import CheckpointNotFoundError
from accelerate.checkpoint.remote import RemoteCheckpointStorage
from accelerate.checkpoint.storage import CheckpointStorage, LocalCheckpointStorage
from accelerate.core.errors import SettingError

Address = Path | str  # a str is the URL of a remote place
_FILE = re.compile(r"(file|local)://")


def parse_address(text: str | os.PathLike[str]) -> Address:
    """Return a local path with ``~`` expanded, or a URL without its last slash; ``file://`` is local.

    Raises:
        SettingError: a URL has gone through ``Path``, which changes it.
    """
    address = os.fspath(text)
    if isinstance(text, os.PathLike) and re.match(r"[A-Za-z][\w+.-]+:[/\\]", address):
        raise SettingError(
            f"{address} is a URL that has become a path",
            why="Path joins the slashes of a URL, so it would be a local folder of that name",
            fix="give the URL as text: 's3://bucket/run', not Path('s3://bucket/run')",
        )
    if file := _FILE.match(address):
        return Path(address[file.end() :]).expanduser()
    if "://" in address:
        scheme, _, rest = address.partition("://")
        return f"{scheme}://{rest.rstrip('/')}"
    return Path(address).expanduser()


def join_address(folder: Address, name: str) -> Address:
    """Return the address of ``name`` in ``folder``."""
    if isinstance(folder, Path):
        return folder / name
    return f"{folder}{'' if folder.endswith('/') else '/'}{name}"


def split_address(place: Address) -> tuple[Address, str]:
    """Split a checkpoint's address into (the folder above, name).

    Raises:
        CheckpointNotFoundError: a URL that names no folder.
    """
    if isinstance(place, Path):
        path = place.resolve()
        return path.parent, path.name
    scheme, _, rest = place.partition("://")
    above, _, name = rest.strip("/").rpartition("/")
    if not name:
        raise CheckpointNotFoundError(f"{place} names no folder", fix=f"{scheme}://bucket/run/last")
    return f"{scheme}://{above}", name


def open_store(root: Address) -> CheckpointStorage:
    """Return the store of the folder above a checkpoint.

    Raises:
        MissingExtraError: a remote one needs a package that is not installed.
        CheckpointError: a remote one cannot be opened.
    """
    return LocalCheckpointStorage(root) if isinstance(root, Path) else RemoteCheckpointStorage(root)
