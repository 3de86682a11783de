"""Wraps a model, part by part, so that no process holds more than one whole part at a time.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
(arXiv:2304.11277), and ``torch.distributed.fsdp.FullyShardedDataParallel``, which does the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from accelerate.core.errors import PrepareError
from accelerate.strategy.fsdp1.flat import walk
from accelerate.strategy.fsdp1.record import Record
from accelerate.strategy.sharding.layout import Layout, digest, divide, unequal
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.strategy.sharding.shard import recompute
from accelerate.world import collective

# The attribute of torch's wrapper that holds what is known of the model.
_RECORD = "_accelerate_record"
Initialize = Callable[[nn.Module], None]


@dataclass(frozen=True)
class FlatLayout(Layout):
    """How one model will be wrapped.

    Attributes:
        parts: the modules that are gathered by themselves, inner ones first, the model last; with the
            parameters of each.
        widened: parameters in half precision that become float32: all of a part that trains.
        numel: elements of all parameters in the parts; wrapping empties them.
    """

    parts: list[tuple[nn.Module, list[nn.Parameter]]]
    widened: set[nn.Parameter]
    numel: int

    def widens(self, parameter: Any) -> bool:
        """Frozen ones too: the parameters of a part are joined into one."""
        return parameter in self.widened

    def piece(self, parameter: nn.Parameter, size: int) -> int:
        """Cut anywhere."""
        return -(-parameter.numel() // size)


def layout_of(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: MixedPrecision | None
) -> FlatLayout:
    """How ``model`` will be wrapped; changes nothing.

    Raises:
        SettingError, PrepareError: the model cannot be wrapped so.
    """
    base = divide(model, plugin, precision)
    done: set[nn.Parameter] = set(base.ignored)
    parts: list[tuple[nn.Module, list[nn.Parameter]]] = []
    widened: set[nn.Parameter] = set()
    names = {p: name for name, p in model.named_parameters()}
    for part in (*base.blocks, model):
        own = [p for p in part.parameters() if p not in done]
        done.update(own)
        parts.append((part, own))
        if base.upcast and any(p.requires_grad for p in own):
            widened |= {p for p in own if p.is_floating_point() and p.dtype.itemsize == 2}
        _check(own, widened, names, bool(plugin.use_orig_params))
    numel = sum(p.numel() for _, own in parts for p in own)
    return FlatLayout(**vars(base), parts=parts, widened=widened, numel=numel)


def _check(
    own: list[nn.Parameter], widened: set[nn.Parameter], names: dict[nn.Parameter, str], originals: bool
) -> None:
    """One flat parameter has one type, and trains or does not.

    Raises:
        PrepareError: names the parameters.
    """
    types: dict[torch.dtype, str] = {}
    for parameter in own:
        types.setdefault(torch.float32 if parameter in widened else parameter.dtype, names[parameter])
    if len(types) > 1:
        said = ", ".join(f"{name} in {dtype}" for dtype, name in types.items())
        raise PrepareError(
            f"parameters of several types in one sharded part: {said}",
            why="version 1 joins the parameters of a part into one, frozen ones too",
            fix="bring them to one type, name the frozen part in ignored_modules, or use fsdp_version=2",
        )
    trained = {p.requires_grad: names[p] for p in reversed(own)}
    if not originals and len(trained) > 1:
        raise PrepareError(
            f"{trained[True]} trains and {trained[False]} is frozen, in one sharded part",
            why="with use_orig_params=False the parameters of a part are one parameter",
            fix="use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)",
        )


class Wrapper:
    """Wraps models over a mesh.

    Args:
        mesh: the processes; of two dimensions where there are copies of the shards.
        plugin: how.
        strategy: how parameters are shared.
        device: where this process computes.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plugin: FullyShardedDataParallelPlugin,
        strategy: ShardingStrategy,
        device: torch.device,
    ) -> None:
        self.mesh, self.plugin, self.strategy, self.device = mesh, plugin, strategy, device

    def wrap(self, model: nn.Module, layout: FlatLayout) -> tuple[Record, list[Any]]:
        """Wraps ``model``; afterwards it has the weights of rank 0 on all ranks.

        Returns:
            What is known of it; and (old, (new, stand-in or None)) of the parameters that were replaced.
        """
        plugin = self.plugin
        initialize = _agree(model, plugin.param_init_fn)
        order, formats = list(model.state_dict()), {n: b.dtype for n, b in model.named_buffers()}
        names = {p: name for name, p in model.named_parameters()}
        if plugin.activation_checkpointing:
            recompute(model, layout.blocks)
        parents = _parents(model)
        brought: dict[torch.Tensor, torch.Tensor] = {}
        done: set[nn.Module] = set()
        wrapped: nn.Module = model
        for part, parameters in layout.parts:
            own = [m for _, m in walk(part) if m not in done]
            done.update(own)
            self._bring(own, layout, brought, initialize)
            wrapped = self._wrapped(part, layout)
            if not plugin.use_orig_params:
                # Optimizers may hold them still: their memory goes now, not when these follow.
                for parameter in parameters:
                    parameter.data = parameter.data.new_empty(0)
            for parent, name in parents.get(part, ()):
                parent._modules[name] = wrapped
        record = Record(wrapped, self.mesh, order, formats)
        wrapped.__dict__[_RECORD] = record
        _meet(wrapped)
        flats = {
            n: (unit.flat, slot.stand_in) for unit in record.units for slot in unit.slots for n in slot.names
        }
        renewed: list[tuple[torch.Tensor, tuple[torch.Tensor, Any]]] = []
        for old, name in names.items():
            new, stand_in = brought.get(old, old), None
            if not plugin.use_orig_params and name in flats:
                new, stand_in = flats[name]
            if new is not old:
                renewed.append((old, (new, stand_in)))
        _verify(record, layout)
        return record, renewed

    def _wrapped(self, part: nn.Module, layout: FlatLayout) -> nn.Module:
        plugin = self.plugin
        with warnings.catch_warnings():
            # It was asked for by name, and is what replicas do.
            warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
            return FullyShardedDataParallel(
                part,
                device_mesh=self.mesh,
                sharding_strategy=self.strategy,
                # On the host there is nothing to be taken there.
                cpu_offload=CPUOffload(plugin.offloads and self.device.type != "cpu"),
                backward_prefetch=plugin.backward_prefetch,
                forward_prefetch=plugin.forward_prefetch,
                mixed_precision=layout.precision,
                ignored_states=layout.ignored or None,
                device_id=self.device,
                limit_all_gathers=plugin.limit_all_gathers,
                use_orig_params=bool(plugin.use_orig_params),
            )

    @torch.no_grad()
    def _bring(
        self,
        modules: list[nn.Module],
        layout: FlatLayout,
        brought: dict[torch.Tensor, torch.Tensor],
        initialize: Initialize | None,
    ) -> None:
        """Brings a part to the device with the values of rank 0; a tensor in several places stays one."""
        for module in modules:
            empty = False
            tables: Any = (module._parameters, module._buffers)
            for table in tables:
                for name, old in table.items():
                    if old is None:
                        continue
                    empty = empty or old.is_meta
                    if old not in brought:
                        brought[old] = layout.brought(old, self.device)
                    table[name] = brought[old]
            if empty and initialize is not None:
                initialize(module)
        every = (table for m in modules for table in (m._parameters, m._buffers))
        fresh = {id(t): t for table in every for t in table.values() if t is not None}
        if self.plugin.sync_module_states:
            for tensor in fresh.values():
                _broadcast(tensor.data)
        else:
            _same(fresh.values())


def _agree(model: nn.Module, initialize: Initialize | None) -> Initialize | None:
    """Refuses models that differ between ranks by more than their values, and those without any.

    Returns:
        ``initialize`` where it is needed: rank 0 has no values either.

    Raises:
        PrepareError: on all ranks.
    """
    empty = next((name for name, p in model.named_parameters() if p.is_meta), "")
    every = collective.all_objects((digest(model), empty), "prepare(model)")
    other = [rank for rank, found in enumerate(every) if found[0] != every[0][0]]
    if other:
        raise unequal(model, other[0], 0)
    if every[0][1] and initialize is None:
        raise PrepareError(
            f"the parameter {every[0][1]} is on the meta device, on rank 0 too",
            why="the weights of rank 0 are those that all processes get a part of",
            fix="load the weights on rank 0, or give the plugin a param_init_fn",
        )
    return initialize if every[0][1] else None


def _parents(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Where each module stands."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                found.setdefault(child, []).append((module, name))
    return found


def _broadcast(tensor: torch.Tensor) -> None:
    whole = tensor.contiguous()
    dist.broadcast(whole, src=0)
    if whole is not tensor:
        tensor.copy_(whole)


def _same(tensors: Iterable[torch.Tensor]) -> None:
    """Refuses values that differ between ranks: nobody would bring them together.

    Raises:
        PrepareError: on all ranks.
    """
    sums = [tensor.double().sum().item() for tensor in tensors]
    every = collective.all_objects(sums, "prepare(model) with sync_module_states=False")
    other = [rank for rank, found in enumerate(every) if found != every[0]]
    if other:
        raise PrepareError(
            f"sync_module_states=False, and the weights of rank {other[0]} are not those of rank 0",
            why="every process keeps its own part, so the model would be a mixture",
            fix="leave sync_module_states out: all begin with the weights of rank 0",
        )


def _meet(root: nn.Module) -> None:
    """Where not all ranks call ``root.state_dict()``, which gathers, that is an error and no endless wait."""

    def meet(*_: Any) -> None:
        collective.all_objects(None, "model.state_dict()")

    handle = root.register_state_dict_pre_hook(meet)
    # Torch's own comes first otherwise, and that is where it gathers.
    hooks: Any = root._state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)


def _verify(record: Record, layout: FlatLayout) -> None:
    """Looks at what has come out: everything is wrapped, and rests in the type that was said.

    Raises:
        PrepareError: a parameter is not as it was said; an error of this package.
    """
    for unit in record.units:
        trains = unit.flat.requires_grad
        if layout.widened and trains and unit.flat.dtype.itemsize == 2:
            raise PrepareError(f"{unit.slots[0].names[0]} was not widened as planned: {unit.flat.dtype}")
    wrapped = sum(slot.numel for unit in record.units for slot in unit.slots)
    if wrapped != layout.numel:
        raise PrepareError(
            f"{wrapped} elements of parameters were wrapped, and not {layout.numel} as planned"
        )


def record_of(model: Any) -> Record | None:
    """What is known of a wrapped model, None for any other."""
    return getattr(model, "__dict__", {}).get(_RECORD)


def is_wrapped(model: nn.Module) -> bool:
    """Whether ``model`` is an object of torch's class."""
    return isinstance(model, FullyShardedDataParallel)


def sharded(model: nn.Module) -> Iterator[FullyShardedDataParallel]:
    """Torch's modules in a wrapped model."""
    return (part for part in model.modules() if isinstance(part, FullyShardedDataParallel))
