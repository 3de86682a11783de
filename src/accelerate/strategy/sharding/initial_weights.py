"""The source of a model's values while it is sharded: rank 0, files mapped by all ranks, or a later load.

A parameter that every rank has mapped from the same place of the same file is not broadcast: each rank copies
its own shard out of the file. A parameter without values on any rank gets memory for its shard, and its
values by ``load_checkpoint_in_model`` or ``load_state``; a forward before that is refused. Both are sharded
on the meta device, so that they are never unsharded in memory. A tensor that ``param_init_fn`` does not write
to has no values either.

Linux says which file is mapped at an address (``/proc/self/maps``), and whether a page of a private mapping
is still the file's, or a modified copy (``/proc/self/pagemap``). On a system without them no tensor counts as
part of a file.

Source: proc_pid_maps(5), and "Examining Process Page Tables" (pagemap.rst) in the documentation of Linux.
"""

from __future__ import annotations

import bisect
import hashlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError, list_first
from accelerate.strategy.sharding.grads import fsdp_param_groups
from accelerate.strategy.sharding.sharding_layout import ShardingLayout
from accelerate.world.shard_boxes import local_shard

_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_ENTRY = 8  # bytes for each page in the page map
_NO_VALUES = b"no values"
WeightMarks = tuple[bytes, ...]
ParamSources = dict[tuple[nn.Module, str], torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class InitialWeightsInfo:
    """The info about its model that a rank sends to the others; it is one object for ranks with the same.

    Attributes:
        digest: of names, shapes and dtypes.
        marks: of each parameter and buffer: no values, a part of a file, or others (empty).
        is_bare: a parameter is on the meta device.
    """

    digest: str
    marks: WeightMarks
    is_bare: bool


def weight_marks(model: nn.Module) -> WeightMarks:
    """Return the marks of the parameters and buffers; see ``InitialWeightsInfo``.

    A parameter whose memory is an unmodified part of a mapped file has a mark of 8 bytes: equal marks on two
    ranks mean the same bytes of the same file.
    """
    regions = _mapped_regions()
    starts, marks = [region.start for region in regions], []
    for tensor in (*model.parameters(), *model.buffers()):
        marks.append(_NO_VALUES if tensor.is_meta else b"")
        if type(tensor) is nn.Parameter and tensor.device.type == "cpu" and tensor.is_contiguous():
            at = bisect.bisect_right(starts, tensor.data_ptr()) - 1
            if tensor.numel() and at >= 0 and tensor.data_ptr() + tensor.nbytes <= regions[at].end:
                marks[-1] = _file_mark(tensor, regions[at])
    return tuple(marks)


@dataclass(frozen=True)
class _MappedRegion:
    """A region of the address space that maps a file from its byte ``offset`` on."""

    start: int
    end: int
    offset: int
    inode: str
    path: str


def _mapped_regions() -> list[_MappedRegion]:
    """Return the regions of files that still have their name, by address."""
    regions: list[_MappedRegion] = []
    if not (os.access(_MAPS, os.R_OK) and os.access(_PAGES, os.R_OK)):
        return regions
    for line in _MAPS.read_text().splitlines():
        bounds, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" or not name or name[0].endswith(" (deleted)"):
            continue
        start, end = (int(number, 16) for number in bounds.split("-"))
        regions.append(_MappedRegion(start, end, int(offset, 16), inode, name[0]))
    return regions


def _file_mark(tensor: torch.Tensor, region: _MappedRegion) -> bytes:
    """Return the mark of a tensor in a mapped region; empty where it was modified, or the file is gone.

    Files are the same by inode, size and modification time, so also on machines that share them.
    """
    start = tensor.data_ptr()
    if not os.path.exists(region.path) or _is_modified(start, start + tensor.nbytes):
        return b""
    file = os.stat(region.path)
    place = region.offset + start - region.start
    identity = (region.inode, file.st_ino, file.st_size, file.st_mtime_ns, place, str(tensor.dtype))
    return hashlib.blake2b(repr((identity, tuple(tensor.shape))).encode(), digest_size=8).digest()


def _is_modified(start: int, end: int) -> bool:
    """Return whether a page between two addresses is a modified copy, or cannot be read."""
    first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    with _PAGES.open("rb", buffering=0) as file:
        file.seek(first * _ENTRY)
        data = file.read((last - first) * _ENTRY)
    if len(data) != (last - first) * _ENTRY:
        return True
    pages = torch.frombuffer(bytearray(data), dtype=torch.int64)
    present = (pages >> 62) & 3 != 0  # in memory, or swapped out
    anonymous = (pages >> 61) & 1 == 0  # no page of a file
    return bool((present & anonymous).any())


def find_unlike_leader(every: Sequence[InitialWeightsInfo], leaders: Iterable[int]) -> int | None:
    """Return a leader that lacks values which another leader of the same parameters has, or None.

    Args:
        every: the info of each rank.
        leaders: the first rank of each mesh, whose values count.
    """
    first: dict[str, int] = {}
    for leader in leaders:
        other = first.setdefault(every[leader].digest, leader)
        sides = [tuple(m == _NO_VALUES for m in every[rank].marks) for rank in (leader, other)]
        if sides[0] != sides[1]:
            return leader if any(sides[0]) else other
    return None


def materialize_modules(
    modules: Iterable[nn.Module],
    materialized: tuple[Any, Any],
    make: Callable[[torch.Tensor], torch.Tensor],
    param_init_fn: Callable[[nn.Module], Any] | None,
) -> list[torch.Tensor]:
    """Give modules new tensors, and ``param_init_fn`` those that have tensors on the meta device.

    Some devices cannot swap a tensor's data. A tied tensor stays one.

    Args:
        modules: the modules.
        materialized: gets the new parameters, and the new buffers, by the old ones.
        make: returns the new tensor of an old one.
        param_init_fn: fills the parameters and buffers of one module.

    Returns:
        the tensors that ``param_init_fn`` left without values.
    """
    unwritten: list[torch.Tensor] = []
    for module in modules:
        empty, fresh = False, list[torch.Tensor]()
        for table, replacements in zip((module._parameters, module._buffers), materialized, strict=True):
            for name, old in table.items():
                if old is None:
                    continue
                empty = empty or old.is_meta
                if old not in replacements:
                    replacements[old] = make(old)
                    if old.is_meta:
                        fresh.append(replacements[old])
                table[name] = replacements[old]
        if empty and param_init_fn is not None:
            unwritten += run_param_init_fn(param_init_fn, module, fresh)
    return unwritten


def run_param_init_fn(
    param_init_fn: Callable[[nn.Module], Any], module: nn.Module, fresh: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Call ``param_init_fn(module)``, and return the tensors of the module that it left without values.

    Args:
        param_init_fn: fills the parameters and buffers of one module, not those of the modules inside it.
        module: the module.
        fresh: its tensors whose memory has just been allocated.
    """
    with torch.no_grad():
        for tensor in fresh:
            tensor.fill_(_unwritten_value(tensor.dtype))
    versions = {name: (tensor, tensor._version) for name, tensor in _own_tensors(module)}
    with _fill_new_memory():
        param_init_fn(module)
    unwritten: list[torch.Tensor] = []
    for name, tensor in _own_tensors(module):
        before, version = versions.get(name, (None, 0))
        # Memory of the function's own may be all 1s for a mask; NaN and the largest integer are no values.
        sure = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype.itemsize > 1
        untouched = tensor._version == (version if tensor is before else 0)
        if untouched and (sure or tensor is before) and is_unwritten(tensor):
            unwritten.append(tensor)
    return unwritten


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a tensor, of one at least, are those of ``_fill_new_memory``."""
    values = _local_data(tensor).detach()
    if values.is_meta or not values.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        # Few types of 8 bits have an isnan.
        return bool((values.float() if values.dtype.itemsize == 1 else values).isnan().all())
    return bool((values == _unwritten_value(values.dtype)).all())


def _unwritten_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def _fill_new_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` and its siblings allocate with NaN, the largest integer, or True.

    Source: ``torch.utils.deterministic.fill_uninitialized_memory``.
    """
    settings: Any = torch.utils.deterministic
    filled, strict = settings.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=warn_only or not strict)
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


class InitialWeights:
    """The source of the values of one model while it is sharded.

    Attributes:
        sources: the tensors that the leader does not broadcast: their values in a mapped file, or None where
            values come later.

    Args:
        model: the model.
        leader: the info of the first rank of the mesh; None: all values are here.
        every: the different infos of all ranks.
        initialized: whether a function makes values where the leader has none.

    Raises:
        PrepareError: a buffer that files never hold has no values.
    """

    def __init__(
        self,
        model: nn.Module,
        leader: InitialWeightsInfo | None = None,
        every: Iterable[InitialWeightsInfo] = (),
        *,
        initialized: bool = False,
    ) -> None:
        self.sources: Any = WeakIdKeyDictionary()
        self._empty: list[torch.Tensor] = []
        if leader is None:
            return
        # Ranks of other meshes too, for tensors that are no DTensors are the same there.
        peer_marks = [info.marks for info in every if info.digest == leader.digest]
        tensors = (*model.parameters(), *model.buffers())
        for tensor, first, *others in zip(tensors, leader.marks, *peer_marks, strict=True):
            if first == _NO_VALUES and not initialized:
                self.sources[tensor] = None
            elif first not in (b"", _NO_VALUES) and len(set(others)) == 1:
                self.sources[tensor] = tensor
        if self.sources:
            _refuse_meta_buffers(model, self.sources)

    def origin(self, tensor: torch.Tensor) -> str:
        """Return ``"sent"`` (broadcast), ``"here"`` (mapped from a file on every rank) or ``"later"``."""
        if tensor not in self.sources:
            return "sent"
        return "later" if self.sources[tensor] is None else "here"

    def materialize(self, layout: ShardingLayout, old: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor with memory on the device, in its stored dtype; of ``sources`` a placeholder.

        Args:
            layout: how the model is sharded.
            old: the tensor.
            device: where this rank computes.
        """
        whole = old in layout.ignored or not isinstance(old, nn.Parameter)
        if old not in self.sources or (whole and self.sources[old] is not None):
            return layout.materialize(old, device)
        like: Any = old.detach()
        make = torch.zeros_like if whole else torch.empty_like
        dtype, place = layout.storage_dtype(old), device if whole else "meta"
        placeholder: Any = make(like, dtype=dtype, device=place, memory_format=torch.contiguous_format)
        if isinstance(old, nn.Parameter):
            placeholder = nn.Parameter(placeholder, requires_grad=old.requires_grad)
            if whole:
                layout.ignored.add(placeholder)
        if whole:
            self._empty.append(placeholder)
        self.sources[placeholder] = self.sources[old]
        return placeholder

    def pending_params(self, modules: Iterable[nn.Module]) -> ParamSources:
        """Return the parameters of ``modules`` that are on the meta device now, with their sources."""
        tables = ((module, name, p) for module in modules for name, p in module._parameters.items())
        hollow = ((m, name, p) for m, name, p in tables if p is not None and p.is_meta and p in self.sources)
        return {(module, name): self.sources[p] for module, name, p in hollow}

    @torch.no_grad()
    def fill_params(self, part: nn.Module, waiting: ParamSources) -> None:
        """Allocate the shards of ``part`` after it has been sharded, and fill them from the mapped files."""
        for fsdp_param in (each for group in fsdp_param_groups(part) for each in group.fsdp_params):
            key = fsdp_param._module_info.module, fsdp_param._module_info.param_name
            if key in waiting and fsdp_param.sharded_param.is_meta:
                source = waiting[key]
                allocate_shard(
                    fsdp_param, None if source is None else local_shard(source, fsdp_param.sharded_param)
                )
                if source is None:
                    self._empty.append(fsdp_param.sharded_param)

    @torch.no_grad()
    def expect_later(self, tensor: torch.Tensor) -> None:
        """Expect the values of a tensor that ``param_init_fn`` left without from a later load."""
        _local_data(tensor).zero_()
        self._empty.append(tensor)

    def guard_forward(self, model: nn.Module) -> None:
        """Refuse a forward of ``model``, and to save it, before all tensors have their values."""
        if self._empty:
            _GUARDS[model] = _UninitializedWeightsGuard(model, self._empty)


def allocate_shard(fsdp_param: Any, values: torch.Tensor | None) -> None:
    """Allocate this rank's shard of an ``FSDPParam``, and copy ``values`` into it; zeros without them."""
    old, dim = fsdp_param.sharded_param, fsdp_param.fsdp_placement.dim
    size = fsdp_param.padded_sharded_param_size
    length = old.to_local().shape[dim] if old.to_local().numel() else 0
    padded = torch.empty(
        size,
        dtype=old.dtype,
        device="cpu" if fsdp_param.offload_to_cpu else fsdp_param.device,
        pin_memory=fsdp_param.pin_memory,
    )
    shard, rest = padded.narrow(dim, 0, length), padded.narrow(dim, length, size[dim] - length)
    # Each page is written to once: that is most of the time this takes.
    rest.zero_()
    _ = shard.zero_() if values is None else shard.copy_(values)
    # Not DTensor.from_local, which brings what rests on the host to the device.
    new = fsdp_param.to_sharded_dtensor(shard)
    # The same object gets the memory: whoever holds the parameter has it.
    torch.utils.swap_tensors(old, nn.Parameter(new, requires_grad=old.requires_grad))
    fsdp_param._sharded_param_data = padded.view(-1)
    fsdp_param.reset_sharded_param()


class _UninitializedWeightsGuard:
    """Refuses to compute with a model before its tensors have been written to.

    Writing in place gives a tensor another version: the DTensor, or its local shard. Values that are written
    past both counts are not zero.
    """

    def __init__(self, model: nn.Module, empty: Iterable[torch.Tensor]) -> None:
        self._empty = [(tensor, _versions(tensor)) for tensor in empty if _local_data(tensor).numel()]
        hook: Any = torch.compiler.disable(self._check)
        self._handle = model.register_forward_pre_hook(hook, prepend=True)

    @torch.no_grad()
    def names(self, model: nn.Module) -> list[str]:
        """Return the names of the tensors that have not been written to."""
        left = [
            _local_data(t)
            for t, versions in self._empty
            if _versions(t) == versions and not _local_data(t).any()
        ]
        places = {tensor.data_ptr() for tensor in left}
        return [name for name, tensor in _named_tensors(model) if _local_data(tensor).data_ptr() in places]

    def _check(self, model: nn.Module, _: Any) -> None:
        refuse_uninitialized(self.names(model))
        self._handle.remove()
        _GUARDS.pop(model, None)


_GUARDS: weakref.WeakKeyDictionary[nn.Module, _UninitializedWeightsGuard] = weakref.WeakKeyDictionary()


def uninitialized_names(model: nn.Module) -> list[str]:
    """Return the names of a sharded model's tensors whose local shards have no values yet."""
    gate = _GUARDS.get(model)
    return gate.names(model) if gate is not None else []


def refuse_uninitialized(names: Iterable[str]) -> None:
    """Refuse to use tensors without values.

    Raises:
        PrepareError: there are some.
    """
    empty = list(dict.fromkeys(names))
    if empty:
        raise PrepareError(
            f"there are no values in {list_first(empty)}",
            why="they were on the meta device when the model was prepared, on rank 0 too, and neither a "
            "param_init_fn nor a load has filled them",
            fix="load_checkpoint_in_model(model, folder), before prepare or after it, or a "
            "param_init_fn of the plugin that fills all parameters and buffers",
        )


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _local_data(tensor: torch.Tensor) -> torch.Tensor:
    # Of a DTensor the local tensor itself, which has a version of its own.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, _local_data(tensor)._version


def _refuse_meta_buffers(model: nn.Module, sources: Mapping[torch.Tensor, Any]) -> None:
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer in sources:
                raise PrepareError(
                    f"the buffer {prefix}{'.' if prefix else ''}{name} is on the meta device, on rank 0 too",
                    why="it is not persistent, so no file holds it: the model would compute with zeros",
                    fix="make the model in 'with init_empty_weights():', which leaves buffers real",
                )
