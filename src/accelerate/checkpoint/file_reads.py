"""Reads of files straight into the memory of tensors, in large blocks by several threads.

What is loaded must not depend on its file any more: a mapped file that is changed, or whose disk goes away
later, would change or end the training. And it must not be in memory twice. So torch files are read through
``FileRangeReader``, which torch lets fill the memory of each tensor; tensors of safetensors files, which
are mapped and not touched, are read into the tensor that takes them, or uploaded to its device, see
``FileReadTorchFunctionMode``; and shards by a ``ReadPlan``, which knows where in a file the values of each
tensor are.

Weights for inference stay mapped, and privately: nothing is read before a page is touched, what is written
goes to memory of this process, page by page, and nothing is ever written back. Who replaces the file by
renaming another one to its name leaves the mapping alone, and that is how everything here saves. Who writes
into the file, or cuts it, changes the tensors, or ends the process with SIGBUS.

Values that go to a device are read by threads into pinned memory, which a stream copies. Copied from a
mapped file, a tensor crosses the bus at a fraction of its rate, after the host has read it page by page. Here
tensors share a few blocks of pinned memory. While the copies out of one are under way, threads read into the
next, so that the slower of disk and bus decides how long a load takes.

Source: NVIDIA, CUDA C++ Best Practices Guide 13.0, "Pinned Memory" and "Asynchronous and Overlapping
Transfers with Computation".
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from accelerate import device as devices
from accelerate.checkpoint import state_dict_files
from accelerate.checkpoint.file_access import file_errors, usable_cores
from accelerate.core import tree
from accelerate.core.errors import CheckpointError

CHUNK = 4 * 2**20
HOST = torch.device("cpu")
_LARGE = 2**20
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


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
        CheckpointError: the file ends before, or cannot be read.
    """
    with file_errors("read", path), path.open("rb", buffering=0) as file:
        got = read_at(file.fileno(), view, at)
        if got < len(view):
            raise EOFError(f"it ends at {at + got} bytes, {len(view)} were expected at {at}")


def read_parallel(path: Path, at: int, target: memoryview, pool: ThreadPoolExecutor) -> None:
    """Fill ``target`` with the bytes of a file from position ``at`` on, by several threads.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    starts = range(0, len(target), CHUNK)
    if len(starts) == 1:  # to hand it to another thread costs more
        read_exactly(path, at, target)
        return
    for _ in pool.map(lambda start: read_exactly(path, at + start, target[start : start + CHUNK]), starts):
        pass


class FileRangeReader(io.RawIOBase):
    """A file, or a range of it, open for reading; large blocks are read by several threads.

    Args:
        path: the file.
        offset, length: the range in bytes; all by default.

    Attributes:
        name: its path.
    """

    def __init__(self, path: Path, offset: int = 0, length: int | None = None) -> None:
        self.name = str(path)
        self._path, self._offset, self._at = path, offset, 0
        self._pool: ThreadPoolExecutor | None = None
        self._file = path.open("rb", buffering=0)
        self._length = os.fstat(self._file.fileno()).st_size - offset if length is None else length

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position; return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer``, or as much of it as the range has; return the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        start, got = self._offset + self._at, len(view)
        if len(view) < _LARGE:
            got = read_at(self._file.fileno(), view, start)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(usable_cores(), "read")
            read_parallel(self._path, start, view, self._pool)
        self._at += got
        return got

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            if self._pool is not None:
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
        """Return the addresses of the tensors that ``read_safetensors`` mapped from a file."""
        entries, start, _ = state_dict_files.read_safetensors_header(path)
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        places = {name: (start + begin, end - begin) for name, (begin, end) in offsets.items()}
        return cls(path, {value.data_ptr(): places[name] for name, value in state.items()})


def load_from_mapped(
    files: Iterable[MappedTensorAddresses],
    load: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``load``, and read from mapped ``files`` what it copies; return its result.

    Args:
        files: those from which tensors are mapped.
        load: copies mapped tensors into others.
        args, kwargs: its arguments.

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

    Only where that gives the same values: a plain tensor of the same shape, both contiguous, and ``a`` of the
    same dtype in host memory, or on a device that takes uploads. Uploads are over at the end of the mode, or
    before something else uses such a tensor. Everything else goes its usual way, through the mapping.

    Args:
        files: see ``load_from_mapped``.

    Attributes:
        failure: why a file could not be read.
    """

    def __init__(self, files: Iterable[MappedTensorAddresses]) -> None:
        super().__init__()
        self.failure: CheckpointError | None = None
        self._sources = {at: (file.path, *place) for file in files for at, place in file.file_ranges.items()}
        self._pool = ThreadPoolExecutor(usable_cores(), "copy")
        self._uploads = DeviceUploads()
        self._uploaded: set[int] = set()  # addresses of the storages whose values are on their way

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pool.shutdown()
        if error[0] is None:
            self._uploads.finish()
        else:
            self._uploads.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and len(args) == 2 and not kwargs and self._read_directly(*args):
            return args[0]
        if self._uploaded and getattr(func, "__name__", "") != "__get__":
            self._finish_uploads_of([args, kwargs or {}])
        return func(*args, **(kwargs or {}))

    def _read_directly(self, target: Any, source: Any) -> bool:
        if not (is_plain(source) and is_plain(target, target.device)) or target.shape != source.shape:
            return False
        path, at, size = self._sources.get(source.data_ptr(), (Path(), 0, 0))
        if not 0 < source.nbytes <= size:
            return False
        try:
            if target.device.type != "cpu":
                region = FileRegion(path, at)
                accepts = self._uploads.accepts(region, target.device)
                if accepts:
                    self._uploads.add(region, source.dtype, target)
                    self._uploaded.add(target.untyped_storage().data_ptr())
                return accepts
            if target.dtype != source.dtype:
                return False
            read_parallel(path, at, memory_of(target), self._pool)
        except CheckpointError as error:
            self.failure = self.failure or error
            raise
        torch.autograd.graph.increment_version(target)
        return True

    def _finish_uploads_of(self, arguments: Any) -> None:
        """Finish all uploads if an argument is a tensor, or a view of one, whose values are on their way."""
        for _, leaf in tree.iterate_leaves(arguments):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type in ("cpu", "meta"):
                continue
            # A tensor that wraps others may wrap one of these.
            if type(leaf) not in _PLAIN or leaf.untyped_storage().data_ptr() in self._uploaded:
                self._uploaded.clear()
                self._uploads.finish()
                return


def is_plain(tensor: Any, device: torch.device = HOST) -> bool:
    """Return True for a contiguous plain tensor in host memory, or on another device."""
    return (
        type(tensor) in _PLAIN
        and tensor.device == device
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, as bytes."""
    # A dimension of length one may have any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class FileRegion:
    """The position of a tensor's values in a file, contiguous as they are in memory.

    Attributes:
        path: the file.
        offset: of the first byte.
        stride: in elements; None for row after row.
    """

    path: Path
    offset: int
    stride: tuple[int, ...] | None = None


BLOCK = 64 * 2**20  # bytes of pinned memory that are filled at once
BLOCKS = 3  # one is read into, one is copied from, and one waits between the two
_ALIGNMENT = 512  # bytes between the starts of two pieces: a multiple of every dtype's size
_READERS = 8


class _TensorSlice(NamedTuple):
    """Values of a tensor that share a block with others: ``target`` gets those at ``start`` of the block."""

    path: Path
    offset: int
    start: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


class DeviceUploader:
    """Fills tensors of one device with values of files.

    Args:
        device: it has streams, and copies from pinned memory without the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._hardware = device, devices.get(device.type)
        self._stream = self._hardware.stream(device.index)
        self._readers = ThreadPoolExecutor(min(_READERS, usable_cores()), "read")
        # With the event behind the last copy out of each; the oldest is the first.
        self._blocks: deque[tuple[torch.Tensor, Any]] = deque()
        self._pieces: list[_TensorSlice] = []
        self._used = 0

    def add(self, region: FileRegion, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Fill a tensor, at the latest when ``close`` returns after ``send``.

        Args:
            region: where its values are in a file, one after the other.
            dtype: of the values in the file.
            target: contiguous, on the device.

        Raises:
            CheckpointError: a file cannot be read, or ends too early.
        """
        flat, done = target.detach().reshape(-1), 0
        while done < flat.numel():
            start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            count = min(flat.numel() - done, max(0, BLOCK - start) // dtype.itemsize)
            if count == 0:
                self.send()
                continue
            offset = region.offset + done * dtype.itemsize
            self._pieces.append(_TensorSlice(region.path, offset, start, dtype, flat[done : done + count]))
            self._used, done = start + count * dtype.itemsize, done + count

    def close(self) -> None:
        """Wait until no copy is under way: the memory of targets may be used for something else then."""
        self._readers.shutdown()
        self._pieces.clear()
        while self._blocks:
            self._blocks.popleft()[1].synchronize()

    def send(self) -> None:
        """Read what was added into a block, and have the stream copy it.

        Raises:
            CheckpointError: a file cannot be read, or ends too early.
        """
        pieces, size = self._pieces, self._used
        self._pieces, self._used = [], 0
        if not pieces:
            return
        hardware, block = self._hardware, self._next_block(size)
        jobs: list[tuple[Path, int, memoryview]] = []
        for piece in pieces:
            memory = block.numpy().data[piece.start : piece.start + piece.nbytes]
            starts = range(0, len(memory), CHUNK)
            jobs += [(piece.path, piece.offset + at, memory[at : at + CHUNK]) for at in starts]
        for _ in self._readers.map(lambda job: read_exactly(*job), jobs):
            pass
        # The memory of a target may still be in use by work of the current stream, which had it before.
        hardware.wait_event(hardware.record_event(hardware.current_stream(self._device.index)), self._stream)
        with hardware.use_stream(self._stream), torch.no_grad():
            for piece in pieces:
                values = block[piece.start : piece.start + piece.nbytes].view(piece.dtype)
                if piece.dtype != piece.target.dtype:
                    values = values.to(self._device, non_blocking=True)  # and converted there
                piece.target.copy_(values, non_blocking=True)
            copied = hardware.record_event(self._stream)
        self._blocks.append((block, copied))

    def _next_block(self, size: int) -> torch.Tensor:
        """Return pinned memory that no copy reads any more, of at least ``size`` bytes."""
        if len(self._blocks) == BLOCKS:
            block, copied = self._blocks.popleft()
            copied.synchronize()
            if block.numel() >= size:
                return block
        # torch's allocator of pinned memory rounds up to a power of two.
        return self._hardware.host_memory(min(BLOCK, 1 << max(size - 1, 1).bit_length()))


@dataclass
class DeviceUploads:
    """The uploads of one load, to any devices; a context, at whose end all values are where they belong."""

    _uploaders: dict[torch.device, DeviceUploader] = field(default_factory=dict)

    def __enter__(self) -> DeviceUploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def finish(self) -> None:
        """Return when all values that were added are where they belong; others may be added after.

        Raises:
            CheckpointError: a file cannot be read, or ends too early.
        """
        try:
            for uploader in self._uploaders.values():
                uploader.send()
        finally:
            self.close()

    def close(self) -> None:
        """Drop what is not read yet, and wait until no copy is under way."""
        while self._uploaders:
            self._uploaders.popitem()[1].close()

    def accepts(self, region: FileRegion | None, device: torch.device) -> bool:
        """Return whether values of a file can be uploaded: they lie row after row, the device pins memory."""
        if region is None or region.stride is not None or device.type in ("cpu", "meta"):
            return False
        return devices.get(device.type).pins_memory

    def add(self, region: FileRegion, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Fill a contiguous tensor of a device with values of a file, see ``DeviceUploader.add``."""
        if target.device not in self._uploaders:
            self._uploaders[target.device] = DeviceUploader(target.device)
        self._uploaders[target.device].add(region, dtype, target)


@dataclass(frozen=True)
class TensorLocation:
    """The position of a tensor's values in a file.

    Attributes:
        path: the file they are in.
        start: of the tensor's storage, in bytes.
        meta_tensor: the tensor on the meta device.
    """

    path: Path
    start: int
    meta_tensor: torch.Tensor


@dataclass
class ReadPlan:
    """The reads of a load, and the tensors that they fill; nothing is read before ``run``.

    Attributes:
        direct_reads: (file, position, memory that it fills).
        upload_reads: (position in a file, tensor of a device that it fills).
        fallback_reads: functions that read what cannot be read straight.
        written_tensors: tensors of the host that get new values.
        device_uploads: runs the reads of devices.
    """

    direct_reads: list[tuple[Path, int, memoryview]] = field(default_factory=list)
    upload_reads: list[tuple[FileRegion, torch.Tensor]] = field(default_factory=list)
    fallback_reads: list[Callable[[], None]] = field(default_factory=list)
    written_tensors: list[torch.Tensor] = field(default_factory=list)
    device_uploads: DeviceUploads = field(default_factory=DeviceUploads)

    def add(self, location: TensorLocation, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Plan to fill ``target`` straight from a file; return False if that would not give the same bytes.

        Args:
            location: the position of the values.
            source: a view of ``location.meta_tensor``: which of them.
            target: of its shape.
        """
        fits = source.is_contiguous() and target.dtype == source.dtype
        if not fits or source.is_conj() or source.is_neg() or source.is_quantized:
            return False
        at = location.start + int(source.storage_offset()) * source.element_size()
        if not is_plain(target):
            region = FileRegion(location.path, at)
            accepts = is_plain(target, target.device) and self.device_uploads.accepts(region, target.device)
            if accepts:
                self.upload_reads.append((region, target))
            return accepts
        view = memory_of(target)
        for first in range(0, len(view), CHUNK):
            self.direct_reads.append((location.path, at + first, view[first : first + CHUNK]))
        self.written_tensors.append(target)
        return True

    def run(self) -> None:
        """Run all reads.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if len(self.direct_reads) > 1:
            with ThreadPoolExecutor(usable_cores(), "read") as pool:
                for _ in pool.map(lambda job: read_exactly(*job), self.direct_reads):
                    pass
        else:
            for job in self.direct_reads:
                read_exactly(*job)
        if self.upload_reads:
            with self.device_uploads:
                for region, target in self.upload_reads:
                    self.device_uploads.add(region, target.dtype, target)
        for function in self.fallback_reads:
            function()
        for tensor in self.written_tensors:
            torch.autograd.graph.increment_version(tensor)
