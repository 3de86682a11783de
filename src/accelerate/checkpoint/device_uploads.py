"""Values of files that go to a device: threads read them into pinned memory, and a stream copies it.

Copied from a mapped file, a tensor crosses the bus at a fraction of its rate, after the host has read it page
by page. Here tensors share a few blocks of pinned memory. While the copies out of one are under way, threads
read into the next, so that the slower of disk and bus decides how long a load takes.

Source: NVIDIA, CUDA C++ Best Practices Guide 13.0, "Pinned Memory" and "Asynchronous and Overlapping
Transfers with Computation".
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accelerate import device as devices
from accelerate.checkpoint.durable_file import usable_cores
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.file_reads import CHUNK, FileRegion, read_exactly

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
        """Fill a tensor, at the latest when ``finish`` returns.

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
                self._send()
                continue
            offset = region.offset + done * dtype.itemsize
            self._pieces.append(_TensorSlice(region.path, offset, start, dtype, flat[done : done + count]))
            self._used, done = start + count * dtype.itemsize, done + count

    def finish(self) -> None:
        """Read and copy what is left; return when all values are on the device.

        Raises:
            CheckpointError: a file cannot be read, or ends too early.
        """
        self._send()

    def close(self) -> None:
        """Wait until no copy is under way: the memory of targets may be used for something else then."""
        self._readers.shutdown()
        self._pieces.clear()
        while self._blocks:
            self._blocks.popleft()[1].synchronize()

    def _send(self) -> None:
        """Read the pieces into a block, and have the stream copy them."""
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
        for _ in self._readers.map(_read, jobs):
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


def _read(job: tuple[Path, int, memoryview]) -> None:
    path, offset, memory = job
    with file_errors("read", path):
        read_exactly(path, offset, memory)


class DeviceUploads:
    """The uploads of one load, to any devices; a context, at whose end all values are where they belong."""

    def __init__(self) -> None:
        self._uploaders: dict[torch.device, DeviceUploader] = {}

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
                uploader.finish()
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
