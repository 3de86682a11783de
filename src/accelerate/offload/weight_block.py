"""Blocks and pages: the weights that are needed for one forward, and how they are copied.

A block is a module with the weights that are put into it while it runs, and taken out after. Its pages are
copied as one range of bytes each, on the host and on the device. A page of weights that live in memory has
its own range of (pinned) host memory: one copy brings all of it to the device, and views of that copy are
the parameters. A page of weights that live in files, or for which the budget of pinned memory is used up, has
none; its values are read from their sources each time. Weights whose class wraps other tensors, as torchao's
quantized ones do, have no bytes of their own: they are in no page, and are moved one by one.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core.errors import OffloadError, warn_user
from accelerate.device.base import Device
from accelerate.offload.module_tensors import (
    MaterializedTensor,
    address_of,
    as_parameter,
    restore_stand_ins,
    tensor_slots,
)
from accelerate.offload.offloaded_tensor import (
    CastSource,
    HostMemoryWeightSource,
    OffloadedTensor,
    make_stand_in,
)
from accelerate.world import world as worlds

ALIGNMENT = 512  # bytes between the starts of two weights; kernels like it, and every dtype divides it
SLAB = 2**29  # bytes of host memory that are asked for at once

# The host memory of pages, by the type of the device that it serves and the address of each weight, while one
# of them lives there. A model that is dispatched again, or gets an adapter, finds it and pins nothing twice.
_regions: dict[tuple[str, int], torch.Tensor] = {}

# (a table of a module, what it held when the block was read)
TableSnapshot = tuple[dict[str, Any], tuple[Any, ...]]


# ----------------------------------------------------------------------------------------------------- pages


class PagedWeight:
    """One weight of a page.

    Attributes:
        stand_in: what stands for it in the modules while its values are not on the device.
        source: the source of the values as the page has them; the stand-in may get a cast of it later.
        offset: where it begins in the page, in bytes.
        stride: of the tensor on the device; dense tensors keep theirs.
        home: its values in the host memory of the page, if that has some.
    """

    home: torch.Tensor

    def __init__(self, stand_in: OffloadedTensor, offset: int) -> None:
        self.stand_in, self.offset = stand_in, offset
        self.source = source = stand_in.source
        self.dtype, self.size, self.nbytes = source.dtype, source.shape, source.nbytes
        # A dense tensor in memory keeps its strides, such as channels_last.
        tensor = source.tensor if isinstance(source, HostMemoryWeightSource) else None
        if tensor is None or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = torch.empty(source.shape, device="meta")
        self.stride = tensor.stride()


class WeightPage:
    """Weights that are copied to the device together.

    Attributes:
        nbytes: of all of them, with the gaps between them.
        host: the bytes in host memory, or None if the values are read from their sources each time.
        home_changes: the ``changes`` when ``host`` was last seen to have the values.
        shared: several blocks have weights of it.
    """

    def __init__(self, stand_ins: Iterable[OffloadedTensor], shared: bool = False) -> None:
        self.entries: list[PagedWeight] = []
        self.nbytes = 0
        for stand_in in stand_ins:
            self.entries.append(PagedWeight(stand_in, self.nbytes))
            self.nbytes += -(-self.entries[-1].nbytes // ALIGNMENT) * ALIGNMENT
        self.host: torch.Tensor | None = None
        self.home_changes: list[Any] = []
        self.shared = shared

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightPage:
        """Return the page of a copied model, which gets host memory of its own when it is first used."""
        stand_ins = [copy.deepcopy(entry.stand_in, memo) for entry in self.entries]
        twin = memo[id(self)] = WeightPage(stand_ins, self.shared)
        return twin

    @property
    def key(self) -> tuple[int, ...]:
        """The identities of its weights."""
        return tuple(id(entry.stand_in) for entry in self.entries)

    @property
    def changes(self) -> list[Any]:
        """The changes of its weights' values; a copy that was made before another one is out of date."""
        return [entry.source.changes for entry in self.entries]

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[PagedWeight, torch.Tensor]]:
        """Return each entry with its weight as a view of ``buffer``, the bytes of the page on some device."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        for entry in self.entries:
            if entry.dtype not in typed:
                typed[entry.dtype] = buffer.view(entry.dtype)
            offset = entry.offset // entry.dtype.itemsize
            yield entry, typed[entry.dtype].as_strided(entry.size, entry.stride, offset)

    def move_to_host(self, memory: HostPageAllocator) -> None:
        """Move the values into host memory of the page's own, and free the tensors that held them.

        They may lie in that of an earlier page. Beyond the budget they stay where they are, and are read from
        there each time.
        """
        self.host = memory.region_of(self.entries[0].stand_in)
        if self.host is not None and self._is_in(self.host):
            for entry in self.entries:
                entry.home = entry.source.host_tensor().detach()
            self.home_changes = self.changes
            return
        self.host = region = memory.allocate(self.nbytes)
        if region is None:
            return
        raw = region.numpy()
        for entry in self.entries:
            # A storage of its own over the same bytes: who saves or copies the weight gets no more than it.
            flat = torch.from_numpy(raw[entry.offset : entry.offset + entry.nbytes]).view(entry.dtype)
            entry.home = flat.as_strided(entry.size, entry.stride)
        self.bring_home(self.entries)
        keys = {(memory.device.type, region.data_ptr() + entry.offset) for entry in self.entries}
        _regions.update(dict.fromkeys(keys, region))
        weakref.finalize(raw, lambda: [_regions.pop(key) for key in keys])  # the weights hold it

    def assigned_entries(self) -> list[PagedWeight]:
        """Return weights whose values are not in the page's host memory: programs assign ``tensor.data``."""

        def is_home(values: torch.Tensor, home: torch.Tensor) -> bool:
            return values.data_ptr() == home.data_ptr() and values.stride() == home.stride()

        return [e for e in self.entries if not is_home(e.source.host_tensor(), e.home)]

    def bring_home(self, entries: Iterable[PagedWeight]) -> None:
        """Copy the values of weights into the page's host memory, which has them from now on."""
        for entry in entries:
            source = entry.source
            assert isinstance(source, HostMemoryWeightSource)
            values = source.host_tensor().detach()
            # Assigned values may be a view of those before, such as their transpose.
            entry.home.copy_(values.clone() if values.data_ptr() == entry.home.data_ptr() else values)
            source.tensor.data = entry.home  # the same object: mappings of weights have it too
        self.home_changes = self.changes

    def _is_in(self, region: torch.Tensor) -> bool:
        """Return True when the values lie in a region as the page has them."""
        begin = region.data_ptr()
        return region.numel() == self.nbytes and all(
            address_of(entry.source.host_tensor()) == begin + entry.offset for entry in self.entries
        )


def is_movable(stand_in: OffloadedTensor) -> bool:
    """Return True when a weight's values may move into the memory of a page."""
    return isinstance(stand_in.source, HostMemoryWeightSource)


def is_wrapper(stand_in: OffloadedTensor) -> bool:
    """Return True when the class of a weight wraps other tensors."""
    return hasattr(vars(stand_in).get("_kind"), "__tensor_flatten__")


class HostPageAllocator:
    """Host memory for pages, allocated in large slabs where it is pinned.

    Torch rounds pinned memory up to powers of two: slabs have such sizes. Of pages larger than half of
    ``SLAB`` one slab holds as many as leave the least of it.

    Args:
        device: whose copies it serves.
        weights: those that will be in pages; how large a slab is follows from them.

    Attributes:
        budget: bytes that may still be pinned: at first half of the free memory, divided by the processes of
            this machine; None before the first.
        shared_pages: the pages of weights that several blocks have, by the weight's identity.
    """

    def __init__(self, device: Device, weights: Iterable[OffloadedTensor] = ()) -> None:
        self.device = device
        new = [s for s in weights if is_movable(s) and self.region_of(s) is None]
        self.bytes_left = sum(stand_in.source.nbytes for stand_in in new)
        self.slab: torch.Tensor | None = None
        self.used = 0
        self.budget: int | None = None
        self.shared_pages: weakref.WeakValueDictionary[int, WeightPage] = weakref.WeakValueDictionary()

    def allocate(self, size: int) -> torch.Tensor | None:
        """Return ``size`` bytes of host memory (uint8); None if it is pinned and the budget is used up."""
        if not self.device.pins_memory:
            return self.device.host_memory(size)
        if self.slab is None or self.used + size > self.slab.numel():
            # The largest power of two within what is left.
            half = 1 << (max(self.bytes_left, 1).bit_length() - 1)
            whole = 1 << (max(size, 1) - 1).bit_length()
            if self.budget is None:
                self.device.empty_host_cache()  # what an earlier model has pinned is free, too
                # Pinned memory is never swapped out, and each process pins a copy of its own.
                self.budget = devices.get("cpu").get_memory_info()[0] // 2 // worlds.get_local_size()
            largest = 1 << (self.budget.bit_length() - 1) if self.budget else 0
            if largest < whole:
                return None
            slab_size = min(max(min(half, SLAB), whole), largest)
            if slab_size == whole:
                sizes = (n for n in (whole << k for k in range(4)) if n <= max(min(half, largest), whole))
                slab_size = min(sizes, key=lambda n: n % size / n)
            try:
                self.slab, self.used = self.device.host_memory(slab_size), 0
            except RuntimeError as error:  # a system may pin less than it has: WSL2, a limit of locked memory
                warn_user(f"offloaded weights stay in plain memory, which is copied more slowly: {error}")
                self.budget = 0
                return None
            self.budget -= slab_size
        region = self.slab[self.used : self.used + size]
        self.used += size
        self.bytes_left = max(0, self.bytes_left - size)
        return region

    def region_of(self, stand_in: OffloadedTensor) -> torch.Tensor | None:
        """Return the host memory of an earlier page that the values of a weight lie in, or None."""
        source = stand_in.source
        in_memory = isinstance(source, HostMemoryWeightSource)
        return _regions.get((self.device.type, address_of(source.tensor))) if in_memory else None


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
            size = 1 << max(page.nbytes - 1, 1).bit_length()
            try:
                block = self.device.host_memory(size)
            except RuntimeError:  # no memory can be pinned: the copy waits for its stream, and is right
                block = torch.empty(size, dtype=torch.uint8, device="cpu")
        read_page(page, block[: page.nbytes])
        self.filled = block
        return block[: page.nbytes]

    def mark_copying(self, copy: Any) -> None:
        """Mark the buffer that was filled last as in use until ``copy`` (an event) is over."""
        self.blocks.append((self.filled, copy))


def read_page(page: WeightPage, buffer: torch.Tensor) -> None:
    """Read the values of a page into ``buffer``, on the host or on a device, one weight after the other."""
    for entry, view in page.views(buffer):
        view.copy_(entry.source.host_tensor().detach())


# ---------------------------------------------------------------------------------------------------- blocks


def is_callable(module: nn.Module) -> bool:
    """Return True when a module has a forward; lists and dicts of modules have none."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


class WeightBlock:
    """Modules whose weights are copied to the device and dropped together.

    Args:
        name: of the module whose forward they are needed for.
        module: that module.
        whole: all weights in it; otherwise only its own, and those of its lists of modules.

    Attributes:
        pages: the weights, as they are copied.
        wrappers: the weights that are moved one by one.
        users: forwards that are using them now.
        next_block: the next block in the order of definition.
    """

    def __init__(self, name: str, module: nn.Module, whole: bool) -> None:
        self.name, self.module, self.whole = name, module, whole
        self.pages: list[WeightPage] = []
        self.wrappers: list[OffloadedTensor] = []
        self.users = 0
        self.next_block: WeightBlock | None = None
        self._slots: dict[int, list[tuple[nn.Module, str]]] = {}  # by the identity of a stand-in
        self._snapshots: list[TableSnapshot] | None = None
        self._materialized: list[MaterializedTensor] = []

    def __repr__(self) -> str:
        return f"<block {self.name or 'of the model'}, {sum(page.nbytes for page in self.pages)} bytes>"

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightBlock:
        """Return the block of a copied model; its weights are read when it is first used."""
        twin = memo[id(self)] = WeightBlock(self.name, copy.deepcopy(self.module, memo), self.whole)
        twin.pages, twin.wrappers = copy.deepcopy((self.pages, self.wrappers), memo)
        return twin

    def replace_module(self, module: nn.Module) -> None:
        """Use another module in the place of the block's."""
        self.module, self._snapshots = module, None

    # --- which weights

    def modules(self) -> Iterator[nn.Module]:
        """Return the modules whose weights belong to the block."""
        if self.whole:
            yield from self.module.modules()
            return
        waiting = [self.module]
        while waiting:
            module = waiting.pop(0)
            yield module
            waiting += [c for c in module._modules.values() if c is not None and not is_callable(c)]

    def stand_ins(self) -> list[OffloadedTensor]:
        """Return the block's weights, each once, in the order of their modules."""
        self._slots = {}
        seen: list[TableSnapshot] = []
        collected: list[OffloadedTensor] = []
        for module in self.modules():
            seen.append((module._modules, tuple(module._modules.values())))
            for table in (module._parameters, module._buffers):
                stand_ins_here = [(name, t) for name, t in table.items() if isinstance(t, OffloadedTensor)]
                for name, tensor in stand_ins_here:
                    if id(tensor) not in self._slots:
                        collected.append(tensor)
                    self._slots.setdefault(id(tensor), []).append((module, name))
                if stand_ins_here or table is module._parameters:
                    seen.append((table, tuple(table.values())))
        self._snapshots = seen
        return collected

    def make_pages(self, stand_ins: list[OffloadedTensor], memory: HostPageAllocator) -> None:
        """Group the weights into pages, and move those in memory into memory of the pages' own.

        Args:
            stand_ins: the block's weights.
            memory: for the pages; knows those of weights that other blocks have as well.
        """
        pages_by_key = {page.key: page for page in self.pages}
        shared = dict(memory.shared_pages)
        self.wrappers = [s for s in stand_ins if is_wrapper(s)]
        unshared = [s for s in stand_ins if id(s) not in shared and not is_wrapper(s)]
        # Those in memory, of each earlier page, and those that are read from files.
        groups: dict[tuple[bool, int], list[OffloadedTensor]] = {}
        for stand_in in unshared:
            key = not is_movable(stand_in), id(memory.region_of(stand_in))
            groups.setdefault(key, []).append(stand_in)
        pages = [WeightPage(groups[key]) for key in sorted(groups)]
        self.pages = [pages_by_key.get(page.key, page) for page in pages]
        self.pages += [shared[id(s)] for s in stand_ins if id(s) in shared]
        for page in self.pages:
            if page.host is None and is_movable(page.entries[0].stand_in):
                page.move_to_host(memory)

    def refresh(self, device: torch.device, memory: HostPageAllocator, blocks: Sequence[WeightBlock]) -> None:
        """Read the modules and weights again if any of them was replaced.

        Args:
            device: where they compute.
            memory: for pages of new weights.
            blocks: all blocks of the model. What several have stays one weight.
        """
        if self._snapshots is not None and all(
            len(table) == len(tensors) and all(map(operator.is_, table.values(), tensors))
            for table, tensors in self._snapshots
        ):
            return
        others = [block for block in blocks if block is not self]
        self._offload_new_weights(device, others)
        stand_ins = self.stand_ins()
        shared = self._shared_pages(stand_ins, others, memory)
        memory.shared_pages.update(shared)
        with torch.inference_mode(False), torch.no_grad():
            self.make_pages(stand_ins, memory)

    def _shared_pages(
        self, stand_ins: Sequence[OffloadedTensor], others: Sequence[WeightBlock], memory: HostPageAllocator
    ) -> dict[int, WeightPage]:
        """Return pages of weights that other blocks have as well, which are to use them from now on."""
        shared = {page.key[0]: page for page in self.pages if page.shared}
        paged = {key for page in self.pages for key in page.key} | set(memory.shared_pages)
        new = {id(s): s for s in stand_ins if id(s) not in paged and not is_wrapper(s)}
        for block in others if new else ():
            for key in new.keys() & {id(tensor) for _, _, tensor in tensor_slots(block.modules())}:
                shared.setdefault(key, WeightPage([new[key]], shared=True))
                block._snapshots = None
        return shared

    def _offload_new_weights(self, device: torch.device, others: Sequence[WeightBlock]) -> None:
        """Offload weights that were added after the model was dispatched, like the others.

        Weights that are trained beside frozen ones (adapters) go to the device and stay, and so do tensors
        with a gradient that are no parameters (``torch.func.functional_call``).

        Raises:
            OffloadError: one has no values.
        """
        modules = list(self.modules())
        offloaded = [p for m in modules for p in m._parameters.values() if isinstance(p, OffloadedTensor)]
        frozen = any(not p.requires_grad for p in offloaded)
        replacements: dict[int, tuple[Any, Any]] = {}  # identity -> (tensor, its replacement)
        for module in modules:
            hook = vars(module).get("_hf_hook")  # it may have the values of the module's tensors
            for table, name, tensor in tensor_slots([module]):
                if tensor.is_meta and name not in (getattr(hook, "weights_map", None) or ()):
                    raise self._no_values_error(tensor)
                if tensor.device.type != "cpu" or id(tensor) in replacements:
                    continue
                trained = tensor.requires_grad and (frozen or not isinstance(tensor, nn.Parameter))
                new: Any
                if table is module._buffers or trained:
                    before, new = tensor.device, move_tensor(tensor, device)
                    new._original_device = before  # of the tensor, which may have been moved in place
                else:
                    source = HostMemoryWeightSource(f"{self.name}.{name}", tensor.detach())
                    new = make_stand_in(tensor, source, device)
                replacements[id(tensor)] = tensor, new
        for block in (self, *others) if replacements else ():
            for table, name, tensor in tensor_slots(block.modules()):
                if id(tensor) in replacements:
                    table[name] = replacements[id(tensor)][1]

    def _no_values_error(self, tensor: torch.Tensor) -> OffloadError:
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        path = next((path for path, each in tensors if each is tensor), "?")
        return OffloadError(
            f"{self.name}.{path} has no values: it was put on the meta device after the model was dispatched",
            why="offloaded weights show that device, and what follows them there, like an adapter, is lost",
            fix="add it to the model in memory, then dispatch both: dispatch_model(model, device_map=...)",
        )

    # --- in and out

    def install(self, buffers: list[torch.Tensor]) -> None:
        """Put the weights of the pages, which are on the device, into the modules.

        Args:
            buffers: the bytes of each page.
        """
        gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            views = [
                pair for page, buffer in zip(self.pages, buffers, strict=True) for pair in page.views(buffer)
            ]
            values = [(entry.stand_in, _as_stand_in(view, entry)) for entry, view in views]
            values += [(s, s.source.host_tensor().to(s.execution_device)) for s in self.wrappers]
        for stand_in, view in values:
            view = view.data  # with a version of its own: a buffer may be changed in place beside weights
            if isinstance(stand_in, nn.Parameter):
                view = _make_parameter(stand_in, view, gradients)
            self._materialized.append(MaterializedTensor(stand_in, self._slots.get(id(stand_in), ()), view))

    def use_stand_in(self, tensor: torch.Tensor, stand_in: OffloadedTensor) -> None:
        """Put ``stand_in`` back for a weight that is in the modules now."""
        for each in self._materialized:
            if each.tensor is tensor:
                each.use_stand_in(stand_in)

    def uninstall(self) -> int:
        """Put the stand-ins back, and write back weights that were changed in place.

        Returns:
            The bytes that were written back.

        Raises:
            OffloadError: values were changed that are stored in a file.
        """
        return restore_stand_ins(self._materialized)


def _as_stand_in(view: torch.Tensor, entry: PagedWeight) -> torch.Tensor:
    """Return a weight of a page in the dtype that its stand-in has been given since the page was made."""
    source = entry.stand_in.source
    if source is entry.source:
        return view
    is_cast = isinstance(source, CastSource) and source.whole is entry.source
    return view.to(source.dtype) if is_cast else source.read(view.device)


def _make_parameter(stand_in: Any, view: torch.Tensor, gradients: bool) -> torch.Tensor:
    """Return the parameter of the module while its values are on the device."""
    if gradients and stand_in.requires_grad:
        return _GradientRefusal.apply(stand_in, [view], stand_in.source.name)
    if not vars(stand_in).keys() - _STAND_IN_ATTRIBUTES:
        return nn.Parameter(view, requires_grad=False)
    parameter = as_parameter(view, stand_in)
    return parameter.requires_grad_(False)


# The attributes of a stand-in for an ordinary parameter; any other was set by the user.
_STAND_IN_ATTRIBUTES = {"source", "execution_device", "_is_param", "_restored", "_original_device"}


class _GradientRefusal(torch.autograd.Function):
    """The identity, for a weight that is dropped after its forward: its backward is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(stand_in: Any, holder: list[torch.Tensor], name: str) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the weight; the list hides it from autograd, which keeps arguments."""
        return holder[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the name of the weight for the error."""
        ctx.name = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Refuse the gradient: there is nowhere to keep it.

        Raises:
            OffloadError: always.
        """
        raise OffloadError(
            f"{ctx.name} is offloaded, and cannot be trained",
            why="its values are dropped after each forward, and a gradient for them has nowhere to go",
            fix="freeze what is offloaded, model.requires_grad_(False), and train adapters on top of it",
        )


def move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a parameter or buffer to a device; return the same object where torch can keep it."""
    holder = nn.Module()
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter("tensor", tensor)
        return holder.to(device)._parameters["tensor"]  # pyright: ignore[reportReturnType]
    return tensor.to(device)
