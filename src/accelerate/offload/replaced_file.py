"""Files of an offload folder whose names another model has taken: who read them goes on reading them."""

from __future__ import annotations

import gc
import os
import shutil
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate.core.errors import OffloadError


class ReplacedFile:
    """A file of an offload folder under a second name; it is removed when no loader reads it any more.

    Args:
        file: the file, which is about to be replaced.

    Attributes:
        path: its second name.

    Raises:
        OffloadError: the folder cannot be written, or is full.
    """

    def __init__(self, file: Path) -> None:
        self.path = file.with_name(f".{file.name}.kept-{uuid.uuid4().hex[:8]}")
        try:
            try:
                os.link(file, self.path)
            except OSError:  # a file has one name only there
                shutil.copyfile(file, self.path)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise OffloadError(
                f"{file.name} in the offload folder {file.parent} is in use, and cannot be kept",
                why=f"{type(error).__name__}: {error.strerror or error}",
                fix="give each model a folder of its own, as offload_folder or offload_dir",
            ) from error
        weakref.finalize(self, _unlink, self.path, os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedFile:
        return self


def _unlink(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        path.unlink(missing_ok=True)


# The loaders (``OffloadedWeightsLoader``) that are alive, by identity.
LOADERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def keep_replaced_files(
    folder: str | os.PathLike[str], values: Mapping[str, torch.Tensor], own: Any = None
) -> bool:
    """Keep the files for models of this process whose weights are about to be overwritten by others.

    Args:
        folder: the offload folder.
        values: name -> what will be written.
        own: a loader that is to read the new values.

    Returns:
        True when there was one to keep.

    Raises:
        OffloadError: the folder cannot be written, or is full.
    """

    def loaders_of(name: str) -> list[Any]:
        loaders = [each for each in list(LOADERS.values()) if each.is_read_by_model and each is not own]
        return [each for each in loaders if each.reads_file(folder, name)]

    replaced = [
        name
        for name in values
        if loaders_of(name) and _is_file_of_others(Path(folder, f"{name}.dat"), raw_bytes(values[name]))
    ]
    if any(not each.has_survived for name in replaced for each in loaders_of(name)):
        gc.collect()  # models that nobody has any more need no files
        for each in list(LOADERS.values()):
            each.has_survived = True
    is_kept = False
    for name in replaced:
        if loaders := loaders_of(name):
            is_kept, file = True, ReplacedFile(Path(folder, f"{name}.dat"))
            for loader in loaders:
                loader.replaced_files[name] = file
    return is_kept


def raw_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order, on the CPU."""
    value = value.detach().cpu().contiguous()
    return value.reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)


def _is_file_of_others(file: Path, raw: torch.Tensor) -> bool:
    """Return True when a file exists and holds other bytes than these."""
    if not file.exists():
        return False
    if file.stat().st_size != raw.numel():
        return True
    return raw.numel() > 0 and not torch.equal(
        raw, torch.from_file(str(file), size=raw.numel(), dtype=torch.uint8)
    )
