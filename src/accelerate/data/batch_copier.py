"""Copies of batches to the device, on a stream of their own: they overlap with what the device computes.

A copy on the compute stream would begin when all work that the program has queued is done, and one from
memory that is not pinned makes the host wait for that. A small copy from pinned memory goes there still: the
host takes longer to use another stream than the device to copy.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from accelerate import device as devices
from accelerate.core import tree
from accelerate.world.local_tensor_trees import send_to_device

# Memory of a copied batch is not used again before the device has read it: the host may be ahead of the
# device by so many batches, and then waits for the oldest one.
_BATCHES_AHEAD = 4
# Bytes: 21 us at 50 GB/s (PCIe 5). The host of an H200 took 120 us for another stream (2026-11-26).
_SMALL_BATCH = 2**20


@functools.cache
def _copy_stream(device_type: str, index: int | None) -> Any:
    """Return one stream for all loaders: memory that was freed on it serves only it again."""
    return devices.get(device_type).stream(index)


class BatchCopier:
    """Copies the batches of an epoch to a device.

    Args:
        device: the device; None: batches stay where they are.
        non_blocking: the host does not wait for copies from memory that is not pinned either.
    """

    def __init__(self, device: torch.device | str | None, non_blocking: bool) -> None:
        self.device = None if device is None else torch.device(device)
        self.non_blocking = non_blocking
        self._requests: deque[Any] = deque()
        self._stream: Any = None
        self._is_host = self.device is not None and self.device.type == "cpu"
        if self.device is not None and self.device.type not in ("cpu", "meta"):
            self._hardware = devices.get(self.device.type)
            if self._hardware.pins_memory:
                self._stream = _copy_stream(self.device.type, self.device.index)

    def copy(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device; the current stream waits for them.

        Only plain tensors of the host go over the copy stream. Tensors of a device are changed by work of
        the current stream, and objects with a ``to`` of their own may hold tensors that cannot be marked.
        """
        if self.device is None:
            return batch
        values = _flat_values(batch)
        if self._is_host and values is not None and all(map(_is_plain_host_tensor, values)):
            return type(batch)(batch)
        tensors = [] if self._stream is None else _find_copied_tensors(batch, values)
        if not tensors:
            return send_to_device(batch, self.device, self.non_blocking)
        # Torch keeps pinned memory until the copies out of it are over.
        is_pinned = all(tensor.is_pinned() for tensor in tensors)
        if is_pinned and sum(tensor.nbytes for tensor in tensors) <= _SMALL_BATCH:
            return send_to_device(batch, self.device, True)
        now = self._hardware.current_stream(self.device.index)
        self._limit_lead(now)
        with self._hardware.use_stream(self._stream):
            copied = send_to_device(batch, self.device, self.non_blocking or is_pinned)
            event = self._hardware.record_event(self._stream)
        self._hardware.wait_event(event, now)
        for leaf in _leaves(copied, _flat_values(copied)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device.type:
                # Allocated on the copy stream, which must not use the memory before ``now`` has read it.
                leaf.record_stream(now)
        return copied

    def _limit_lead(self, stream: Any) -> None:
        self._requests.append(self._hardware.record_event(stream))
        if len(self._requests) > _BATCHES_AHEAD:
            self._requests.popleft().synchronize()


def _flat_values(batch: Any) -> Iterable[Any] | None:
    """Return what a list, tuple or dict holds; None for a batch of another type."""
    if type(batch) is dict:
        return batch.values()
    return batch if type(batch) in (list, tuple) else None


def _leaves(batch: Any, values: Iterable[Any] | None) -> list[Any]:
    """Return the leaves of a batch; a walk through the tree costs five times as much as a flat list."""
    if values is not None and all(isinstance(value, torch.Tensor) for value in values):
        return list(values)
    return [leaf for _, leaf in tree.iterate_leaves(batch)]


def _find_copied_tensors(batch: Any, values: Iterable[Any] | None) -> list[torch.Tensor]:
    """Return the tensors of a batch; none where a leaf cannot go over the copy stream."""
    leaves = _leaves(batch, values)
    if not all(map(_can_use_copy_stream, leaves)):
        return []
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_plain_host_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor and value.is_cpu


def _can_use_copy_stream(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return _is_plain_host_tensor(leaf) and leaf.layout is torch.strided
    return not hasattr(leaf, "to") or isinstance(leaf, type)
