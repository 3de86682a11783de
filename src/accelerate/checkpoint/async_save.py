"""Asynchronous saves: a checkpoint is written while training goes on, at most one per process.

A thread runs what a synchronous save runs after it has collected the states, on copies of these in host
memory, since training goes on changing the originals. Whoever needs the save finished calls ``wait``: the
next save, a load, the user, the end of the training. A world that closes and an interpreter that exits let it
finish too, also after an error. A failure that nobody heard of by then is printed, and the process ends with
status 1.

Memory that was never written to costs several times the copy itself, page by page. So the memory of a
snapshot is kept for the next one (``SnapshotHostMemory``), and can be made ready before the first.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - what it registers for the exit must come after ``join``
import copy
import ctypes
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate import device as devices
from accelerate.checkpoint.discovery import Address
from accelerate.checkpoint.mapped_state import MappedOptimizerState
from accelerate.checkpoint.rank_group import BackgroundSaveError
from accelerate.checkpoint.state_dict_files import id_tensor_storage
from accelerate.core.errors import AccelerateError
from accelerate.world import world as worlds

_ALIGNED = 64  # bytes, a cache line
_PAGE = 4096  # bytes, the smallest that a system has
_PIECE = 64 * 2**20
# Bytes of one allocation. torch rounds pinned memory up to a power of two, and the driver stops the device
# while it pins: one block for a state of 70 GiB would take 128 GiB, in one go.
SLAB = 512 * 2**20
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Key = tuple[torch.device, int, int]
_Storages = dict[_Key, tuple[torch.device, torch.UntypedStorage]]

FAILED = 1  # exit status


class AsyncSave:
    """One save that runs in a thread of its own.

    Args:
        path: the checkpoint, as the user named it.
        finish: writes and commits it.
    """

    def __init__(self, path: Address | str, finish: Callable[[], None]) -> None:
        self.path, self._finish = path, finish
        self.error: BaseException | None = None
        # A daemon thread: ``join`` waits for it at the exit, and a second Ctrl-C ends that.
        self._thread = threading.Thread(target=self._run, name="accelerate-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        finish = self._finish
        del self._finish  # frees the copies as soon as they are written
        try:
            finish()
        except BaseException as error:  # noqa: BLE001 - it is raised by the next call
            self.error = error

    def join(self) -> None:
        """Wait until the save has ended."""
        self._thread.join()

    def failure(self) -> BackgroundSaveError | None:
        """Return the error of a failed save in the user's words; None if it has not failed."""
        error = self.error
        if error is None:
            return None
        message, reason, fix = f"{type(error).__name__}: {error}", "", ""
        if isinstance(error, AccelerateError):
            message, reason, fix = error.what, error.why, error.fix
        failure = BackgroundSaveError(
            f"saving {self.path} in the background failed: {message}", why=reason, fix=fix
        )
        failure.__cause__ = error
        return failure


_current: AsyncSave | None = None
_failed_at_exit = False


def start(path: Address | str, finish: Callable[[], None]) -> None:
    """Start a save in the background; the save before must have been waited for."""
    global _current
    assert _current is None
    worlds.add_close_action(join)
    _join_at_exit()
    _current = AsyncSave(path, finish)


@cache
def _join_at_exit() -> None:
    """Register a join to run before thread pools and the world are closed.

    The functions of ``atexit`` come after that, and Python has no public name for what comes earlier.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_join_or_abandon)
    atexit.register(_at_exit)
    if multiprocessing.parent_process() is not None:  # which ends without the functions of atexit
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=1)  # before the world is closed
        multiprocessing.util.Finalize(None, _exit_with_failure, exitpriority=-1)


def _join_or_abandon() -> None:
    """Wait for the save. Interrupted by Ctrl-C, drop it: nothing that runs later at the exit waits again."""
    global _current
    try:
        join()
    except BaseException:
        _current = None
        raise


def join() -> None:
    """Wait until nothing is being written; a failure is kept for ``wait``."""
    if _current is not None:
        _current.join()


def wait() -> Address | None:
    """Wait for the save in the background; return its checkpoint once committed, None if there was none.

    Raises:
        BackgroundSaveError: it failed, on all ranks; what was there before is as it was.
        CheckpointError: a file was changed while an optimizer state was still taken from it.
    """
    global _current
    if MappedOptimizerState.open_states:
        MappedOptimizerState.wait_copied()
    if _current is not None:
        _current.join()
    running_save, _current = _current, None
    if running_save is None:
        return None
    failure = running_save.failure()
    if failure is not None:
        raise failure
    return running_save.path


def _at_exit() -> None:
    global _current, _failed_at_exit
    join()
    running_save, _current = _current, None
    failure = running_save.failure() if running_save is not None else None
    if failure is not None:
        _failed_at_exit = True
        sys.stderr.write(f"{type(failure).__name__}: {failure}\n")


def _exit_with_failure() -> None:
    """End the process with status 1 after a failure: Python ignores what an ``atexit`` function raises."""
    if _failed_at_exit:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)


def _reset_after_fork() -> None:
    """Forget the save and the memory in a forked process, for example a data loader's worker.

    It has no such thread, has none of the memory, and must not free it.
    """
    global _current, staging
    _current = None
    _join_at_exit.cache_clear()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(staging))
    staging = SnapshotHostMemory()


# Registered first, so it runs last of this package's.
atexit.register(_exit_with_failure)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class SnapshotHostMemory:
    """Host memory for snapshots, one at a time, kept between them."""

    def __init__(self) -> None:
        # by the type of the device whose tensors are copied to it
        self._blocks: dict[str, list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._prepare_thread: threading.Thread | None = None

    @property
    def size(self) -> int:
        """The bytes that are kept."""
        return sum(block.numel() for blocks in self._blocks.values() for block in blocks)

    def prepare(self, sizes: Mapping[str, Sequence[int]]) -> None:
        """Allocate memory in the background for storages of these bytes, by device type.

        A snapshot does not wait for it.
        """
        if self._prepare_thread is None and not self._blocks:
            self._prepare_thread = threading.Thread(
                target=self._prepare, args=(dict(sizes),), name="accelerate-staging", daemon=True
            )
            self._prepare_thread.start()
            atexit.register(self.stop_preparing)  # it must not be inside torch while the interpreter ends

    def _prepare(self, sizes: dict[str, Sequence[int]]) -> None:
        slabs = {kind: _place(dict(enumerate(each)), [])[1] for kind, each in sizes.items()}
        for kind, slab in ((kind, slab) for kind, each in slabs.items() for slab in each):
            with self._lock:
                if self._stop.is_set():
                    return
                block = devices.get(kind).host_memory(slab)
                self._blocks.setdefault(kind, []).append(block)
            # So small a piece is written by one thread.
            for start in range(0, slab, _PIECE):
                if self._stop.is_set():
                    return
                block[start : start + _PIECE : _PAGE].zero_()

    def stop_preparing(self) -> None:
        """Stop what ``prepare`` does; memory that is ready stays."""
        thread, self._prepare_thread = self._prepare_thread, None
        if thread is not None:
            self._stop.set()
            thread.join()
            self._stop.clear()

    def release(self) -> None:
        """Free all memory. No snapshot may be in use."""
        self.stop_preparing()
        self._blocks.clear()

    def allocate(self, wanted: list[tuple[str, int]]) -> list[torch.UntypedStorage]:
        """Return one storage for each (device type, bytes); memory of the last snapshot is reused."""
        self.stop_preparing()
        storages: dict[int, torch.UntypedStorage] = {}
        for kind in {kind for kind, _ in wanted}:
            sizes = {index: size for index, (k, size) in enumerate(wanted) if k == kind}
            storages.update(self._allocate_from_blocks(kind, sizes))
        return [storages[index] for index in range(len(wanted))]

    def _allocate_from_blocks(self, kind: str, sizes: dict[int, int]) -> dict[int, torch.UntypedStorage]:
        blocks = self._blocks.setdefault(kind, [])
        places, slabs = _place(sizes, [block.numel() for block in blocks])
        blocks += [devices.get(kind).host_memory(slab) for slab in slabs]
        return {index: _slice(blocks[b], start, sizes[index]) for index, (b, start) in places.items()}


def _place(
    sizes: Mapping[int, int], capacities: Sequence[int]
) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Place storages in blocks: the largest first, each in the first block that has room for it.

    Args:
        sizes: index -> bytes.
        capacities: of the blocks, in bytes.

    Returns:
        (index -> (block, first byte in it), bytes of the new blocks that come after these: each of at most
        ``SLAB``, or one larger storage).
    """
    used = [0] * len(capacities)
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
        size = -(-sizes[index] // _ALIGNED) * _ALIGNED
        room = (capacity - taken for capacity, taken in zip_longest(capacities, used, fillvalue=SLAB))
        block = next((block for block, free in enumerate(room) if size <= free), len(used))
        if block == len(used):
            used.append(0)
        places[index] = block, used[block]
        used[block] += size
    return places, used[len(capacities) :]


def _slice(block: torch.Tensor, start: int, size: int) -> torch.UntypedStorage:
    """Return a storage of its own: files hold whole storages, and a slice must not bring the rest along."""
    return torch.frombuffer(block.numpy(), dtype=torch.uint8, count=size, offset=start).untyped_storage()


staging = SnapshotHostMemory()


def take_snapshot(contents: list[list[Any]]) -> list[Callable[[], None]]:
    """Put copies in the place of states, after the work that their devices are doing now.

    Args:
        contents: lists of states, whose items are replaced; what they share, their copies share too.

    Returns:
        Functions that wait until a device has copied, for those that may be copying still.

    Raises:
        TypeError, RuntimeError: an object in the states cannot be copied.
    """
    tensor_copies = _TensorCopies(contents)
    for states, copies in zip(contents, copy.deepcopy(contents, tensor_copies.copies), strict=True):
        states[:] = copies
    return tensor_copies.waits


def _wait_for_copies(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the work of a device so far, and not for what is added meanwhile."""
    hardware = devices.get(device.type)
    event = hardware.record_event(hardware.current_stream(device.index))
    return partial(hardware.synchronize, device.index) if event is None else event.synchronize


def snapshot_sizes(tensors: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """Return the bytes of each storage that a snapshot of ``tensors`` copies, by device type."""
    sizes: dict[str, list[int]] = {}
    for device, storage in _storages(tensors).values():
        sizes.setdefault(device.type, []).append(storage.nbytes())
    return sizes


class _TensorCopies:
    """Copies of all tensors in ``states``, for ``deepcopy``.

    Attributes:
        copies: by the ``id`` of the original.
        waits: functions that wait for the devices that may still be copying.
    """

    def __init__(self, states: Any) -> None:
        self._tensors = list(_tensors(states))
        self._memory = self._copy_storages(_storages(self._tensors))
        self.copies: dict[int, Any] = {id(tensor): self._copy_tensor(tensor) for tensor in self._tensors}

    def _copy_storages(self, storages: _Storages) -> dict[_Key, torch.UntypedStorage]:
        requests = [(device.type, storage.nbytes()) for device, storage in storages.values()]
        memory = dict(zip(storages, staging.allocate(requests), strict=True))
        busy_devices = dict[torch.device, None]()
        for key, (device, storage) in storages.items():
            hardware = devices.get(device.type)
            # On the device's current stream: after pending changes of the tensor, before later ones.
            _as_tensor(memory[key]).copy_(_as_tensor(storage), non_blocking=hardware.pins_memory)
            if hardware.pins_memory:
                busy_devices[device] = None
        self.waits = [_wait_for_copies(device) for device in busy_devices]
        return memory

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            attributes, context = _flatten(tensor)
            inner = {
                name: self._copy_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in attributes.items()
            }
            kind: Any = type(tensor)
            return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        if not _has_memory(tensor):
            return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
        memory = self._memory[id_tensor_storage(tensor)]
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(memory, *place)
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)
        vars(copy).update(vars(tensor))
        return copy.requires_grad_(tensor.requires_grad)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True for a plain view of memory; torch copies other tensors, one by one."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not devices.get(tensor.device.type).is_lazy
        and tensor.untyped_storage().nbytes() > 0
    )


def _flatten(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return (the inner tensors and other attributes of a tensor subclass, what makes it again of them).

    Not all are tensors: a DTensor of torch 2.13 lists its device mesh too.
    """
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def _storages(tensors: Iterable[torch.Tensor]) -> _Storages:
    """Return the storages behind tensors, each once."""
    storages: _Storages = {}
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            inner = _flatten(tensor)[0].values()
            storages.update(_storages(value for value in inner if isinstance(value, torch.Tensor)))
        elif tensor.device.type != "meta" and _has_memory(tensor):
            storages[id_tensor_storage(tensor)] = tensor.device, tensor.untyped_storage()
    return storages


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as a tensor of the widest dtype that fits."""
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, each once; ``deepcopy`` finds those of other objects."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if not isinstance(item, torch.Tensor | Mapping | list | tuple | set | frozenset) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            stack.extend(item.values() if isinstance(item, Mapping) else item)
