"""Reads straight into tensors: planned ones of shards, and those of optimizer states.

A process that loads again, as to go back to the best checkpoint, has memory for an optimizer's state already.
Reading the file into it takes a fraction of the time that filling fresh memory takes, and no second copy. A
tensor that somebody else refers to, as through ``optimizer.state_dict()``, keeps its values: then new memory
takes the saved ones. On a device, that is new memory of the device: see ``DeviceUploads``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from accelerate.checkpoint.file_access import file_errors, usable_cores
from accelerate.checkpoint.file_reads import (
    CHUNK,
    HOST,
    DeviceUploads,
    FileRegion,
    is_plain,
    memory_of,
    read_at,
    run_read,
)


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
                for _ in pool.map(run_read, self.direct_reads):
                    pass
        else:
            for job in self.direct_reads:
                run_read(job)
        if self.upload_reads:
            with self.device_uploads:
                for region, target in self.upload_reads:
                    self.device_uploads.add(region, target.dtype, target)
        for function in self.fallback_reads:
            function()
        for tensor in self.written_tensors:
            torch.autograd.graph.increment_version(tensor)


_LARGE = 2**16  # bytes; less is not worth a read of its own


@dataclass(frozen=True)
class MappedFile:
    """A file that is open, and mapped as a whole.

    Attributes:
        path: its name.
        handle: its descriptor, open for reading.
        start, end: the addresses at which it is mapped.
    """

    path: Path
    handle: int
    start: int
    end: int

    def fill_tensors(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Read saved tensors into those that an optimizer has, or will have; these take their places.

        It serves as a hook of ``Optimizer.register_load_state_dict_pre_hook``.

        Args:
            optimizer: its ``load_state_dict`` is about to take ``state``.
            state: a state dict with tensors that are mapped from the file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        jobs: list[tuple[int, memoryview]] = []
        filled: list[torch.Tensor] = []
        with DeviceUploads() as uploads:
            for parameter, values, name in _find_tensors(optimizer, state):
                saved: torch.Tensor = values[name]
                if not self.start <= saved.data_ptr() < self.end:
                    continue
                region = FileRegion(self.path, saved.data_ptr() - self.start)
                target = _owned_tensor(optimizer, parameter, name, saved)
                if uploads.accepts(region, parameter.device):
                    if target is None:
                        target = torch.empty_like(saved, device=parameter.device)
                    uploads.add(region, saved.dtype, target)
                elif target is not None and target.device == HOST:
                    memory, starts = memory_of(target), range(0, target.nbytes, CHUNK)
                    jobs += [(region.offset + at, memory[at : at + CHUNK]) for at in starts]
                    filled.append(target)
                else:
                    continue
                values[name] = target
        with file_errors("read", self.path), ThreadPoolExecutor(usable_cores(), "read") as pool:
            for _ in pool.map(self._read, jobs):
                pass
        for tensor in filled:
            torch.autograd.graph.increment_version(tensor)

    def _read(self, job: tuple[int, memoryview]) -> None:
        offset, memory = job
        if read_at(self.handle, memory, offset) < len(memory):
            raise EOFError(f"it ends before {offset + len(memory)} bytes")


def _find_tensors(
    optimizer: Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, Any], str]]:
    """Yield each parameter, its saved values, and the name of a large plain tensor among these."""
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, number in zip(ours["params"], theirs["params"], strict=False):
            values = state["state"].get(number, {})
            for name, saved in values.items():
                if is_plain(saved) and saved.nbytes >= _LARGE:
                    yield parameter, values, name


def _owned_tensor(
    optimizer: Optimizer, parameter: torch.Tensor, name: str, saved: torch.Tensor
) -> torch.Tensor | None:
    """Return the tensor of a parameter that can take the saved values: nobody else refers to it.

    None where there is none, or where torch does not say how many tensors share a memory.
    """
    if parameter not in optimizer.state or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    if not _fits(optimizer.state[parameter].get(name), saved, parameter.device):
        return None
    if _reference_counts(optimizer.state, parameter, name) != _counts_of_unshared():
        return None
    return optimizer.state[parameter][name]


def _fits(owned: Any, saved: torch.Tensor, device: torch.device) -> bool:
    """Return True for a plain tensor of the same dtype and shape, on that device."""
    if not is_plain(owned, device):
        return False
    return bool(owned.dtype == saved.dtype and owned.shape == saved.shape)


@cache
def _counts_of_unshared() -> tuple[int, int, int]:
    return _reference_counts({0: {"": torch.zeros(1)}}, 0, "")


def _reference_counts(states: Mapping[Any, dict[str, Any]], key: Any, name: str) -> tuple[int, int, int]:
    """Return how many refer to the values of a parameter, to one of its tensors, and to its memory."""
    values = states[key]
    tensor = values[name]
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(values), sys.getrefcount(tensor), uses
