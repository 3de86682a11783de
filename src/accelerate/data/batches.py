"""The batches of a loader: as they are fetched, copied to the device, and split by rows.

A copy on the compute stream would begin when all work that the program has queued is done, and one from
memory that is not pinned makes the host wait for that. So batches are copied on a stream of their own, and
overlap with what the device computes. A small copy from pinned memory goes on the compute stream still: the
host takes longer to use another stream than the device to copy.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from accelerate import device as devices
from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.world.local_tensor_trees import ignorant_find_batch_size, send_to_device

# Memory of a copied batch is not used again before the device has read it: the host may be ahead of the
# device by so many batches, and then waits for the oldest one.
_BATCHES_AHEAD = 4
# Bytes: 21 us at 50 GB/s (PCIe 5). The host of an H200 took 120 us for another stream (2026-11-26).
_SMALL_BATCH = 2**20
_SPLIT_FIX = (
    "give prepare_data_loader a slice_fn_for_dispatch that knows this batch, or use split_batches=False, "
    "which sends whole batches"
)


class FetchedBatch(NamedTuple):
    """One batch of this process, as it is fetched for the prepared loader.

    Attributes:
        batch: the batch on the host.
        last: True for the last batch of this process in this epoch.
        samples: samples of the order that all processes take in this step, without fillers; None: the
            loader's ``total_batch_size``.
        remainder: real samples of a filled step, of all processes; 0 if it has no fillers, -1 if unknown.
            Only that of the last batch is used.
        real: samples of this process's batch that are not fillers; None: unknown, or all.
        size: samples of this process's batch, with fillers; None: unknown.
        indices: of its samples in the dataset; None where this process does not know them.
    """

    batch: Any
    last: bool = False
    samples: int | None = None
    remainder: int = -1
    real: int | None = None
    size: int | None = None
    indices: Any = None


# --- copies to the device


@functools.cache
def _copy_stream(device_type: str, index: int | None) -> Any:
    """Return one stream for all loaders: memory that was freed on it serves only it again."""
    return devices.get(device_type).stream(index)


class BatchCopier:
    """Copies the batches of an epoch to a device.

    Args:
        device: the device; None: batches stay where they are.
        non_blocking: the host waits for no copy.
        has_pinned_copies: the loader pins memory, anew for each batch; the program may use any other memory
            again as soon as it is copied.
    """

    def __init__(
        self, device: torch.device | str | None, non_blocking: bool, has_pinned_copies: bool = False
    ) -> None:
        self.device = None if device is None else torch.device(device)
        self.non_blocking, self.has_pinned_copies = non_blocking, has_pinned_copies
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
        is_pinned = self.has_pinned_copies and all(tensor.is_pinned() for tensor in tensors)
        if is_pinned and sum(tensor.nbytes for tensor in tensors) <= _SMALL_BATCH:
            return send_to_device(batch, self.device, True)
        now = self._hardware.current_stream(self.device.index)
        self._requests.append(self._hardware.record_event(now))
        if len(self._requests) > _BATCHES_AHEAD:
            self._requests.popleft().synchronize()
        with self._hardware.use_stream(self._stream):
            copied = send_to_device(batch, self.device, self.non_blocking or is_pinned)
            event = self._hardware.record_event(self._stream)
        self._hardware.wait_event(event, now)
        for leaf in _leaves(copied, _flat_values(copied)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device.type:
                # Allocated on the copy stream, which must not use the memory before ``now`` has read it.
                leaf.record_stream(now)
        return copied


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


# --- splitting a collated batch by rows, without a slice function of the user


def count_rows(batch: Any) -> int:
    """Count the samples of a collated batch.

    They are counted in the first tensor with a first dimension; without one, in the innermost lists.

    Raises:
        PrepareError: nothing in it has a length.
    """
    rows = ignorant_find_batch_size(batch)
    if rows is None:
        rows = next((len(item) for item in _sample_lists(batch)), None)
    if rows is None:
        raise PrepareError(
            f"a batch of type {type(batch).__name__} cannot be split over the processes",
            why="no tensor with a first dimension and no list of samples is in it",
            fix=_SPLIT_FIX,
        )
    return rows


def divide_rows(rows: int, count: int) -> int:
    """Return the rows of each of ``count`` processes, of which the last one's may not be enough.

    Raises:
        PrepareError: there are no rows.
    """
    if rows == 0:
        raise PrepareError(
            "a batch without samples cannot be split over the processes",
            why="each process would get none of it, and wait for the others",
            fix=f"leave it out, or {_SPLIT_FIX}",
        )
    return -(-rows // count)


def _sample_lists(batch: Any) -> list[Any]:
    """Return the lists in ``batch`` whose items are samples."""
    if tree.is_mapping(batch):
        return [column for value in batch.values() for column in _sample_lists(value)]
    if tree.is_sequence(batch):
        inner = [column for value in batch for column in _sample_lists(value)]
        lengths = {len(column) for column in inner}
        # Lists of one length are columns; of several, each of them belongs to one sample.
        return inner if len(lengths) == 1 and all(map(tree.is_container, batch)) else [batch]
    return []


def take_rows(batch: Any, rows: int, wanted: list[int]) -> Any:
    """Return the ``wanted`` rows of a collated batch of ``rows`` samples, in the same structure.

    Tensors are sliced along dimension 0, and lists with one item per sample too. Numbers, texts
    and None stand for the whole batch and stay.

    Raises:
        PrepareError: a tensor has another first dimension, or none, or a list has another length.
    """
    return _take_rows(batch, rows, wanted, "batch")


def _take_rows(value: Any, rows: int, wanted: list[int], path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.shape[0] != rows:
            raise _row_count_error(f"{path} has shape {tuple(value.shape)}", rows)
        contiguous = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
        return value[wanted[0] : wanted[0] + len(wanted)] if contiguous else value[wanted]
    if tree.is_mapping(value):
        parts = {key: _take_rows(item, rows, wanted, f"{path}[{key!r}]") for key, item in value.items()}
        return tree.make_mapping_like(value, parts)
    if not tree.is_sequence(value):
        return value
    if tree.find_leaf(lambda leaf: isinstance(leaf, torch.Tensor), value) is None and value not in ([], ()):
        columns = _sample_lists(value)
        if len(columns) == 1 and columns[0] is value:
            if len(value) != rows:
                raise _row_count_error(f"{path} has {len(value)} items", rows)
            return tree.make_same_type(value, [value[index] for index in wanted])
    items = [_take_rows(item, rows, wanted, f"{path}[{index}]") for index, item in enumerate(value)]
    return tree.make_same_type(value, items)


def _row_count_error(what: str, rows: int) -> PrepareError:
    return PrepareError(
        f"a batch of {rows} samples cannot be split over the processes: {what}",
        why="its first dimension does not count samples",
        fix=_SPLIT_FIX,
    )
