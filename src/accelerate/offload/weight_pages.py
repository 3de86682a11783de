"""Pages: weights that are copied together, as one range of bytes on the host and one on the device.

A page of weights that live in memory has its own range of (pinned) host memory: one copy brings all of it to
the device, and views of that copy are the parameters. A page of weights that live in files has no host
memory; its values are read from their sources each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from accelerate.device.base import Device
from accelerate.offload.offloaded_tensor import HostMemoryWeightSource, OffloadedTensor, TensorSource

ALIGNMENT = 512  # bytes between the starts of two weights; kernels like it, and every dtype divides it
SLAB = 2**29  # bytes of host memory that are asked for at once


class PagedWeight:
    """One weight of a page.

    Attributes:
        stand_in: what stands for it in the modules while its values are not on the device.
        offset: where it begins in the page, in bytes.
        stride: of the tensor on the device; dense tensors keep theirs.
    """

    def __init__(self, stand_in: OffloadedTensor, offset: int) -> None:
        self.stand_in, self.offset = stand_in, offset
        source = stand_in.source
        self.dtype, self.size, self.nbytes = source.dtype, source.shape, source.nbytes
        self.stride = _stride(source)

    def view(self, typed: torch.Tensor) -> torch.Tensor:
        """Return the weight as a view of its page's bytes, which are given in its dtype."""
        return typed.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


def _stride(source: TensorSource) -> tuple[int, ...]:
    """Return the strides on the device: a dense tensor in memory keeps its own, such as channels_last."""
    if isinstance(source, HostMemoryWeightSource) and torch.ops.aten.is_non_overlapping_and_dense(
        source.tensor
    ):
        return source.tensor.stride()
    return torch.empty(source.shape, device="meta").stride()


class WeightPage:
    """Weights that are copied to the device together.

    Attributes:
        nbytes: of all of them, with the gaps between them.
        host: the bytes in host memory, or None if the values are read from their sources each time.
        shared: several blocks have weights of it.
    """

    def __init__(self, stand_ins: Iterable[OffloadedTensor], shared: bool = False) -> None:
        self.entries: list[PagedWeight] = []
        self.nbytes = 0
        for stand_in in stand_ins:
            self.entries.append(PagedWeight(stand_in, self.nbytes))
            self.nbytes += -(-self.entries[-1].nbytes // ALIGNMENT) * ALIGNMENT
        self.host: torch.Tensor | None = None
        self.shared = shared

    @property
    def key(self) -> tuple[int, ...]:
        """The identities of its weights."""
        return tuple(id(entry.stand_in) for entry in self.entries)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[PagedWeight, torch.Tensor]]:
        """Return each entry with its weight as a view of ``buffer``, the bytes of the page on some device."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        for entry in self.entries:
            if entry.dtype not in typed:
                typed[entry.dtype] = buffer.view(entry.dtype)
            yield entry, entry.view(typed[entry.dtype])

    def move_to_host(self, memory: HostPageAllocator) -> None:
        """Move the values into host memory of the page's own, and free the tensors that held them."""
        self.host = region = memory.allocate(self.nbytes)
        raw = region.numpy()
        for entry in self.entries:
            source = entry.stand_in.source
            # A storage of its own over the same bytes: who saves or copies the weight gets no more than it.
            flat = torch.from_numpy(raw[entry.offset : entry.offset + entry.nbytes]).view(entry.dtype)
            home = flat.as_strided(entry.size, entry.stride)
            home.copy_(source.host_tensor().detach())
            assert isinstance(source, HostMemoryWeightSource)
            source.tensor = home


def is_movable(stand_in: OffloadedTensor) -> bool:
    """Return True when a weight's values may move into the memory of a page."""
    return isinstance(stand_in.source, HostMemoryWeightSource)


class HostPageAllocator:
    """Host memory for pages, allocated in large slabs where it is pinned.

    Torch rounds pinned memory up to powers of two: asking for such sizes wastes none.

    Args:
        device: whose copies it serves.
        total: bytes that will be taken in all, a guess.
    """

    def __init__(self, device: Device, total: int) -> None:
        self.device, self.bytes_left = device, total
        self.slab: torch.Tensor | None = None
        self.used = 0

    def allocate(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of host memory (uint8)."""
        if not self.device.pins_memory:
            return self.device.host_memory(size)
        if self.slab is None or self.used + size > self.slab.numel():
            half = 1 << (
                max(self.bytes_left, 1).bit_length() - 1
            )  # the largest power of two within what is left
            whole = 1 << (max(size, 1) - 1).bit_length()
            self.slab, self.used = self.device.host_memory(max(min(half, SLAB), whole)), 0
        region = self.slab[self.used : self.used + size]
        self.used += size
        self.bytes_left = max(0, self.bytes_left - size)
        return region


class StagingBuffers:
    """Two host buffers through which pages of files are copied, in turn.

    While one is being copied to the device, the other is filled from the files.

    Args:
        device: whose copies it serves.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.blocks: list[tuple[torch.Tensor, Any]] = []  # the next one first, with the copy that empties it

    def fill(self, page: WeightPage) -> torch.Tensor:
        """Read ``page`` into a buffer whose last copy is over, and return its bytes."""
        block = None
        if len(self.blocks) == 2:
            block, emptied = self.blocks.pop(0)
            emptied.synchronize()
            if block.numel() < page.nbytes:
                block = None
        if block is None:
            block = self.device.host_memory(1 << max(page.nbytes - 1, 1).bit_length())
        read_page(page, block[: page.nbytes])
        self.filled = block
        return block[: page.nbytes]

    def mark_copying(self, copy: Any) -> None:
        """Mark the buffer that was filled last as in use until ``copy`` (an event) is over."""
        self.blocks.append((self.filled, copy))


def read_page(page: WeightPage, buffer: torch.Tensor) -> None:
    """Read the values of a page into ``buffer``, on the host or on a device, one weight after the other."""
    for entry, view in page.views(buffer):
        view.copy_(entry.stand_in.source.host_tensor().detach())


def split_by_source(stand_ins: Sequence[OffloadedTensor]) -> list[list[OffloadedTensor]]:
    """Split stand-ins into those in memory and those that are read from files; leave empty groups out."""
    memory = [s for s in stand_ins if is_movable(s)]
    others = [s for s in stand_ins if not is_movable(s)]
    return [group for group in (memory, others) if group]
