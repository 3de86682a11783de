"""The steps of a dispatch: tensors are placed by the device map, stand-ins, blocks and hooks are added.

Tensors on an accelerator stay there. Those on the CPU or on disk stay where they are, mapped from their
files, if the model computes on the CPU; if it computes on an accelerator, they are offloaded in blocks that
a pager copies to it in turn.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from accelerate.core.errors import DeviceError
from accelerate.offload.dispatch_hook import (
    DispatchHook,
    InnerForward,
    _dispatched_forward,
    attach_hook,
    show_hook,
    watch_replacements,
)
from accelerate.offload.hooks import attributes_of
from accelerate.offload.module_input_output import Keys, ModuleInputOutputMover
from accelerate.offload.module_tensors import has_own_tensors, replace_tensor, tensor_slots, with_values
from accelerate.offload.offload_folder import PrefixedDataset
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    MappingSource,
    OffloadedTensor,
    TensorSource,
    make_stand_in,
    mapped_source,
    set_file_source,
    version_of,
)
from accelerate.offload.pager import Pager
from accelerate.offload.weight_block import (
    HostPageAllocator,
    WeightBlock,
    WeightPage,
    is_callable,
    is_wrapper,
    move_tensor,
)
from accelerate.offload.weight_store import WeightStore

CPU = torch.device("cpu")
BLOCK = 2**27  # bytes: the most that a block takes, unless one weight is larger
Home = torch.device | Literal["cpu", "disk"]


@dataclass(eq=False)
class DeviceMapTensorSlot:
    """The slot of one tensor in one module.

    Attributes:
        name: its full name.
        table, name_in_table: the dict of the module that holds it, and its key there.
        home: where the device map puts it; None leaves it where it is.
        device: where its module computes.
    """

    name: str
    module: nn.Module
    table: dict[str, Any]
    name_in_table: str
    home: Home | None
    device: torch.device

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is in the slot now."""
        return self.table[self.name_in_table]

    @property
    def is_buffer(self) -> bool:
        """True when the slot is one of a buffer."""
        return self.table is self.module._buffers


@dataclass
class DispatchOptions:
    """The options of a dispatch beside the device map.

    Attributes:
        main_device: computes modules on the CPU and on disk, and gets the inputs.
        offload_buffers: offload the buffers of the state dict as well.
        skip_keys: names of arguments that are not moved.
        preload_classes: names of classes whose weights are fetched together.
        force_hooks: attach hooks also where nothing has to be moved.
        named_devices: modules that the device map names, with their devices.
        is_offload: all weights are offloaded, also where the main device is the CPU and uses them in place.
    """

    main_device: torch.device
    offload_buffers: bool = False
    skip_keys: Keys = None
    preload_classes: Sequence[str] = ()
    force_hooks: bool = False
    named_devices: dict[str, torch.device] = field(default_factory=dict[str, torch.device])
    is_offload: bool = False


def list_tensor_slots(
    model: nn.Module, home: Callable[[str], Home | None], main: torch.device
) -> list[DeviceMapTensorSlot]:
    """Return the slot of every parameter and buffer of a model, with its home."""
    slots: list[DeviceMapTensorSlot] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table, key, _ in tensor_slots([module]):
            home_device = home(prefix + key)
            device = home_device if isinstance(home_device, torch.device) else main
            slots.append(DeviceMapTensorSlot(prefix + key, module, table, key, home_device, device))
    return slots


def read_folder_buffers(
    slots: Sequence[DeviceMapTensorSlot], values: WeightStore, options: DispatchOptions
) -> None:
    """Read buffers from the offload folder where the model has its weights only there.

    ``init_empty_weights`` leaves buffers as they are in a new model. A device map may have others loaded.
    """
    in_folder = values.loader.index.keys() - values.index.keys() - values.state_dict.keys()
    saved = [slot for slot in slots if slot.name in in_folder and slot.home is not None]
    if any(slot.tensor.is_meta for slot in saved):
        for slot in saved:
            is_kept = _is_kept_buffer(slot, options) and not options.is_offload
            if slot.is_buffer and not (is_kept or slot.tensor.is_meta):
                source = MappingSource(slot.name, values.loader, slot.name, slot.tensor)
                slot.table[slot.name_in_table] = source.read(slot.tensor.device)


# ------------------------------------------------------------------------------------------------ on the CPU


def place_on_cpu(slots: Sequence[DeviceMapTensorSlot], values: WeightStore, options: DispatchOptions) -> None:
    """Put the values of tensors that compute on the CPU into memory, or map them from files.

    Buffers that are in memory stay there, like those that would stay on an accelerator.

    Raises:
        PrepareError: an offload folder is needed.
        OffloadError: a file is gone, or cannot be written.
    """
    slots = [p for p in slots if not (_is_kept_buffer(p, options) and _is_on(p.tensor, CPU))]
    disk = {p.name: p.tensor for p in slots if p.home == "disk"}
    on_disk = values.file_sources(disk, in_place=True)

    def is_in_place(slot: DeviceMapTensorSlot) -> bool:
        is_replaced = options.is_offload and slot.name in values.state_dict
        return slot.home is None or (slot.home != "disk" and _is_on(slot.tensor, CPU) and not is_replaced)

    def place(slot: DeviceMapTensorSlot) -> torch.Tensor:
        is_on_disk = slot.home == "disk"
        return _on_cpu(
            slot.tensor, on_disk[slot.name] if is_on_disk else values.find_source(slot.name, slot.tensor)
        )

    _fill_slots([slot for slot in slots if not is_in_place(slot)], place)


def _fill_slots(
    slots: Sequence[DeviceMapTensorSlot], make: Callable[[DeviceMapTensorSlot], torch.Tensor]
) -> None:
    """Replace the tensors of slots; a tensor of several slots is made once for each device."""
    made: dict[tuple[int, torch.device], torch.Tensor] = {}
    for slot in slots:
        key = id(slot.tensor), slot.device
        if key not in made:
            made[key] = make(slot)
        replace_tensor(slot.module, slot.name_in_table, made[key])


def _on_cpu(old: torch.Tensor, source: TensorSource) -> torch.Tensor:
    """Return the tensor with the values of ``source``; a parameter that has memory stays the same object.

    One that was made in inference mode does not: it could not be trained with memory of any kind.
    """
    if mapped_source(old) is source:
        return old
    tensor = with_values(old, source.host_tensor(), source)
    if type(old) is nn.Parameter and _is_on(old, CPU) and version_of(old) is not None:
        old.data = tensor.data
        if not source.in_memory:
            set_file_source(old, source)
        return old
    return tensor


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and not isinstance(tensor, OffloadedTensor)


# ---------------------------------------------------------------------------------------- on accelerators


def place_resident_tensors(
    slots: Sequence[DeviceMapTensorSlot], values: WeightStore, options: DispatchOptions
) -> list[DeviceMapTensorSlot]:
    """Move resident tensors to their devices: those of the map, and buffers of offloaded modules.

    Returns:
        The slots of the other tensors, which are to be offloaded, wherever they lie now.
    """
    stays = _resident_keys(slots, options)
    resident = {(id(p.tensor), p.device) for p in slots if isinstance(p.home, torch.device)}
    originals: dict[int, torch.Tensor] = {}  # the first of several copies is the same parameter, if it can be

    def place(slot: DeviceMapTensorSlot) -> torch.Tensor:
        old = slot.tensor
        new: Any = old
        before = CPU if old.is_meta else old.device  # a parameter is moved in place
        if old.is_meta or isinstance(old, OffloadedTensor):
            new = with_values(old, values.find_source(slot.name, old, disk=True).read(slot.device))
        elif old.device != slot.device and id(old) in originals:
            new = with_values(old, old.detach().to(slot.device))
        elif old.device != slot.device:
            new = move_tensor(old, slot.device)
        originals[id(old)] = old
        if (id(old), slot.device) not in resident:
            new._original_device = before
        return new

    placed: list[DeviceMapTensorSlot] = []
    paged: list[DeviceMapTensorSlot] = []
    for slot in slots:
        if slot.home is not None:
            is_paged = slot.home in ("cpu", "disk") and (id(slot.tensor), slot.device) not in stays
            (paged if is_paged else placed).append(slot)
    _fill_slots(placed, place)
    return paged


def _resident_keys(
    slots: Sequence[DeviceMapTensorSlot], options: DispatchOptions
) -> set[tuple[int, torch.device]]:
    """Return (id, device) of the tensors that stay on the device all the time.

    Buffers, unless they are to be offloaded and a state dict has them; what is tied to a tensor that is
    there; what is trained beside frozen weights (adapters), as long as it is small, or smaller than these:
    models for inference have trainable weights too, and a few frozen ones; what is no plain array; what
    compiled code (TorchScript) holds, since it calls no hooks.
    """
    resident = {(id(p.tensor), p.device) for p in slots if isinstance(p.home, torch.device)}
    paged = [p for p in slots if p.home in ("cpu", "disk") and p.device.type != "cpu"]
    trained = [p for p in paged if not p.is_buffer and p.tensor.requires_grad]
    frozen = sum(p.tensor.nbytes for p in paged if not p.is_buffer and not p.tensor.requires_grad)
    if frozen and sum(p.tensor.nbytes for p in trained) <= max(BLOCK, frozen):
        resident |= {(id(p.tensor), p.device) for p in trained}
    for p in paged:
        no_array = p.tensor.layout != torch.strided or p.tensor.is_quantized
        if _is_kept_buffer(p, options) or no_array or isinstance(p.module, torch.jit.ScriptModule):
            resident.add((id(p.tensor), p.device))
    return resident


def _is_kept_buffer(slot: DeviceMapTensorSlot, options: DispatchOptions) -> bool:
    """Return True for a buffer that is not offloaded with the weights of its module."""
    lasting = slot.name_in_table not in slot.module._non_persistent_buffers_set
    return slot.is_buffer and not (options.offload_buffers and lasting)


def replace_with_stand_ins(paged: Sequence[DeviceMapTensorSlot], values: WeightStore) -> None:
    """Offload tensors: replace them with stand-ins, and free the memory that they have on a device."""
    on_disk = values.file_sources({p.name: p.tensor for p in paged if p.home == "disk"})

    def offload(slot: DeviceMapTensorSlot) -> torch.Tensor:
        old = slot.tensor
        if slot.home == "disk":
            source = on_disk[slot.name]
        else:
            value = values.find_source(slot.name, old).host_tensor().detach()
            source = HostMemoryWeightSource(slot.name, value)
        stand_in: Any = make_stand_in(old, source, slot.device)
        if old.device.type not in ("cpu", "meta"):
            stand_in._original_device = old.device
        return stand_in

    _fill_slots(paged, offload)


def make_blocks(
    model: nn.Module, pager: Pager, paged: Sequence[DeviceMapTensorSlot], options: DispatchOptions
) -> dict[str, WeightBlock]:
    """Divide a model into blocks: the largest callable modules that are not too large.

    Returns:
        Name of the module -> block, in the order of definition.
    """
    sizes = _OffloadedSizes(paged)
    limit = max(sizes.largest, min(BLOCK, _block_limit(pager)))
    blocks = {
        name: WeightBlock(name, m, whole)
        for name, m, whole in sizes.divide_into_blocks(model, limit, options.preload_classes)
    }
    block_stand_ins = {name: block.stand_ins() for name, block in blocks.items()}
    counts = Counter(id(stand_in) for each in block_stand_ins.values() for stand_in in each)
    shared: dict[int, WeightPage] = {}
    for each in block_stand_ins.values():
        several = (s for s in each if counts[id(s)] > 1 and not is_wrapper(s))
        shared.update({id(s): WeightPage([s], shared=True) for s in several if id(s) not in shared})
    pager.memory = HostPageAllocator(pager.driver, sizes.tensors.values())
    pager.memory.shared_pages.update(shared)
    for name, block in blocks.items():
        block.make_pages(block_stand_ins[name], pager.memory)
    pager.blocks = list(blocks.values())
    for block, next_block in zip(pager.blocks, pager.blocks[1:], strict=False):
        block.next_block = next_block
    return blocks


def _block_limit(pager: Pager) -> int:
    """Return a quarter of the free device memory: two blocks are there at a time, half is for the rest."""
    pager.driver.empty_cache()
    try:
        return pager.driver.get_memory_info(pager.device.index)[0] // 4
    except DeviceError:  # the device does not report its memory
        return BLOCK


class _OffloadedSizes:
    """The offloaded bytes of the modules of a model."""

    def __init__(self, paged: Sequence[DeviceMapTensorSlot]) -> None:
        self.tensors: dict[int, OffloadedTensor] = {
            id(p.tensor): p.tensor for p in paged if isinstance(p.tensor, OffloadedTensor)
        }
        self.largest = max((t.source.nbytes for t in self.tensors.values()), default=0)
        self._below: dict[int, set[int]] = {}

    def tensor_ids(self, module: nn.Module) -> set[int]:
        """Return the identities of the offloaded tensors in a module."""
        if id(module) not in self._below:
            tensors = (*module._parameters.values(), *module._buffers.values())
            children = [self.tensor_ids(child) for child in module.children()]
            self._below[id(module)] = (self.tensors.keys() & set(map(id, tensors))).union(*children)
        return self._below[id(module)]

    def divide_into_blocks(
        self, model: nn.Module, limit: int, whole: Sequence[str]
    ) -> Iterator[tuple[str, nn.Module, bool]]:
        """Return (name, module, True when it is whole) of each block.

        The model itself is not whole, unless it has no submodules: programs call those. Nor is a model that
        is wrapped alone by others, such as adapters: programs hang hooks of their own on it.
        """
        seen: set[int] = set()

        def visit(name: str, module: nn.Module, is_model: bool) -> Iterator[tuple[str, nn.Module, bool]]:
            if id(module) in seen or not self.tensor_ids(module):
                return
            seen.add(id(module))
            size = sum(self.tensors[key].source.nbytes for key in self.tensor_ids(module))
            inner = [(key, c) for key, c in module._modules.items() if c is not None and self.tensor_ids(c)]
            # A module that only wraps another one may be bypassed: its users call the inner one.
            preload = type(module).__name__ in whole
            holds_tensors = self._holds_tensors(module)
            wraps = len(inner) == 1 and is_callable(inner[0][1]) and not (preload or holds_tensors)
            can = is_callable(module) and not wraps and not (is_model and inner)
            if can and (not inner or preload or size <= limit):
                yield name, module, True
                seen.update(map(id, module.modules()))  # one that is used elsewhere too belongs to this block
                return
            if is_callable(module) and holds_tensors:
                yield name, module, False
            is_model = is_model and _is_wrapper(module)
            for key, child in inner:
                yield from visit(f"{name}.{key}" if name else key, child, is_model)

        yield from visit("", model, True)

    def _holds_tensors(self, module: nn.Module) -> bool:
        """Return True when a module, or a list of it, holds offloaded tensors itself."""
        tables = (*module._parameters.values(), *module._buffers.values())
        if any(id(tensor) in self.tensors for tensor in tables):
            return True
        return any(not is_callable(child) and self._holds_tensors(child) for child in module.children())


def _is_wrapper(module: nn.Module) -> bool:
    """Return True for a module that has all its tensors in one other that is callable."""
    children = [child for child in module.children() if any(map(has_own_tensors, child.modules()))]
    return len(children) == 1 and is_callable(children[0]) and not has_own_tensors(module)


# ------------------------------------------------------------------------------------------------ hooks


def attach_hooks(
    model: nn.Module,
    slots: Sequence[DeviceMapTensorSlot],
    blocks: dict[str, WeightBlock],
    pager: Pager | None,
    values: WeightStore,
    options: DispatchOptions,
) -> None:
    """Attach hooks to the model, where execution changes device, around blocks, and inside of these."""
    devices, named_devices = _devices_of_modules(model, slots), options.named_devices
    used = devices[id(model)] or {options.main_device}
    mover = ModuleInputOutputMover({d for d in used if d.type != "cpu"} | {options.main_device})
    entries = dict(_device_changes("", model, devices, named_devices)) if len(used) > 1 else {}
    modules = dict(model.named_modules())
    around_blocks = _modules_around_blocks(modules, blocks)
    for slot in slots:
        if isinstance(slot.tensor, OffloadedTensor) and slot.tensor.source.in_memory:
            values.in_memory[slot.name] = slot.tensor.source.host_tensor()
    loader, tied_params_map = values.refresh_loader(), None if options.is_offload else {}

    def make_hook(name: str, module: nn.Module, device: torch.device) -> DispatchHook:
        tensors = (*module._parameters.values(), *module._buffers.values())
        is_offloaded = any(isinstance(tensor, OffloadedTensor) for tensor in tensors)
        return DispatchHook(
            device,
            offload=is_offloaded,
            weights_map=PrefixedDataset(loader, f"{name}." if name else "") if is_offloaded else None,
            offload_buffers=options.offload_buffers,
            skip_keys=options.skip_keys,
            mover=mover,
            root=not name,
            tied_params_map=tied_params_map,
        )

    enclosing = {id(module): block for block in blocks.values() for module in block.modules()}
    own_devices = {id(slot.module): slot.device for slot in slots if slot.home is not None}
    for name, module in modules.items():
        device = own_devices.get(id(module), named_devices.get(name))
        if len(devices[id(module)]) == 1 and is_callable(module):
            # Programs call layers alone, which add their inputs to what the layers inside of them give.
            [device] = devices[id(module)]
        if not name or name in entries or name in around_blocks:
            hook = make_hook(name, module, entries.get(name, options.main_device))
            if name in around_blocks:
                hook._pager, hook.block = pager, blocks.get(name)
            attach_hook(module, hook)
        elif device is not None:
            hook = make_hook(name, module, device)
            hook.enclosing_block = enclosing.get(id(module))
            attach_inner_hook(module, hook)
    watch_replacements(model)


def show_resident_hooks(model: nn.Module, options: DispatchOptions) -> None:
    """Set the hooks that clients look for where offloaded weights are used in place; none is called.

    modelopt replaces ``_old_forward`` of a module with a hook, and leaves its ``forward``.
    """
    for name, module in model.named_modules():
        if not name or has_own_tensors(module):
            hook = DispatchHook(options.main_device, skip_keys=options.skip_keys, root=not name)
            show_hook(module, hook)
            shown: Any = module
            if shown._hf_hook is hook and is_callable(module):
                module.forward = functools.update_wrapper(
                    InnerForward(_call_old_forward, module), shown._old_forward
                )


def _modules_around_blocks(modules: dict[str, nn.Module], blocks: dict[str, WeightBlock]) -> set[str]:
    """Return the names of the modules of blocks, and of callable modules around them."""
    names = set(blocks)
    for name in blocks:
        while name:
            name = name.rpartition(".")[0]
            if is_callable(modules[name]):
                names.add(name)
    return names


def _devices_of_modules(
    model: nn.Module, slots: Sequence[DeviceMapTensorSlot]
) -> dict[int, set[torch.device]]:
    """Return identity of a module -> the devices on which it, or what is in it, computes."""
    devices = {id(module): set[torch.device]() for module in model.modules()}
    for slot in slots:
        if slot.home is not None:
            devices[id(slot.module)].add(slot.device)

    def collect(module: nn.Module) -> set[torch.device]:
        devices[id(module)].update(*(collect(child) for child in module.children()))
        return devices[id(module)]

    collect(model)
    return devices


def _device_changes(
    name: str, module: nn.Module, devices: dict[int, set[torch.device]], named: dict[str, torch.device]
) -> Iterator[tuple[str, torch.device]]:
    """Return (name, device) of the modules at which execution changes device.

    These are the largest modules that compute on one device each, and those that the map names.
    """
    device = next(iter(devices[id(module)]), named.get(name))
    if device is not None and len(devices[id(module)]) < 2 and is_callable(module):
        yield name, device
    else:
        for key, child in module.named_children():
            yield from _device_changes(f"{name}.{key}" if name else key, child, devices, named)


# --------------------------------------------------------------------------------------------- inner hooks

# The hooks of modules inside of a block, or of a resident part, have nothing to do while a module around them
# runs. ``torch.compile`` traces these functions into its graphs, and none of the files that move weights.


def attach_inner_hook(module: Any, hook: DispatchHook) -> None:
    """Attach the hook of a module inside of a block, or of a resident part of the model.

    It works when the module is called alone: by the user, by activation checkpointing inside a block, which
    recomputes in the backward pass, or by a program that runs parts of a model itself.
    """
    hook.is_inner = True
    show_hook(module, hook)
    if attributes_of(module).get("_hf_hook") is not hook or not is_callable(module):
        return
    module.forward = functools.update_wrapper(InnerForward(_inner_forward, module), module._old_forward)


def _call_old_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward that a program may have replaced. It is read each time."""
    return module._old_forward(*args, **kwargs)


def _inner_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module that has an inner hook. The hook and the forward are read each time."""
    hook = module._hf_hook
    # A compiler that traces it is inside of a module around it.
    if type(hook) is DispatchHook and (
        torch.compiler.is_compiling() or hook.is_prepared(*args, *kwargs.values())
    ):
        return module._old_forward(*args, **kwargs)
    return _dispatched_forward(module, *args, **kwargs)
