"""Pages: weights that travel together, as one range of bytes on the host and one on the device.

A page of weights that live in memory has its own range of (pinned) host memory: one copy brings all of it to
the device, and views of that copy are the parameters. A page of weights that live in files has no host
memory; its values are read from their sources each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from accelerate.device.base import Device
from accelerate.offload.source import HostSource, Source
from accelerate.offload.tensor import OffloadedTensor

ALIGNMENT = 512  # bytes between the starts of two weights; kernels like it, and every dtype divides it
SLAB = 2**29  # bytes of host memory that are asked for at once


class Piece:
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
        """The weight in the bytes of its page, which are given in its dtype."""
        return typed.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


def _stride(source: Source) -> tuple[int, ...]:
    """Of a dense tensor in memory its own, so that a layout such as channels_last stays."""
    if isinstance(source, HostSource) and torch.ops.aten.is_non_overlapping_and_dense(source.tensor):
        return source.tensor.stride()
    return torch.empty(source.shape, device="meta").stride()


class Page:
    """Weights that travel together.

    Attributes:
        nbytes: of all of them, with the gaps between them.
        host: the bytes in host memory, or None if the values are read from their sources each time.
        shared: several blocks have weights of it.
    """

    def __init__(self, stand_ins: Iterable[OffloadedTensor], shared: bool = False) -> None:
        self.pieces: list[Piece] = []
        self.nbytes = 0
        for stand_in in stand_ins:
            self.pieces.append(Piece(stand_in, self.nbytes))
            self.nbytes += -(-self.pieces[-1].nbytes // ALIGNMENT) * ALIGNMENT
        self.host: torch.Tensor | None = None
        self.shared = shared

    @property
    def key(self) -> tuple[int, ...]:
        """Which weights it has."""
        return tuple(id(piece.stand_in) for piece in self.pieces)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece with its weight in ``buffer``, the bytes of the page somewhere."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        for piece in self.pieces:
            if piece.dtype not in typed:
                typed[piece.dtype] = buffer.view(piece.dtype)
            yield piece, piece.view(typed[piece.dtype])

    def gather(self, memory: HostMemory) -> None:
        """Moves the values into host memory of the page's own; what held them is let go."""
        self.host = region = memory.take(self.nbytes)
        raw = region.numpy()
        for piece in self.pieces:
            source = piece.stand_in.source
            # A storage of its own over the same bytes: who saves or copies the weight gets no more than it.
            flat = torch.from_numpy(raw[piece.offset : piece.offset + piece.nbytes]).view(piece.dtype)
            home = flat.as_strided(piece.size, piece.stride)
            home.copy_(source.host().detach())
            assert isinstance(source, HostSource)
            source.tensor = home


def is_movable(stand_in: OffloadedTensor) -> bool:
    """Whether a weight's values may move into the memory of a page."""
    return isinstance(stand_in.source, HostSource)


class HostMemory:
    """Host memory for pages, asked for in large pieces where it is pinned.

    Torch rounds pinned memory up to powers of two: asking for such sizes wastes none.

    Args:
        device: whose copies it serves.
        total: bytes that will be taken in all, a guess.
    """

    def __init__(self, device: Device, total: int) -> None:
        self.device, self.left = device, total
        self.slab: torch.Tensor | None = None
        self.used = 0

    def take(self, size: int) -> torch.Tensor:
        """``size`` bytes (uint8)."""
        if not self.device.pins:
            return self.device.host_memory(size)
        if self.slab is None or self.used + size > self.slab.numel():
            half = 1 << (max(self.left, 1).bit_length() - 1)  # the largest power of two within what is left
            whole = 1 << (max(size, 1) - 1).bit_length()
            self.slab, self.used = self.device.host_memory(max(min(half, SLAB), whole)), 0
        region = self.slab[self.used : self.used + size]
        self.used += size
        self.left = max(0, self.left - size)
        return region


class Staging:
    """Two blocks of host memory through which pages of files go, in turn.

    While one is being copied to the device, the other is filled from the files.

    Args:
        device: whose copies it serves.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.blocks: list[tuple[torch.Tensor, Any]] = []  # the next one first, with the copy that empties it

    def fill(self, page: Page) -> torch.Tensor:
        """The bytes of ``page``, in a block whose last copy is over."""
        block = None
        if len(self.blocks) == 2:
            block, emptied = self.blocks.pop(0)
            emptied.synchronize()
            if block.numel() < page.nbytes:
                block = None
        if block is None:
            block = self.device.host_memory(1 << max(page.nbytes - 1, 1).bit_length())
        read(page, block[: page.nbytes])
        self.filled = block
        return block[: page.nbytes]

    def leaves(self, copy: Any) -> None:
        """The block that was filled last is free when ``copy`` (an event) is over."""
        self.blocks.append((self.filled, copy))


def read(page: Page, buffer: torch.Tensor) -> None:
    """Puts the values of a page into its bytes, on the host or on a device, one weight after the other."""
    for piece, view in page.views(buffer):
        view.copy_(piece.stand_in.source.host().detach())


def split_by_home(stand_ins: Sequence[OffloadedTensor]) -> list[list[OffloadedTensor]]:
    """Those in memory, and those that are read from elsewhere; empty groups left out."""
    memory = [s for s in stand_ins if is_movable(s)]
    others = [s for s in stand_ins if not is_movable(s)]
    return [group for group in (memory, others) if group]
