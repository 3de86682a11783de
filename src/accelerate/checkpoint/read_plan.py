"""The reads of a load, planned before the first byte is read: straight into the tensors where they can."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from accelerate.checkpoint.device_uploads import DeviceUploads
from accelerate.checkpoint.durable_file import usable_cores
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.file_reads import CHUNK, FileRegion, is_plain, memory_of, read_exactly


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
                for _ in pool.map(_run_read, self.direct_reads):
                    pass
        else:
            for job in self.direct_reads:
                _run_read(job)
        if self.upload_reads:
            with self.device_uploads:
                for region, target in self.upload_reads:
                    self.device_uploads.add(region, target.dtype, target)
        for function in self.fallback_reads:
            function()
        for tensor in self.written_tensors:
            torch.autograd.graph.increment_version(tensor)


def _run_read(job: tuple[Path, int, memoryview]) -> None:
    path, at, view = job
    with file_errors("read", path):
        read_exactly(path, at, view)
