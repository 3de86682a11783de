"""States as they are at one moment, in host memory, while training goes on changing the originals.

Memory that was never written to costs several times the copy itself, page by page. So the memory of a
snapshot is kept for the next one (``Staging``), and can be made ready before the first.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate import device as devices
from accelerate.checkpoint.collect import States

_ALIGNED = 64  # bytes, a cache line
_PAGE = 4096  # bytes, the smallest that a system has
_PIECE = 64 * 2**20
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class Snapshot:
    """Copies of states, and the devices that still work on them.

    Attributes:
        states: the copies; on the host, shared memory is shared as in the originals.
        devices: those whose copies may be on their way.
    """

    states: States
    devices: list[torch.device]

    def wait(self) -> None:
        """Returns when all is copied."""
        for device in self.devices:
            devices.get(device.type).synchronize(device.index)


class Staging:
    """Host memory for snapshots, one at a time, kept between them."""

    def __init__(self) -> None:
        # by the type of the device that copies to it
        self._blocks: dict[str, list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._toucher: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(block.numel() for blocks in self._blocks.values() for block in blocks)

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Makes memory ready in the background, by the type of device; a snapshot does not wait for it."""
        if self._toucher is None and not self._blocks:
            self._toucher = threading.Thread(
                target=self._prepare, args=(dict(sizes),), name="accelerate-staging", daemon=True
            )
            self._toucher.start()
            atexit.register(self.settle)  # it must not be inside torch while the interpreter ends

    def _prepare(self, sizes: dict[str, int]) -> None:
        for kind, size in sizes.items():
            with self._lock:
                if self._hurry.is_set() or not size:
                    return
                block = devices.get(kind).host_memory(size)
                self._blocks.setdefault(kind, []).append(block)
            # So small a piece is written by one thread.
            for start in range(0, size, _PIECE):
                if self._hurry.is_set():
                    return
                block[start : start + _PIECE : _PAGE].zero_()

    def settle(self) -> None:
        """Ends what ``prepare`` does; what is ready stays."""
        toucher, self._toucher = self._toucher, None
        if toucher is not None:
            self._hurry.set()
            toucher.join()
            self._hurry.clear()

    def release(self) -> None:
        """Gives all memory back. No snapshot may be in use."""
        self.settle()
        self._blocks.clear()

    def take(self, wanted: list[tuple[str, int]]) -> list[torch.UntypedStorage]:
        """One storage for each (type of device, bytes); the memory of the snapshot before is used again."""
        self.settle()
        taken: dict[int, torch.UntypedStorage] = {}
        for kind in {kind for kind, _ in wanted}:
            sizes = {index: size for index, (k, size) in enumerate(wanted) if k == kind}
            taken.update(self._placed(kind, sizes))
        return [taken[index] for index in range(len(wanted))]

    def _placed(self, kind: str, sizes: dict[int, int]) -> dict[int, torch.UntypedStorage]:
        blocks = self._blocks.setdefault(kind, [])
        used = [0] * len(blocks)
        homeless: list[int] = []
        places: dict[int, tuple[int, int]] = {}
        for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
            room = _aligned(sizes[index])
            home = next((b for b, block in enumerate(blocks) if used[b] + room <= block.numel()), None)
            if home is None:
                homeless.append(index)
                continue
            places[index] = home, used[home]
            used[home] += room
        if homeless:
            blocks.append(devices.get(kind).host_memory(sum(_aligned(sizes[index]) for index in homeless)))
            end = 0
            for index in homeless:
                places[index] = len(blocks) - 1, end
                end += _aligned(sizes[index])
        return {index: _slice(blocks[b], start, sizes[index]) for index, (b, start) in places.items()}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _slice(block: torch.Tensor, start: int, size: int) -> torch.UntypedStorage:
    """A storage of its own: files hold whole storages, and a part of one must not bring the rest along."""
    return torch.frombuffer(block.numpy(), dtype=torch.uint8, count=size, offset=start).untyped_storage()


staging = Staging()


def _forget() -> None:
    """A forked process has none of this memory, and must not give back what lies there now."""
    global staging
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(staging))
    staging = Staging()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def take(found: States, *, shared: bool) -> Snapshot:
    """Copies ``found``; what the present work of a device still changes is copied after that work.

    Args:
        found: the states; shares are changed to hold copies.
        shared: this rank writes what is the same on all ranks, too; otherwise that is left out.

    Raises:
        TypeError, RuntimeError: an object in the states cannot be copied.
    """
    kept = States(
        weights=found.weights if shared else [],
        shared=found.shared if shared else [],
        own=found.own,
        positions=found.positions,
        metadata=found.metadata,
    )
    lists = [share.tensors for share in found.shares]
    memo = _Memo([vars(kept), lists])
    states: States = copy.deepcopy(kept, memo.copies)
    for tensors in lists:
        tensors[:] = [memo.copies[id(tensor)] for tensor in tensors]
    kinds = {
        id(new): found.kinds.get(id(old), "") for old, new in zip(kept.weights, states.weights, strict=True)
    }
    states.kinds, states.shares = kinds, found.shares
    return Snapshot(states, memo.busy)


def sizes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes that a snapshot of ``tensors`` takes, by type of device."""
    found: dict[str, int] = {}
    for device, storage in _storages(tensors).values():
        found[device.type] = found.get(device.type, 0) + _aligned(storage.nbytes())
    return found


class _Memo:
    """Copies of all tensors in ``states``, for ``deepcopy``.

    Attributes:
        copies: by the ``id`` of the original.
        busy: devices that may still be copying.
    """

    def __init__(self, states: Any) -> None:
        self._tensors = list(_tensors(states))
        self._memory = self._copied(_storages(self._tensors))
        self.copies: dict[int, Any] = {id(tensor): self._twin(tensor) for tensor in self._tensors}

    def _copied(self, storages: _Storages) -> dict[_Key, torch.UntypedStorage]:
        wanted = [(device.type, storage.nbytes()) for device, storage in storages.values()]
        memory = dict(zip(storages, staging.take(wanted), strict=True))
        self.busy: list[torch.device] = []
        for key, (device, storage) in storages.items():
            hardware = devices.get(device.type)
            # In the order of the device's work: after what changes the tensor now, before what will.
            _bytes(memory[key]).copy_(_bytes(storage), non_blocking=hardware.pins)
            if hardware.pins and device not in self.busy:
                self.busy.append(device)
        return memory

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._twin(getattr(tensor, name)) for name in names}
            kind: Any = type(tensor)
            return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        if not _has_memory(tensor):
            return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
        memory = self._memory[_key(tensor)]
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        new = torch.empty(0, dtype=tensor.dtype).set_(memory, *place)
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=False)
        vars(new).update(vars(tensor))
        return new.requires_grad_(tensor.requires_grad)


_Key = tuple[torch.device, int, int]
_Storages = dict[_Key, tuple[torch.device, torch.UntypedStorage]]


def _key(tensor: torch.Tensor) -> _Key:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of memory and nothing else; others are copied by torch, one by one."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > 0
    )


def _storages(tensors: Iterable[torch.Tensor]) -> _Storages:
    """The memory behind tensors, each once."""
    found: _Storages = {}
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            found.update(_storages(getattr(tensor, name) for name in names))
        elif tensor.device.type != "meta" and _has_memory(tensor):
            found[_key(tensor)] = tensor.device, tensor.untyped_storage()
    return found


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, as the widest numbers that fit."""
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, each once; what other objects hold, ``deepcopy`` finds itself."""
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
