"""Files of an offload folder whose names another model has taken: who read them goes on reading them."""

from __future__ import annotations

import os
import shutil
import uuid
import weakref
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


def is_file_of_others(file: Path, raw: torch.Tensor) -> bool:
    """Return True when a file exists and holds other bytes than these."""
    if not file.exists():
        return False
    if file.stat().st_size != raw.numel():
        return True
    return raw.numel() > 0 and not torch.equal(
        raw, torch.from_file(str(file), size=raw.numel(), dtype=torch.uint8)
    )
