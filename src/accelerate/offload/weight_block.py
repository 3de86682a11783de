"""A block: modules whose weights are copied to the device together, for one forward."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate.offload.module_tensors import MaterializedTensor, as_parameter, restore_stand_ins
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    OffloadedTensor,
    OffloadError,
    make_stand_in,
)
from accelerate.offload.pager import Pager
from accelerate.offload.weight_pages import WeightPage, is_movable, split_by_source

Table = dict[str, Any]
# (a table of a module, what it held when the block was read)
TableSnapshot = tuple[Table, tuple[Any, ...]]


def is_callable(module: nn.Module) -> bool:
    """Return True when a module has a forward; lists and dicts of modules have none."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


class WeightBlock:
    """Modules whose weights are copied to the device and dropped together.

    Args:
        name: of the module whose forward they are needed for.
        module: that module.
        whole: all weights in it; otherwise only its own, and those of its lists of modules.
        pager: fetches the weights.

    Attributes:
        pages: the weights, as they are copied.
        users: forwards that are using them now.
        supports_recompute: submodules that run while it is closed fetch the block themselves.
        next_block: the next block in the order of definition.
    """

    def __init__(self, name: str, module: nn.Module, whole: bool, pager: Pager) -> None:
        self.name, self.module, self.whole, self.pager = name, module, whole, pager
        self.pages: list[WeightPage] = []
        self.users = 0
        self.supports_recompute = False
        self.next_block: WeightBlock | None = None
        self._slots: dict[int, list[tuple[nn.Module, str]]] = {}  # by the identity of a stand-in
        self._snapshots: list[TableSnapshot] | None = None
        self._materialized: list[MaterializedTensor] = []

    def __repr__(self) -> str:
        return f"<block {self.name or 'of the model'}, {sum(page.nbytes for page in self.pages)} bytes>"

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightBlock:
        """Return the block of a copied model; its weights are read when it is first used."""
        module, pager = copy.deepcopy(self.module, memo), copy.deepcopy(self.pager, memo)
        twin = memo[id(self)] = WeightBlock(self.name, module, self.whole, pager)
        pager.blocks.append(twin)
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
            seen.append(_snapshot(module._modules))
            for table in (module._parameters, module._buffers):
                stand_ins_here = [(name, t) for name, t in table.items() if isinstance(t, OffloadedTensor)]
                for name, tensor in stand_ins_here:
                    if id(tensor) not in self._slots:
                        collected.append(tensor)
                    self._slots.setdefault(id(tensor), []).append((module, name))
                if stand_ins_here or table is module._parameters:
                    seen.append(_snapshot(table))
        self._snapshots = seen
        return collected

    def make_pages(self, stand_ins: list[OffloadedTensor], shared: dict[int, WeightPage]) -> None:
        """Group the weights into pages, and move those in memory into memory of the pages' own.

        Args:
            stand_ins: the block's weights.
            shared: the pages of those that other blocks have as well, by identity.
        """
        pages_by_key = {page.key: page for page in self.pages}
        unshared = [s for s in stand_ins if id(s) not in shared]
        pages = [WeightPage(group) for group in split_by_source(unshared)]
        self.pages = [pages_by_key.get(page.key, page) for page in pages]
        self.pages += [shared[id(s)] for s in stand_ins if id(s) in shared]
        for page in self.pages:
            if page.host is None and is_movable(page.entries[0].stand_in):
                page.move_to_host(self.pager.memory)

    def refresh(self) -> None:
        """Read the modules and weights again if any of them was replaced."""
        if self._snapshots is not None and all(map(_is_unchanged, self._snapshots)):
            return
        self._offload_new_weights()
        shared = {page.key[0]: page for page in self.pages if page.shared}
        self.make_pages(self.stand_ins(), shared)

    def _offload_new_weights(self) -> None:
        """Offload weights that were added after the model was dispatched, like the others.

        Weights that are trained beside frozen ones (adapters) go to the device and stay.

        Raises:
            OffloadError: one has no values.
        """
        device = self.pager.device
        modules = list(self.modules())
        offloaded = [p for m in modules for p in m._parameters.values() if isinstance(p, OffloadedTensor)]
        frozen = any(not p.requires_grad for p in offloaded)
        replacements: dict[int, Any] = {}
        for module in modules:
            tables: tuple[Table, ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in list(table.items()):
                    if tensor is not None and tensor.is_meta and not _is_mapped(module, name):
                        raise self._no_values_error(tensor)
                    if tensor is None or tensor.device.type != "cpu":
                        continue
                    if id(tensor) not in replacements:
                        replacements[id(tensor)] = (
                            move_tensor(tensor, device)
                            if table is module._buffers or (tensor.requires_grad and frozen)
                            else make_stand_in(
                                tensor, HostMemoryWeightSource(f"{self.name}.{name}", tensor.detach()), device
                            )
                        )
                    table[name] = replacements[id(tensor)]

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
        for entry, view in views:
            stand_in = entry.stand_in
            if isinstance(stand_in, nn.Parameter):
                view = _make_parameter(stand_in, view, gradients)
            self._materialized.append(MaterializedTensor(stand_in, self._slots.get(id(stand_in), ()), view))

    def uninstall(self) -> int:
        """Put the stand-ins back, and write back weights that were changed in place.

        Returns:
            The bytes that were written back.

        Raises:
            OffloadError: values were changed that are stored in a file.
        """
        return restore_stand_ins(self._materialized)


def _is_unchanged(snapshot: TableSnapshot) -> bool:
    table, seen = snapshot
    return len(table) == len(seen) and all(map(operator.is_, table.values(), seen))


def _is_mapped(module: nn.Module, name: str) -> bool:
    """Return True when a hook on the module has the values of its tensor."""
    return name in (getattr(vars(module).get("_hf_hook"), "weights_map", None) or ())


def _snapshot(table: Table) -> TableSnapshot:
    return table, tuple(table.values())


def _make_parameter(stand_in: Any, view: torch.Tensor, gradients: bool) -> torch.Tensor:
    """Return the parameter of the module while its values are on the device."""
    if gradients and stand_in.requires_grad:
        return _GradientRefusal.apply(stand_in, [view])
    if not vars(stand_in).keys() - _STAND_IN_ATTRIBUTES:
        return nn.Parameter(view, requires_grad=False)
    parameter = as_parameter(view, stand_in)
    return parameter.requires_grad_(False)


# The attributes of a stand-in for an ordinary parameter; any other was set by the user.
_STAND_IN_ATTRIBUTES = {"source", "execution_device", "_is_param", "_restored"}


class _GradientRefusal(torch.autograd.Function):
    """The identity, for a weight that is dropped after its forward: its backward is an error."""

    @staticmethod
    def forward(ctx: Any, stand_in: Any, holder: list[torch.Tensor]) -> torch.Tensor:
        """Return the weight; the list hides it from autograd, which keeps arguments."""
        ctx.name = stand_in.source.name
        return holder[0]

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
