"""Puts every tensor of a model where the device map says, and attaches what brings them together again.

Tensors on an accelerator stay there. Those on the CPU or on disk stay where they are, mapped from their
files, if the model computes on the CPU; if it computes on an accelerator, they are offloaded in blocks, which
a pager brings in turn.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from accelerate.core.errors import DeviceError
from accelerate.offload.align import Keys
from accelerate.offload.block import Block, is_callable, moved
from accelerate.offload.crossing import Crossing
from accelerate.offload.dispatched import DispatchedHook, attach, mark, watch
from accelerate.offload.folder import PrefixedDataset
from accelerate.offload.pager import Pager
from accelerate.offload.pages import HostMemory, Page
from accelerate.offload.source import HostSource, Source
from accelerate.offload.tensor import OffloadedTensor, offloaded
from accelerate.offload.values import Values, real

CPU = torch.device("cpu")
BLOCK = 2**27  # bytes: the most that a block takes, unless one weight is larger
Home = torch.device | Literal["cpu", "disk"]


@dataclass(eq=False)
class Place:
    """One tensor in one module.

    Attributes:
        name: its full name.
        table, key: where it stands.
        home: where the device map puts it; None leaves it where it is.
        device: where its module computes.
    """

    name: str
    module: nn.Module
    table: dict[str, Any]
    key: str
    home: Home | None
    device: torch.device

    @property
    def tensor(self) -> torch.Tensor:
        """What stands there now."""
        return self.table[self.key]

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.table is self.module._buffers


@dataclass
class Options:
    """What the caller asked for beside the homes.

    Attributes:
        main: where what is on the CPU or on disk computes, and where inputs go.
        offload_buffers: offload the buffers of the state dict as well.
        skip_keys: names of arguments that are not moved.
        whole: names of classes whose modules are brought as one.
        force: attach hooks also where nothing has to be moved.
        named: names of modules that the device map names, with their devices.
    """

    main: torch.device
    offload_buffers: bool = False
    skip_keys: Keys = None
    whole: Sequence[str] = ()
    force: bool = False
    named: dict[str, torch.device] = field(default_factory=dict[str, torch.device])


def places_of(model: nn.Module, home: Callable[[str], Home | None], main: torch.device) -> list[Place]:
    """Every parameter and buffer of a model, with its home."""
    places: list[Place] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    where = home(prefix + key)
                    device = where if isinstance(where, torch.device) else main
                    places.append(Place(prefix + key, module, table, key, where, device))
    return places


# ------------------------------------------------------------------------------------------------ on the CPU


def settle(places: Sequence[Place], values: Values, options: Options) -> None:
    """Gives tensors that compute on the CPU their values: in memory, or mapped from files.

    Buffers that are in memory stay there, like those that would stay on an accelerator.

    Raises:
        PrepareError: an offload folder is needed.
        OffloadError: a file is gone, or cannot be written.
    """
    places = [p for p in places if not (_keeps(p, options) and _is_there(p.tensor, CPU))]
    disk = {p.name: p.tensor for p in places if p.home == "disk"}
    values.write({name: disk[name] for name in values.to_write(disk)})
    made: dict[int, torch.Tensor] = {}
    for place in places:
        old = place.tensor
        if place.home is None or (place.home != "disk" and _is_there(old, CPU)):
            continue
        if id(old) not in made:
            on_disk = place.home == "disk"
            source = values.in_files(place.name, old) if on_disk else values.source(place.name, old)
            made[id(old)] = _on_cpu(old, source)
        place.table[place.key] = made[id(old)]


def _on_cpu(old: torch.Tensor, source: Source) -> torch.Tensor:
    """The tensor with the values of ``source``; a parameter that has memory stays the same object."""
    if getattr(old, "_mapped_from", (None,))[0] is source:
        return old
    made = real(old, source.host(), source)
    if isinstance(old, nn.Parameter) and type(old) is nn.Parameter and _is_there(old, CPU):
        old.data = made.data
        if hasattr(made, "_mapped_from"):
            old._mapped_from = (source, old._version)  # pyright: ignore[reportAttributeAccessIssue]
        return old
    return made


def _is_there(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and not isinstance(tensor, OffloadedTensor)


# ---------------------------------------------------------------------------------------- on accelerators


def place_residents(places: Sequence[Place], values: Values, options: Options) -> None:
    """Puts on its device what stays there: what the map says, and buffers of what is offloaded."""
    stays = _stays(places, options)
    resident = {(id(p.tensor), p.device) for p in places if isinstance(p.home, torch.device)}
    made: dict[tuple[int, torch.device], torch.Tensor] = {}
    kept: dict[int, torch.Tensor] = {}  # the first of several copies is the same parameter, if it can be
    for place in places:
        old = place.tensor
        key = id(old), place.device
        if place.home is None or (place.home in ("cpu", "disk") and key not in stays):
            continue
        if key not in made:
            made[key] = _on_device(place, old, values, first=id(old) not in kept)
            kept[id(old)] = old
            if key not in resident:
                made[key]._belongs = CPU  # pyright: ignore[reportAttributeAccessIssue]
        place.table[place.key] = made[key]


def _on_device(place: Place, old: torch.Tensor, values: Values, first: bool) -> torch.Tensor:
    if _is_there(old, place.device):
        return old
    if old.is_meta or isinstance(old, OffloadedTensor):
        return real(old, values.source(place.name, old, disk=True).read(place.device))
    return moved(old, place.device) if first else real(old, old.detach().to(place.device))


def _stays(places: Sequence[Place], options: Options) -> set[tuple[int, torch.device]]:
    """Tensors of offloaded modules that are on the device all the time.

    Buffers, unless they are to be offloaded and a state dict has them; what is tied to a tensor that is
    there; what is trained beside frozen weights (adapters), as long as it is small; what is no plain array.
    """
    resident = {(id(p.tensor), p.device) for p in places if isinstance(p.home, torch.device)}
    paged = [p for p in places if p.home in ("cpu", "disk") and p.device.type != "cpu"]
    trained = [p for p in paged if not p.is_buffer and p.tensor.requires_grad]
    frozen = any(not p.is_buffer and not p.tensor.requires_grad for p in paged)
    if frozen and sum(p.tensor.nbytes for p in trained) <= BLOCK:
        resident |= {(id(p.tensor), p.device) for p in trained}
    for p in paged:
        if _keeps(p, options) or p.tensor.layout != torch.strided or p.tensor.is_quantized:
            resident.add((id(p.tensor), p.device))
    return resident


def _keeps(place: Place, options: Options) -> bool:
    """Whether it is a buffer that is not offloaded with the weights of its module."""
    lasting = place.key not in place.module._non_persistent_buffers_set
    return place.is_buffer and not (options.offload_buffers and lasting)


def put_stand_ins(places: Sequence[Place], values: Values) -> list[Place]:
    """Offloads what is left: puts stand-ins in the places of the tensors.

    Returns:
        Those places.
    """
    paged = [p for p in places if p.home in ("cpu", "disk") and not _is_there(p.tensor, p.device)]
    disk = {p.name: p.tensor for p in paged if p.home == "disk"}
    values.write({name: disk[name] for name in values.to_write(disk)})
    made: dict[tuple[int, torch.device], OffloadedTensor] = {}
    for place in paged:
        old = place.tensor
        key = id(old), place.device
        if key not in made:
            if place.home == "disk":
                source = values.in_files(place.name, old)
            else:
                source = HostSource(place.name, values.source(place.name, old).host().detach())
            made[key] = offloaded(old, source, place.device)
        place.table[place.key] = made[key]
    return paged


def make_blocks(model: nn.Module, pager: Pager, paged: Sequence[Place], options: Options) -> dict[str, Block]:
    """The blocks of a model: the largest modules that can be called and are not too large.

    Returns:
        Name of the module -> block, in the order of definition.
    """
    sizes = _Sizes(model, paged)
    limit = max(sizes.largest, min(BLOCK, _room(pager)))
    blocks = {
        name: Block(name, m, whole, pager) for name, m, whole in sizes.divide(model, limit, options.whole)
    }
    found = {name: block.stand_ins() for name, block in blocks.items()}
    counts = Counter(id(stand_in) for each in found.values() for stand_in in each)
    shared: dict[int, Page] = {}
    for each in found.values():
        shared.update(
            {id(s): Page([s], shared=True) for s in each if counts[id(s)] > 1 and id(s) not in shared}
        )
    pager.memory = HostMemory(pager.driver, sum(t.source.nbytes for t in sizes.tensors.values()))
    for name, block in blocks.items():
        block.make_pages(found[name], shared)
    pager.blocks = list(blocks.values())
    for block, following in zip(pager.blocks, pager.blocks[1:], strict=False):
        block.following = following
    return blocks


def _room(pager: Pager) -> int:
    """A quarter of what the device has free: two blocks are there at a time, and half is for the rest."""
    pager.driver.empty_cache()
    try:
        return pager.driver.memory(pager.device.index)[0] // 4
    except DeviceError:  # it does not tell
        return BLOCK


class _Sizes:
    """Offloaded bytes of the modules of a model."""

    def __init__(self, model: nn.Module, paged: Sequence[Place]) -> None:
        self.model = model
        self.tensors: dict[int, OffloadedTensor] = {
            id(p.tensor): p.tensor for p in paged if isinstance(p.tensor, OffloadedTensor)
        }
        self.largest = max((t.source.nbytes for t in self.tensors.values()), default=0)
        self._below: dict[int, frozenset[int]] = {}

    def ids(self, module: nn.Module) -> frozenset[int]:
        """The offloaded tensors in a module."""
        if id(module) not in self._below:
            own = {
                id(t)
                for t in (*module._parameters.values(), *module._buffers.values())
                if id(t) in self.tensors
            }
            children = [self.ids(child) for child in module.children()]
            self._below[id(module)] = frozenset(own).union(*children)
        return self._below[id(module)]

    def bytes(self, module: nn.Module) -> int:
        """Their bytes, each tensor counted once."""
        return sum(self.tensors[key].source.nbytes for key in self.ids(module))

    def divide(
        self, model: nn.Module, limit: int, whole: Sequence[str]
    ) -> Iterator[tuple[str, nn.Module, bool]]:
        """(name, module, whether it is whole) of each block.

        The model itself is not whole, unless it has no parts: programs call them.
        """
        seen: set[int] = set()

        def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
            if id(module) in seen or not self.ids(module):
                return
            seen.add(id(module))
            inner = [(key, c) for key, c in module._modules.items() if c is not None and self.ids(c)]
            # What only wraps another module may be passed by: its users call the one inside.
            asked = type(module).__name__ in whole
            wraps = len(inner) == 1 and is_callable(inner[0][1]) and not asked and not self._own(module)
            can = is_callable(module) and not wraps and (module is not model or not inner)
            if can and (not inner or asked or self.bytes(module) <= limit):
                yield name, module, True
                return
            if is_callable(module) and self._own(module):
                yield name, module, False
            for key, child in inner:
                yield from visit(f"{name}.{key}" if name else key, child)

        yield from visit("", model)

    def _own(self, module: nn.Module) -> bool:
        """Whether a module, or a list of it, holds offloaded tensors itself."""
        tables = (*module._parameters.values(), *module._buffers.values())
        if any(id(tensor) in self.tensors for tensor in tables):
            return True
        return any(not is_callable(child) and self._own(child) for child in module.children())


# ------------------------------------------------------------------------------------------------ hooks


def attach_all(
    model: nn.Module,
    places: Sequence[Place],
    blocks: dict[str, Block],
    pager: Pager | None,
    values: Values,
    options: Options,
) -> None:
    """Hooks on the model, where execution changes device, around blocks, and on what is offloaded."""
    devices = {p.device for p in places if p.home is not None} or {options.main}
    crossing = Crossing({d for d in devices if d.type != "cpu"} | {options.main})
    entries = dict(_entries(model, places, options)) if len(devices) > 1 else {}
    modules = dict(model.named_modules())
    around = _around(modules, blocks)
    for name, block in blocks.items():
        for key, stand_in in _named(block, modules, name):
            if stand_in.source.in_memory:
                values.in_memory[key] = stand_in.source.host()
    loader = values.refreshed()
    for name, module in modules.items():
        if not name or name in entries or name in around:
            hook = _hook(name, module, loader, options, entries.get(name, options.main))
            hook._crossing, hook._root = crossing, not name
            hook.io_same_device = not name
            hook._pager, hook.block = (pager, blocks.get(name)) if name in around else (None, None)
            attach(module, hook)
        elif _holds_offloaded(module):
            mark(module, _hook(name, module, loader, options, options.main))
    watch(model)


def _named(block: Block, modules: dict[str, nn.Module], name: str) -> Iterator[tuple[str, OffloadedTensor]]:
    """(full name, stand-in) of everything in a block."""
    for path, module in modules.items():
        if path == name or path.startswith(f"{name}.") or not name:
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if isinstance(tensor, OffloadedTensor):
                        yield (f"{path}.{key}" if path else key), tensor


def _around(modules: dict[str, nn.Module], blocks: dict[str, Block]) -> set[str]:
    """The modules of blocks, and those around them whose forward can be called."""
    found = set(blocks)
    for name in blocks:
        while name:
            name = name.rpartition(".")[0]
            if is_callable(modules[name]):
                found.add(name)
    return found


def _holds_offloaded(module: nn.Module) -> bool:
    tables = (*module._parameters.values(), *module._buffers.values())
    return any(isinstance(tensor, OffloadedTensor) for tensor in tables)


def _hook(
    name: str, module: nn.Module, loader: Any, options: Options, device: torch.device
) -> DispatchedHook:
    offload = _holds_offloaded(module)
    return DispatchedHook(
        device,
        offload=offload,
        weights_map=PrefixedDataset(loader, f"{name}." if name else "") if offload else None,
        offload_buffers=options.offload_buffers,
        skip_keys=options.skip_keys,
    )


def _entries(
    model: nn.Module, places: Sequence[Place], options: Options
) -> Iterator[tuple[str, torch.device]]:
    """Name and device of the modules at which execution comes to another device.

    These are the largest modules that compute on one device each, and those that the map names.
    """
    devices: dict[int, set[torch.device]] = {}
    for place in places:
        if place.home is not None:
            devices.setdefault(id(place.module), set()).add(place.device)

    def below(module: nn.Module) -> set[torch.device]:
        return devices.get(id(module), set()).union(*(below(child) for child in module.children()))

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, torch.device]]:
        found = below(module)
        if len(found) == 1 and is_callable(module):
            yield name, next(iter(found))
            return
        if not found and name in options.named and is_callable(module):
            yield name, options.named[name]
            return
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)

    yield from visit("", model)
