"""Tensor parallel: the processes of this dimension share every layer, and see the same data.

A layer cut by columns computes a part of its features, the layer after it, cut by rows, adds up what all have
computed. torch's ``parallelize_module`` does that by hooks around the layers; what is not in the plan stays
whole, on every process alike. Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate import device as devices
from accelerate.core.effects import Effect, Option
from accelerate.core.errors import PrepareError
from accelerate.strategy.base import Bundle, Step
from accelerate.strategy.parallelism.base import Dimension
from accelerate.world import together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.tensor_plan import Found


class Tensor(Dimension):
    """Layers shared by columns and rows."""

    name: ClassVar[str] = "tp"
    spreads: ClassVar[bool] = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._counted = False

    def effects(self) -> Iterator[Effect]:
        """Exchanges are not overlapped with products yet."""
        if getattr(self.config.tp_handler, "enable_async_tp", False):
            yield Option("enable_async_tp", True, "TorchTensorParallelConfig").failed(
                "layers exchange what they have computed, and then the next one computes: nothing overlaps"
            )

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Share the layers of every model that is not shared yet."""
        size = self.config._sizes["tp"]
        found: dict[nn.Module, Found | None] = {}
        for model in dict.fromkeys(bundle.of("model")):
            if model not in self._done:
                found[model] = self._resolved(model, size)
        said = "; ".join(dict.fromkeys(_says(model, plan) for model, plan in found.items()))
        if found:
            reason = f"{size} processes share layers and see the same data: {said}"
            yield Step("tensor", reason, lambda b: self._share(b, found))

    def _resolved(self, model: nn.Module, size: int) -> Found | None:
        """What is to be shared; None for a model whose layers are shared already."""
        from accelerate.strategy.parallelism.tensor_plan import resolve

        shared = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
        if shared is None:
            handler = self.config.tp_handler
            return resolve(model, getattr(handler, "plan", None) or {}, size)
        known = getattr(model, "_tp_size", None) or shared.device_mesh.size(-1)
        if known != size:
            raise PrepareError(
                f"the layers of the {type(model).__name__} are shared by {known} processes already, and "
                f"tp_size is {size}",
                fix=f"ParallelismConfig(tp_size={known}), or load the model whole",
            )
        return None

    def _share(self, bundle: Bundle, found: dict[nn.Module, Found | None]) -> None:
        self._count()
        for model, plan in found.items():
            if plan is not None:
                self._cut(model, plan, bundle)
            else:  # optimizers may hold its parameters, though it is prepared as one that is only evaluated
                self.strategy.models.add(model)
            self._done.add(model)
            _Once(self.mesh[self.name]).attach(model)

    def _count(self) -> None:
        """A process that waits in a layer for one that waits elsewhere is noticed."""
        watch = together.current()
        if watch is None or self._counted or self.strategy._stages:
            return
        self._counted = True
        groups = [mesh[self.name].get_group() for mesh in (self.mesh, self.strategy._plane)]
        for group in {group.group_name: group for group in groups}.values():
            watch.count(group)

    def _cut(self, model: nn.Module, plan: Found, bundle: Bundle) -> None:
        from accelerate.strategy.parallelism.tensor_cut import Cutter
        from accelerate.strategy.sharding.shard import agree

        sharing, plane = self.strategy._shard_mesh, self.strategy._plane
        together = plane[tuple(name for name in plane.mesh_dim_names or () if name != "pp")]
        _, values = agree(model, None, together)
        cutter = Cutter(plane[self.name], sharing, self.world.device, values)
        for part in plan.parts:
            if not vars(part.module).get("_on_another_stage"):
                cutter.cut(part)
        cutter.check(model)
        # What is going to be sharded gets its values then.
        cutter.complete(model, equal=not bundle.training)
        self.follow(cutter.renewed, bundle.of("optimizer"))


def _says(model: nn.Module, plan: Found | None) -> str:
    if plan is None:
        return f"the {type(model).__name__} was loaded so"
    left = f", {', '.join(plan.left)} stay whole" if plan.left else ""
    return f"{len(plan.parts)} layers of the {type(model).__name__}{left}"


class _Once:
    """Before the first training forward the processes of a layer take over the first one's random states.

    What stays whole must be dropped alike on all of them. They draw equally often, so once is enough.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.handle: Any = None

    def attach(self, model: nn.Module) -> None:
        """Calls it before the next forward."""
        self.handle = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or next(module.parameters()).is_meta:
            return
        self.handle.remove()
        found = [devices.get(kind) for kind in dict.fromkeys(("cpu", self.mesh.device_type))]
        states = [device.rng() for device in found]
        group = self.mesh.get_group()
        dist.broadcast_object_list(states, dist.get_global_rank(group, 0), group)
        for device, state in zip(found, states, strict=True):
            device.set_rng(state)
