"""Large optimizer states: memory-mapped from their file at first, and in memory of their own soon after.

A process that loads again, as to go back to the best checkpoint, has memory for an optimizer's state already.
Reading the file into it (``MappedFile``) takes a fraction of the time that filling fresh memory takes, and no
second copy. A tensor that somebody else refers to, as through ``optimizer.state_dict()``, keeps its values:
then new memory takes the saved ones. On a device, that is new memory of the device: see ``DeviceUploads``.

Filling fresh memory is most of the time that a load takes. A private mapping is there at once; a thread
reads the file into fresh memory meanwhile. Then, between two steps, that memory takes the place of the
mapping, at the same addresses (``mremap``): pages that training has written to meanwhile, which the kernel
knows, are copied once more just before. From then on the file does not matter, and nothing of it stays open:
its disk space is free when it is removed, and its file system can be unmounted.

A write between that last copy and the move would be lost. So a state stays where it is while another thread
is inside a step of an optimizer that holds a part of it, and a step does not start during a move.

Should somebody change the file in place before, the next save, load or wait raises it: no training goes on
unnoticed with a state that changed under it.

The thread reads the file, not the mapping: pages that are never touched there do not count as memory of this
process.

Source: mremap(2); proc(5), "mountinfo" and "pagemap".
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate import device as devices
from accelerate.checkpoint import torch_files
from accelerate.checkpoint.file_access import file_errors, usable_cores
from accelerate.checkpoint.file_reads import (
    CHUNK,
    HOST,
    DeviceUploads,
    FileRegion,
    is_plain,
    memory_of,
    read_at,
)
from accelerate.core import tree
from accelerate.core.errors import CheckpointError

LARGE = 64 * 2**20  # bytes; less is read at once
_OWN_READ = 2**16  # bytes of a tensor; less is not worth a read of its own
_COPIED = 16 * 2**20  # bytes that are copied at once
_MAY_MOVE, _AT_ADDRESS = 1, 2
_PAGEMAP = Path("/proc/self/pagemap")
# Bits of an entry of 64, which torch takes for signed: the page is in memory, is swapped out, is a file's.
_PRESENT, _SWAPPED, _OF_FILE = -1 << 63, 1 << 62, 1 << 61
# A network file system that does not answer would end the process when a page is read.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs"}
_Stamp = tuple[int, int]


class MemoryRange(NamedTuple):
    """Whole pages: from ``start`` to ``end``."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.end - self.start


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
                if is_plain(saved) and saved.nbytes >= _OWN_READ:
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
    return _reference_counts({0: {"": torch.zeros(1, device="cpu")}}, 0, "")


def _reference_counts(states: Mapping[Any, dict[str, Any]], key: Any, name: str) -> tuple[int, int, int]:
    """Return how many refer to the values of a parameter, to one of its tensors, and to its memory."""
    values = states[key]
    tensor = values[name]
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(values), sys.getrefcount(tensor), uses


class MappedOptimizerState:
    """The optimizer state in a torch file, mapped until its pages are copied.

    Args:
        path: the file.
        kwargs: arguments of ``torch_files.read``.

    Attributes:
        state: what the file holds, until it is loaded.
        open_states: those that are still mapped.
    """

    open_states: ClassVar[list[MappedOptimizerState]] = []
    _lock: ClassVar[threading.RLock] = threading.RLock()  # of ``open_states`` and of ``RunningSteps``

    def __init__(self, path: Path, **kwargs: Any) -> None:
        self.path, self.failure = path, ""
        with file_errors("read", path):
            self._file = path.open("rb")  # keeps this file, whatever is renamed to its name
        self._stamp = _stamp(self._file.fileno())
        self.state: Any = torch_files.read(path, mmap=True, **kwargs)
        self._storages: list[StorageWeakRef] = []
        self._thread: threading.Thread | None = None
        self._mapping, self._copy = MemoryRange(0, 0), 0

    def load_into(self, load: Callable[[Any], Any], optimizer: Optimizer | None = None) -> None:
        """Pass the state to ``load``; a thread copies the pages of the tensors that it keeps.

        Args:
            load: takes the state.
            optimizer: the one that ``load`` gives it to. The tensors of its present state are filled, where
                it alone has them, and what belongs on a device is uploaded; so there is nothing left to copy.

        Raises:
            CheckpointError: the file cannot be read.
        """
        state, self.state = self.state, None
        tensors = [tensor for _, leaf in tree.iterate_leaves(state) for tensor in _host_tensors(leaf)]
        references = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        with ExitStack() as hooks:
            if optimizer is not None and tensors:
                mapping = _find_mapping(tensors[0].data_ptr())
                mapped = MappedFile(self.path, self._file.fileno(), mapping.start, mapping.end)
                hooks.callback(optimizer.register_load_state_dict_pre_hook(mapped.fill_tensors).remove)
            tensors.clear()
            load(state)
        del state
        self._storages = references
        storages = self._kept_storages()
        if not storages:
            self._file.close()
            return
        self._mapping = _find_mapping(storages[0].data_ptr())
        with self._lock:
            _watch_steps()
            self.open_states.append(self)
        self._thread = threading.Thread(
            target=self._copy_pages, args=(storages,), name="accelerate-own", daemon=True
        )
        self._thread.start()

    def _kept_storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of tensors that are still in use: the mapping stays while they are held."""
        refs = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._storages)
        return [storage for storage in refs if storage is not None]

    def _copy_pages(self, storages: list[torch.UntypedStorage]) -> None:
        try:
            self._copy = allocate_pages(self._mapping.size)
            for pages in page_ranges(storages):
                for start in range(pages.start, pages.end, _COPIED):
                    offset, size = start - self._mapping.start, min(_COPIED, pages.end - start)
                    # Pages that training has written to are copied once more before the move.
                    read_pages(self._file.fileno(), offset, self._copy + offset, size)
        except OSError as error:
            self.failure = f"its pages cannot be copied: {error.strerror}"
        if _stamp(self._file.fileno()) != self._stamp:
            self.failure = "the file was changed while the state was taken from it"
        self._file.close()

    @property
    def is_copied(self) -> bool:
        """Return whether the thread has ended."""
        return self._thread is None or not self._thread.is_alive()

    def is_held_by(self, optimizer: Optimizer) -> bool:
        """Return whether a tensor of an optimizer's state or groups lies in the mapping."""
        tensors = (
            tensor
            for values in (*optimizer.state.values(), *optimizer.param_groups)
            for _, leaf in tree.iterate_leaves(values)
            for tensor in _host_tensors(leaf)
        )
        return any(
            self._mapping.start <= tensor.untyped_storage().data_ptr() < self._mapping.end
            for tensor in tensors
        )

    def detach(self) -> None:
        """Put the copy in the place of the mapping; nothing may write to the state meanwhile."""
        storages, copy, self._copy = self._kept_storages(), self._copy, 0
        if not copy:
            return
        if self.failure or not storages:  # an address that is free may have another use by now
            free_pages(copy, self._mapping.size)
            return
        for pages in page_ranges(storages):
            for written in written_pages(pages):
                copy_memory(copy + written.start - self._mapping.start, written.start, written.size)
        move_pages(copy, self._mapping)

    @classmethod
    def wait_copied(cls) -> None:
        """Wait until the pages of all states are copied, and detach these from their files.

        A state that another thread steps with at this moment is detached by a later step.

        Raises:
            CheckpointError: the file of one was changed before.
        """
        for mapped in list(cls.open_states):
            if mapped._thread is not None:
                mapped._thread.join()
        with cls._lock:
            RunningSteps.of_this_thread().held.clear()  # left by steps that raised
            cls.detach_copied()
            failed = next((mapped for mapped in cls.open_states if mapped.failure), None)
            if failed is not None:
                cls.open_states.remove(failed)
        if failed is not None:
            raise CheckpointError(
                f"the optimizer state that was loaded from {failed.path} cannot be trusted",
                why=failed.failure,
                fix="load the checkpoint again, and leave its files alone for some seconds",
            )

    @classmethod
    def detach_copied(cls) -> None:
        """Detach the states that are copied and in no step of another thread; failures wait."""
        with cls._lock:
            held = RunningSteps.held_by_others()
            for mapped in [each for each in cls.open_states if each.is_copied and each not in held]:
                mapped.detach()
                if not mapped.failure:
                    cls.open_states.remove(mapped)


def load_shard(load: Callable[[Any], Any], optimizer: Any, state: Any) -> None:
    """Pass a mapped full ``state`` to ``load``, which copies this rank's shard of it into an optimizer.

    What the optimizer has kept as it is, such as step counts, is copied here: then the file does not matter.
    """

    def read_addresses(leaf: Any) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in _host_tensors(leaf)}

    load(state)
    mapped = {at for _, leaf in tree.iterate_leaves(state) for at in read_addresses(leaf)}
    for key, values in getattr(optimizer, "state", {}).items():
        optimizer.state[key] = tree.map_tree(lambda x: x.clone() if mapped & read_addresses(x) else x, values)


class RunningSteps:
    """The optimizer steps that one thread is in, and the mapped states that they write to.

    Attributes:
        held: the optimizer of each step, by its id, and its states that are mapped; innermost last.
    """

    _here: ClassVar[threading.local] = threading.local()
    _of_threads: ClassVar[WeakSet[RunningSteps]] = WeakSet()  # one goes with its thread

    def __init__(self) -> None:
        self.held: list[tuple[int, list[MappedOptimizerState]]] = []

    @classmethod
    def of_this_thread(cls) -> RunningSteps:
        """Return those of the thread that asks, which holds the lock."""
        if not hasattr(cls._here, "steps"):
            cls._here.steps = cls()
            cls._of_threads.add(cls._here.steps)
        return cls._here.steps

    @classmethod
    def held_by_others(cls) -> list[MappedOptimizerState]:
        """Return the states that steps of other threads may write to."""
        others = cls._of_threads - {cls.of_this_thread()}
        return [state for steps in others for _, states in steps.held for state in states]


def _start_step(optimizer: Optimizer, *_: Any) -> None:
    if not MappedOptimizerState.open_states:
        return
    with MappedOptimizerState._lock:
        MappedOptimizerState.detach_copied()
        states = [each for each in MappedOptimizerState.open_states if each.is_held_by(optimizer)]
        if states:
            RunningSteps.of_this_thread().held.append((id(optimizer), states))


def _end_step(optimizer: Optimizer, *_: Any) -> None:
    steps = getattr(RunningSteps._here, "steps", None)
    if steps is None:
        return
    held = steps.held
    numbers = [number for number, (of, _) in enumerate(held) if of == id(optimizer)]
    if numbers:
        del held[numbers[-1] :]  # with steps inside this one that raised


@cache
def _watch_steps() -> None:
    """Register the hooks of steps, once: torch walks through them, so none may be removed by one."""
    register_optimizer_step_pre_hook(_start_step)
    register_optimizer_step_post_hook(_end_step)


def can_map(path: Path, location: Any, load: Any) -> bool:
    """Return True if a torch file may be mapped: large, on a local disk, for the host or for uploads.

    Args:
        path: the file.
        location: where ``torch.load`` would put the tensors.
        load: the method that takes the state. Torch's own casts it to the devices of the parameters; another
            one may rely on ``location``, and keep tensors where nobody looks for them.
    """
    if getattr(load, "__func__", None) is not Optimizer.load_state_dict:
        return False
    if not isinstance(location, str | torch.device) or path.stat().st_size < LARGE:
        return False
    kind = torch.device(location).type
    is_used = kind == "cpu" or (kind != "meta" and devices.get(kind).pins_memory)
    return is_used and can_detach() and _file_system(path) in _LOCAL


@cache
def can_detach() -> bool:
    """Return True if this system has what takes a mapping's place without losing a write."""
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    try:
        place, copy = allocate_pages(page), allocate_pages(page)
        copy_memory(copy, place, 1)  # writes
        written = list(written_pages(MemoryRange(copy, copy + page)))
        move_pages(copy, MemoryRange(place, place + page))
        free_pages(place, page)
    except OSError:
        return False
    return len(written) == 1


# --- memory


@cache
def _libc() -> Any:
    libc: Any = ctypes.CDLL(None, use_errno=True)  # which releases the GIL in its calls
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    libc.mremap.argtypes, libc.mremap.restype = (address, size, size, number, address), address
    libc.munmap.argtypes = (address, size)
    libc.memcpy.argtypes, libc.memcpy.restype = (address, address, size), address
    return libc


def _check_address(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def allocate_pages(size: int) -> int:
    """Return the address of fresh memory.

    Raises:
        OSError: memory is short.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _check_address(_libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))


def free_pages(address: int, size: int) -> None:
    """Give memory back."""
    _libc().munmap(address, size)


def move_pages(address: int, target: MemoryRange) -> None:
    """Move memory of the same size to the place of ``target``, which is unmapped in the same step."""
    flags = _MAY_MOVE | _AT_ADDRESS
    _check_address(_libc().mremap(address, target.size, target.size, flags, target.start))


def copy_memory(target: int, source: int, size: int) -> None:
    """Copy bytes."""
    _libc().memcpy(target, source, size)


def read_pages(handle: int, offset: int, address: int, size: int) -> None:
    """Read ``size`` bytes of a file from ``offset`` on into memory; the last page of a file may be a part.

    Raises:
        OSError: they cannot be read, or the file ends before that page.
    """
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    if read_at(handle, memory, offset) <= size - mmap.PAGESIZE:
        raise OSError(errno.EIO, "the file has become shorter")


def written_pages(pages: MemoryRange) -> Iterable[MemoryRange]:
    """Yield the pages of a private mapping that this process has written to: they are not the file's."""
    page = mmap.PAGESIZE
    with _PAGEMAP.open("rb", buffering=0) as file:
        file.seek(pages.start // page * 8)
        entries = torch.frombuffer(bytearray(file.read(pages.size // page * 8)), dtype=torch.int64)
    in_use = (entries & (_PRESENT | _SWAPPED)) != 0
    written = (in_use & ((entries & _OF_FILE) == 0)).nonzero().flatten()
    runs = written.tensor_split((written.diff() != 1).nonzero().flatten() + 1)
    for first, last in ((int(run[0]), int(run[-1])) for run in runs if len(run)):
        yield MemoryRange(pages.start + first * page, pages.start + (last + 1) * page)


def _find_mapping(address: int) -> MemoryRange:
    """Return the mapping of a file that holds an address; the kernel may list it in several pieces."""
    # With the device, the inode, and the address at which the file would begin.
    pieces: list[tuple[MemoryRange, tuple[str, str, int]]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, device, inode = line.split()[:5]
        start, end = (int(number, 16) for number in addresses.split("-"))
        file = (device, inode, start - int(offset, 16))
        if pieces and pieces[-1] == (MemoryRange(pieces[-1][0].start, start), file):
            start = pieces.pop()[0].start
        pieces.append((MemoryRange(start, end), file))
    return next(piece for piece, _ in pieces if piece.start <= address < piece.end)


def _file_system(path: Path) -> str:
    """Return the type of the file system of a file; empty if unknown."""
    device = path.stat().st_dev
    device_numbers = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device_numbers:
            return after.split()[0]
    return ""


def _stamp(handle: int) -> _Stamp:
    stat = os.fstat(handle)
    return stat.st_mtime_ns, stat.st_size


def _host_tensors(leaf: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with host memory of a leaf; of a tensor that wraps others, those."""
    if not isinstance(leaf, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(leaf):
        for name in leaf.__tensor_flatten__()[0]:
            yield from _host_tensors(getattr(leaf, name))
    elif leaf.device.type == "cpu" and leaf.untyped_storage().nbytes() > 0:
        yield leaf


def page_ranges(storages: Sequence[torch.UntypedStorage]) -> list[MemoryRange]:
    """Return the pages of storages; adjacent ranges are merged."""
    page, ranges = mmap.PAGESIZE, list[MemoryRange]()
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        first, last = start // page * page, -(-(start + size) // page) * page
        if ranges and first <= ranges[-1].end:
            last_range = ranges.pop()
            first, last = last_range.start, max(last, last_range.end)
        ranges.append(MemoryRange(first, last))
    return ranges
