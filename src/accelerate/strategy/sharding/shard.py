"""Shards a model in place, part by part, so that no process holds more than one whole part at a time.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
(arXiv:2304.11277), and ``torch.distributed.fsdp.fully_shard``, which does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError
from accelerate.strategy.sharding.activations import keep_on_host, leave_cache_out
from accelerate.strategy.sharding.layout import Layout, digest, divide, unequal
from accelerate.strategy.sharding.load import Told, Values, marks, unlike
from accelerate.strategy.sharding.load_packed import check_packed
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.strategy.sharding.whole import distributed, guard
from accelerate.world import collective


def layout_of(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: MixedPrecisionPolicy | None
) -> Layout:
    """How ``model`` will be sharded; changes nothing.

    Raises:
        SettingError, PrepareError: the model cannot be sharded so.
    """
    layout = divide(model, plugin, precision or MixedPrecisionPolicy())
    check_packed(model, layout.precision.param_dtype)
    return layout


class Sharder:
    """Shards models over a mesh, and keeps optimizers on the parameters.

    The mesh may be a part of a greater one: processes outside of it hold other parts of the same parameters
    (tensor parallelism), or other parameters (stages of a pipeline).

    Args:
        mesh: the processes that share parameters: in one dimension, or copies of shards in two.
        plugin: how.
        device: where this process computes.
        alike: more meshes of one dimension, whose processes have the same parameters as long as these are
            not distributed.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plugin: FullyShardedDataParallelPlugin,
        device: torch.device,
        alike: Sequence[DeviceMesh] = (),
    ) -> None:
        self.mesh, self.plugin, self.device = mesh, plugin, device
        self.alike = tuple(alike)

    @property
    def offload(self) -> OffloadPolicy:
        """Pinned memory is memory of an accelerator's driver: there is none without one."""
        given = self.plugin.cpu_offload
        if isinstance(given, CPUOffloadPolicy) and self.device.type == "cpu":
            return CPUOffloadPolicy(pin_memory=False)
        return given

    def shard(self, model: nn.Module, layout: Layout, optimizers: Iterable[Any], follow: Follow) -> None:
        """Shards ``model``; afterwards all processes of the mesh have the weights of its first.

        Args:
            model: the model; its parameters may be on the meta device (on the first process of the mesh too:
                then their values come later), or mapped from files. Those that are distributed tensors are
                cut further.
            layout: how.
            optimizers: those that may hold its parameters.
            follow: is told which parameters took the place of which.
        """
        initialize, values = agree(model, self.plugin.param_init_fn, self.mesh)
        if self.plugin.activation_checkpointing:
            recompute(model, layout.blocks, bool(self.plugin.activation_checkpointing_offload))
        done: set[nn.Module] = set()
        buffers: Any = WeakIdKeyDictionary()
        held = list(optimizers)
        for part in (*layout.blocks, model):
            own = [module for module in part.modules() if module not in done]
            done.update(own)
            before = {(m, n): p for m in own for n, p in m._parameters.items() if p is not None}
            # A parameter has all of its places in one part; whole ones are freed with the part.
            self._bring(own, layout, (WeakIdKeyDictionary(), buffers), initialize, values)
            self._same(own, values)
            waiting = values.waiting(own)
            fully_shard(
                part,
                mesh=self.mesh,
                mp_policy=_inner(layout.precision, part is model),
                offload_policy=self.offload,
                **self._options(part is model, layout.ignored),
            )
            values.fill(part, waiting)
            follow(_renewed(before), held)
            # The whole parameters are freed here: nobody holds them any more.
            del before
        gather_ahead(model, *self.plugin._ahead)
        guard(model)
        values.watch(model)
        verify(model, layout)

    def _options(self, root: bool, ignored: set[nn.Parameter]) -> dict[str, Any]:
        """What is said only where it differs: older versions of torch do not know all of it."""
        options: dict[str, Any] = {"ignored_params": ignored} if ignored else {}
        # By default the root keeps its parameters after the forward: the backward needs them first.
        if not root or not self.plugin.reshard_after_forward:
            options["reshard_after_forward"] = self.plugin.reshard_after_forward
        return options

    def _bring(
        self,
        modules: list[nn.Module],
        layout: Layout,
        brought: tuple[Any, Any],
        initialize: Initialize | None,
        values: Values,
    ) -> None:
        """Brings a part to the device, in the type it trains in; a tensor in several places stays one.

        What is on the meta device gets memory. Some devices cannot swap a tensor's data: its place is taken
        by a new one, which ``brought`` keeps by the old one.
        """
        for module in modules:
            empty = False
            for table, known in zip((module._parameters, module._buffers), brought, strict=True):
                for name, old in table.items():
                    if old is None:
                        continue
                    empty = empty or old.is_meta
                    if old not in known:
                        known[old] = self._brought(old, layout, values)
                    table[name] = known[old]
            if empty and initialize is not None:
                initialize(module)

    def _brought(self, old: torch.Tensor, layout: Layout, values: Values) -> torch.Tensor:
        whole = old in layout.ignored or not isinstance(old, nn.Parameter)
        stand_in = values.stand_in(old, layout.dtype_of(old), self.device, whole=whole)
        return layout.brought(old, self.device) if stand_in is None else layout.instead(old, stand_in)

    def _same(self, modules: list[nn.Module], values: Values) -> None:
        """Gives a part the values of the first process."""
        found = [t for m in modules for table in (m._parameters, m._buffers) for t in table.values()]
        for tensor in {id(t): t for t in found if t is not None and values.travels(t)}.values():
            if not isinstance(tensor, DTensor):
                for mesh in self.alike:
                    spread(tensor.data, mesh)
            spread(local(tensor), self.mesh)


Initialize = Callable[[nn.Module], None]
Follow = Callable[[Mapping[int, tuple[torch.Tensor, torch.Tensor]], list[Optimizer]], None]


def _inner(policy: MixedPrecisionPolicy, root: bool) -> MixedPrecisionPolicy:
    """Only the root has an output that leaves the model: inside, the next block expects what it computes."""
    if root or policy.output_dtype is None:
        return policy
    return MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=policy.cast_forward_inputs
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What is here of a tensor, without its gradient."""
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def spread(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Gives all processes of ``mesh`` the values of its first, in place."""
    whole = tensor.contiguous()
    for axis in range(mesh.ndim):
        # Along the outer dimensions only those need them who pass them on.
        if all(mesh.get_local_rank(inner) == 0 for inner in range(axis + 1, mesh.ndim)):
            group = mesh.get_group(axis)
            if dist.get_world_size(group) > 1:
                dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
    if whole is not tensor:
        tensor.copy_(whole)


def _renewed(
    before: Mapping[tuple[nn.Module, str], torch.Tensor],
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(old, new) of every parameter that was replaced, by ``id`` of the old one."""
    pairs = ((old, module._parameters[name]) for (module, name), old in before.items())
    return {id(old): (old, new) for old, new in pairs if new is not None and new is not old}


def agree(
    model: nn.Module, initialize: Initialize | None, mesh: DeviceMesh
) -> tuple[Initialize | None, Values]:
    """Refuses models that differ between processes by more than their values.

    Processes of another mesh may have other parameters: another stage of a pipeline.

    Args:
        model: the model.
        initialize: fills a module that has no values on the first process of its mesh.
        mesh: the processes that share this one's parameters.

    Returns:
        (``initialize`` where it is needed: the first process has no values either; where the values come
        from)

    Raises:
        PrepareError: on all ranks, whichever mesh it is about.
    """
    bare = any(p.is_meta for p in model.parameters())
    first = int(mesh.mesh.flatten()[0])
    found = collective.all_objects((Told(digest(model), first, marks(model)), bare), "prepare(model)")
    if len(found) == 1:  # a rehearsal: the others are not there, and no values are needed
        return None, Values(model)
    every: list[Told] = [told for told, _ in found]
    other = [rank for rank, told in enumerate(every) if told.digest != every[told.leader].digest]
    if other:
        raise unequal(model, other[0], every[other[0]].leader)
    empty = unlike(every)
    if empty is not None and initialize is None:
        raise PrepareError(
            f"parameters of the {type(model).__name__} are on the meta device on rank {empty}",
            why=f"others get a part of the weights of rank {empty}, and ranks beside it have some",
            fix=f"load the weights on rank {empty} too, or give the plugin a param_init_fn",
        )
    needed = initialize if found[first][1] else None
    return needed, Values(model, every, collective.rank(), initialized=needed is not None)


def recompute(model: nn.Module, blocks: list[nn.Module], offload: bool = False) -> None:
    """Computes the activations of each block again in the backward; names stay as they are.

    Args:
        model: around the blocks; it fills no cache of keys and values while it trains.
        blocks: which; one inside another is left out.
        offload: what is kept of each, its inputs, waits for the backward on the host.

    Raises:
        PrepareError: there is no block.
    """
    from torch.distributed._composable.checkpoint_activation import checkpoint

    if not blocks:
        raise PrepareError(
            "activation_checkpointing, but no part of the model is wrapped by itself",
            why="the activations of each wrapped part are computed again in the backward",
            fix="set auto_wrap_policy, for example 'transformer_based_wrap'",
        )
    inside = {part for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if block not in inside:
            if offload:
                keep_on_host(block)
            checkpoint(block)
    leave_cache_out(model)


def gather_ahead(model: nn.Module, forward: bool, backward: bool) -> None:
    """Which parts are gathered before they are needed.

    Torch's default in the forward is to let the device's queue run ahead, and in the backward to gather the
    part before the one that computes.

    Args:
        model: sharded.
        forward: each part asks for the next one before it computes, by the order of the modules.
        backward: as torch does it; False gathers each part when its own backward begins.
    """
    parts: list[Any] = [part for part in model.modules() if isinstance(part, FSDPModule)]
    if forward:
        for part, following in pairwise(parts):
            part.set_modules_to_forward_prefetch([following])
    if not backward:
        for part in parts:
            # The part itself is there already: nothing is gathered ahead.
            part.set_modules_to_backward_prefetch([part])


def follow(renewed: Mapping[int, tuple[torch.Tensor, torch.Tensor]], optimizers: list[Optimizer]) -> None:
    """Makes optimizers hold the sharded parameters, and their part of what they keep for them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for place, old in enumerate(group["params"]):
                if id(old) in renewed:
                    new = renewed[id(old)][1]
                    group["params"][place] = new
                    if old in optimizer.state:
                        optimizer.state[new] = _sharded(optimizer.state.pop(old), new)


def _sharded(state: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """An optimizer's state of one parameter, this process's part of it: that of the first process's."""
    for value in state.values():
        if type(value) is torch.Tensor and value.shape == parameter.shape:
            spread(value, parameter.device_mesh)
    return {name: distributed(value, parameter) for name, value in state.items()}


def verify(model: nn.Module, layout: Layout) -> None:
    """Looks at what has come out: everything is sharded, and trains in the type that was said.

    Raises:
        PrepareError: a parameter is not as it was said; an error of this package.
    """
    for name, parameter in model.named_parameters():
        if parameter in layout.ignored:
            continue
        if not isinstance(parameter, DTensor) or layout.widens(parameter):
            raise PrepareError(
                f"the parameter {name} was not sharded as planned: it is a {type(parameter).__name__} of "
                f"{parameter.dtype}"
            )


def is_sharded(model: nn.Module) -> bool:
    """Whether ``model`` as a whole was sharded."""
    return isinstance(model, FSDPModule)
