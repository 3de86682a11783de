"""Texts that name places: local folders as paths, remote ones as URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from accelerate.checkpoint.errors import CheckpointNotFoundError
from accelerate.checkpoint.remote import RemoteStore
from accelerate.checkpoint.store import LocalStore, Store
from accelerate.core.errors import SettingError

Address = Path | str  # a str is the URL of a remote place
_FILE = re.compile(r"(file|local)://")


def address(text: str | os.PathLike[str]) -> Address:
    """A local path with ``~`` expanded, or a URL without the slash at its end. ``file://`` is local.

    Raises:
        SettingError: a URL has gone through ``Path``, which makes another text of it.
    """
    shown = os.fspath(text)
    if isinstance(text, os.PathLike) and re.match(r"[A-Za-z][\w+.-]+:[/\\]", shown):
        raise SettingError(
            f"{shown} is a URL that has become a path",
            why="Path joins the slashes of a URL, so it would be a local folder of that name",
            fix="give the URL as text: 's3://bucket/run', not Path('s3://bucket/run')",
        )
    if file := _FILE.match(shown):
        return Path(shown[file.end() :]).expanduser()
    if "://" in shown:
        scheme, _, rest = shown.partition("://")
        return f"{scheme}://{rest.rstrip('/')}"
    return Path(shown).expanduser()


def join(folder: Address, name: str) -> Address:
    """The address of ``name`` in ``folder``."""
    if isinstance(folder, Path):
        return folder / name
    return f"{folder}{'' if folder.endswith('/') else '/'}{name}"


def split(place: Address) -> tuple[Address, str]:
    """(the folder above, name) of a checkpoint's address.

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


def open_store(root: Address) -> Store:
    """The store of the folder above a checkpoint.

    Raises:
        MissingExtraError: a remote one needs a package that is not installed.
        CheckpointError: a remote one cannot be opened.
    """
    return LocalStore(root) if isinstance(root, Path) else RemoteStore(root)
