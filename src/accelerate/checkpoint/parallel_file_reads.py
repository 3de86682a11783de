"""Parallel reads of files straight into the memory of tensors, in large blocks by several threads.

What is loaded must not depend on its file any more: a mapped file that is changed, or whose disk goes away
later, would change or end the training. And it must not be in memory twice. So torch files are read through
``ParallelReadFile``, which torch lets fill the memory of each tensor; and tensors of safetensors files, which
are mapped and not touched, are read into the tensor that takes them, see ``FileReadTorchFunctionMode``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accelerate.checkpoint import state_dict_files
from accelerate.checkpoint.digest import usable_cores
from accelerate.checkpoint.errors import file_errors
from accelerate.core.errors import CheckpointError

CHUNK = 4 * 2**20
_LARGE = 2**20


def read_at(number: int, view: memoryview, offset: int) -> int:
    """Read bytes from ``offset`` on until ``view`` is full or the file ends; return their number."""
    done = 0
    while done < len(view):
        if hasattr(os, "preadv"):
            got = os.preadv(number, [view[done:]], offset + done)
        else:
            os.lseek(number, offset + done, os.SEEK_SET)
            piece = os.read(number, len(view) - done)
            got = len(piece)
            view[done : done + got] = piece
        if got == 0:
            break
        done += got
    return done


def read_exactly(path: Path, at: int, view: memoryview) -> None:
    """Fill ``view`` with the bytes of a file from position ``at`` on.

    Raises:
        EOFError: the file ends before.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        got = read_at(file.fileno(), view, at)
    if got < len(view):
        raise EOFError(f"it ends at {at + got} bytes, {len(view)} were expected at {at}")


def read_parallel(path: Path, at: int, target: memoryview, pool: ThreadPoolExecutor) -> None:
    """Fill ``target`` with the bytes of a file from position ``at`` on, by several threads.

    Raises:
        EOFError: the file ends before.
        OSError: it cannot be read.
    """
    starts = range(0, len(target), CHUNK)
    for _ in pool.map(lambda start: read_exactly(path, at + start, target[start : start + CHUNK]), starts):
        pass


class ParallelReadFile(io.RawIOBase):
    """A file open for reading, of which large blocks are read by several threads.

    Attributes:
        name: its path.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path, self._at = path, 0
        self._file = path.open("rb", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        self._pool = ThreadPoolExecutor(usable_cores(), "read")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position; return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer``, or as much of it as the file has; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._at)]
        if len(view) >= _LARGE:
            read_parallel(self._path, self._at, view, self._pool)
            got = len(view)
        else:
            self._file.seek(self._at)
            got = self._file.readinto(view)
        self._at += got
        return got

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._pool.shutdown()
            self._file.close()
        super().close()


@dataclass(frozen=True)
class MappedTensorAddresses:
    """The addresses at which the tensors of one file are mapped.

    Attributes:
        path: the file.
        file_ranges: address of a tensor -> (position in the file, bytes).
    """

    path: Path
    file_ranges: dict[int, tuple[int, int]]

    @classmethod
    def create(cls, path: Path, state: Mapping[str, torch.Tensor]) -> MappedTensorAddresses:
        """Return the addresses of the tensors that ``tensors.read_safetensors`` mapped from a file."""
        places = state_dict_files.file_ranges(path)
        return cls(path, {value.data_ptr(): places[name] for name, value in state.items()})


def load_from_mapped(
    files: Iterable[MappedTensorAddresses], load: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``load``, and read from mapped ``files`` what it copies; return its result.

    Raises:
        CheckpointError: a file cannot be read.
    """
    with FileReadTorchFunctionMode(files) as copies:
        try:
            return load(*args, **kwargs)
        except RuntimeError as error:  # a module gathers what its copies raise into one text
            if copies.failure is not None:
                raise copies.failure from error
            raise


class FileReadTorchFunctionMode(TorchFunctionMode):
    """A torch function mode: ``a.copy_(b)`` reads the file that ``b`` is mapped from straight into ``a``.

    Only where that gives the same bytes: a plain tensor on the CPU of the same dtype and shape, both
    contiguous. Everything else goes its usual way, through the mapping.

    Attributes:
        failure: why a file could not be read.
    """

    def __init__(self, files: Iterable[MappedTensorAddresses]) -> None:
        super().__init__()
        self.failure: CheckpointError | None = None
        self._sources = {at: (file.path, *place) for file in files for at, place in file.file_ranges.items()}
        self._pool = ThreadPoolExecutor(usable_cores(), "copy")

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pool.shutdown()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and len(args) == 2 and not kwargs and self._read_directly(*args):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _read_directly(self, target: Any, source: Any) -> bool:
        if not (is_plain(target) and is_plain(source)):
            return False
        path, at, size = self._sources.get(source.data_ptr(), (Path(), 0, 0))
        if target.dtype != source.dtype or target.shape != source.shape or not 0 < target.nbytes <= size:
            return False
        try:
            with file_errors("read", path):
                read_parallel(path, at, memory_of(target), self._pool)
        except CheckpointError as error:
            self.failure = self.failure or error
            raise
        torch.autograd.graph.increment_version(target)
        return True


def is_plain(tensor: Any) -> bool:
    """Return True for a contiguous plain tensor in host memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, as bytes."""
    # A dimension of length one may have any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
