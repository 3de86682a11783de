"""torch files: written by ``torch.save``, read without running code unless the caller says otherwise."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch

from accelerate.checkpoint.errors import file_errors
from accelerate.core.errors import CheckpointError


@cache
def safe_globals() -> list[Any]:
    """What a ``weights_only`` load may build besides torch's own list: numpy arrays, scalars and dtypes.

    These hold data and run nothing.
    """
    array = np.zeros(1, np.uint32)
    rebuild_array: Any = array.__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [value for name, value in vars(np.dtypes).items() if name.endswith("DType")]
    return [rebuild_array, np.ndarray, scalar, np.dtype, _encode(), *dtypes]


def _encode() -> Any:
    from codecs import encode

    return encode  # numpy pickles bytes through it


def write(value: Any, file: BinaryIO) -> None:
    """Writes one torch file."""
    torch.save(value, file)


def read(source: Path | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """The object in a torch file.

    Args:
        source: path, or file open for reading.
        map_location: as ``torch.load`` takes it.
        kwargs: more arguments of ``torch.load``; ``weights_only`` is True unless given.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    kwargs.setdefault("weights_only", True)
    path = source if isinstance(source, Path) else Path(getattr(source, "name", "the stream"))
    with file_errors("read", path), torch.serialization.safe_globals(safe_globals()):
        try:
            return torch.load(source, map_location=map_location, **kwargs)
        except pickle.UnpicklingError as error:
            if not kwargs["weights_only"]:
                raise
            raise CheckpointError(
                f"{path} holds more than data, and reading it could run code",
                why=_refused(error),
                fix="if you trust whoever wrote the file: load_kwargs={'weights_only': False}",
            ) from error


def _refused(error: Exception) -> str:
    """The part of torch's explanation that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else ""
    )
