"""What strategies share that cut parameters, gradients and optimizer state over processes.

Before a block computes, its parameters are gathered, and they are freed afterwards; its gradients are
reduced, and every process keeps its part. torch's ``fully_shard`` does it, in place: the model stays the
user's object, with its names, and its parameters are distributed tensors. The work stands in the
other files of this folder, which are loaded only when such a strategy is chosen: they cost a second of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.effects import Effect
from accelerate.core.errors import PrepareError, SettingError
from accelerate.strategy.base import NOTHING, Bundle, Request, Step, Strategy, leaves
from accelerate.world import collective, together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
    from accelerate.strategy.sharding.shard import Layout, Sharder


class Sharding(Strategy):
    """Parameters, gradients and optimizer state cut over processes."""

    shards: ClassVar[bool] = True

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

        given = next((p for p in request.plugins if isinstance(p, FullyShardedDataParallelPlugin)), None)
        self.plugin: FullyShardedDataParallelPlugin = given or FullyShardedDataParallelPlugin()
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The parameters that are no more, and what took their place: optimizers may still hold them.
        self._renewed: Any = WeakIdKeyDictionary()
        self._keeps_back = False

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """See ``effects.py``."""
        from accelerate.strategy.sharding.effects import effects
        from accelerate.strategy.sharding.plugin import policy_of

        mine = [model for model in models if model in self.models]
        return effects(self.asked(self.request), self.plugin, mine, policy_of(self.request.precision))

    @property
    def plugins(self) -> dict[str, Any]:
        """How it shards."""
        return {"fsdp_plugin": self.plugin}

    # --- over which processes

    @property
    def _grid(self) -> tuple[int, int]:
        """(copies of the model, processes that share each copy's parameters); known before any mesh is made.

        Raises:
            SettingError: the processes cannot be shared out so.
        """
        copies = self.plugin.copies(self.world.size, self.world.nodes)
        return copies, self.world.size // copies

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """The processes that share parameters: in one dimension, or copies of shards in two."""
        from torch.distributed.device_mesh import init_device_mesh

        copies, shards = self._grid
        # A rehearsal has no device.
        kind = "cpu" if self.world.device.type == "meta" else self.world.device.type
        if copies == 1:
            return init_device_mesh(kind, (shards,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(kind, (copies, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    @property
    def mesh(self) -> DeviceMesh | None:
        """Copies of shards are a mesh of two dimensions."""
        return self._shard_mesh if self._grid[0] > 1 else None

    @property
    def _alike(self) -> Sequence[DeviceMesh]:
        """Further meshes of one dimension along which parameters are equal unless they are distributed."""
        return ()

    @property
    def _stages(self) -> Sequence[ProcessGroup]:
        """Groups of processes with other parameters of the same model, which count for its norm."""
        return ()

    def _counted(self) -> Sequence[torch.Tensor]:
        """Parameters that another process of such a group has as well, and counts."""
        return ()

    @cached_property
    def _sharder(self) -> Sharder:
        from accelerate.strategy.sharding.shard import Sharder

        watch = together.current()
        if watch is not None and not self._stages:
            # A rank that waits in one of these for a rank that waits elsewhere is noticed.
            for group in self._shard_mesh.get_all_groups():
                watch.count(group)
        return Sharder(self._shard_mesh, self.plugin, self.world.device, self._alike)

    def check(self) -> None:
        """Copies of a model need equally many processes each."""
        super().check()
        if self.plugin.fsdp_version != 2:
            raise SettingError(
                "parallelism_config goes with version 2 of sharding, and fsdp_version is 1",
                why="only version 2 shards over a mesh of several dimensions",
                fix="leave fsdp_version out, or make it 2",
            )
        _ = self._grid

    # --- prepare

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Shard every model, part by part, and keep the optimizers on the parameters."""
        given = dict.fromkeys(bundle.of("model"))
        models = [model for model in given if not self._known(model)]
        if any(self._known(model) and model not in self.models for model in given):
            yield Step("take over", "the model is sharded already, as another Accelerator said", self._adopt)
        if bundle.training and models:
            yield self._shard_step(models)
        elif models:
            yield Step("place", f"the weights go to {self.world.device}", self._place)
        if bundle.of("optimizer"):
            self._check_optimizers(bundle)
            yield Step("parameters", "optimizers hold the sharded parameters", self._catch_up)

    def _shard_step(self, models: list[nn.Module]) -> Step:
        layouts = [self._layout(model) for model in models]
        here = self.world.device.type
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        before = sum(t.numel() * t.element_size() for t in tensors if t.device.type in (here, "meta"))
        pairs = zip(models, layouts, strict=True)
        copies, shards = self._grid
        away = here != "cpu" and self._offloads
        after = sum(found.share(model, shards, offloaded=away) for model, found in pairs)
        said = "; ".join(dict.fromkeys(found.says() for found in layouts))
        several = f", in {copies} copies" if copies > 1 else ""
        reason = f"each of {shards} processes holds a part of every parameter{several}; {said}"
        return Step("shard", reason, self._shard, before, after)

    @property
    def _offloads(self) -> bool:
        return type(self.plugin.cpu_offload).__name__ == "CPUOffloadPolicy"

    def _layout(self, model: nn.Module) -> Layout:
        from accelerate.strategy.sharding.plugin import policy_of
        from accelerate.strategy.sharding.shard import layout_of

        return layout_of(model, self.plugin, policy_of(self.request.precision))

    def _adopt(self, bundle: Bundle) -> None:
        self.models.update(model for model in bundle.of("model") if self._known(model))

    def _shard(self, bundle: Bundle) -> None:
        for model in dict.fromkeys(bundle.of("model")):
            if not self._known(model):
                self.shard(model, bundle.of("optimizer"))

    def shard(self, model: nn.Module, optimizers: Sequence[Any] = ()) -> None:
        """Shards one model in place, and makes ``optimizers`` hold its new parameters."""
        self._sharder.shard(model, self._layout(model), optimizers, self._follow)
        self.models.add(model)

    def _known(self, model: nn.Module) -> bool:
        from accelerate.strategy.sharding.shard import is_sharded

        return is_sharded(model)

    def _place(self, bundle: Bundle) -> None:
        for index in bundle.positions("model"):
            if bundle.place[index] and not hasattr(bundle.objects[index], "hf_device_map"):
                bundle.objects[index].to(self.world.device)

    def _follow(self, renewed: Mapping[int, tuple[Any, Any]], optimizers: list[Any]) -> None:
        from accelerate.strategy.sharding.shard import follow

        follow(renewed, optimizers)
        for old, new in renewed.values():
            self._renewed[old] = new

    def _catch_up(self, bundle: Bundle) -> None:
        """Optimizers that were made before their model was prepared, in a call of its own."""
        from accelerate.strategy.sharding.shard import follow

        for optimizer in bundle.of("optimizer"):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            renewed = {id(p): (p, self._newest(p)) for p in held if p in self._renewed}
            # It may have been made right after a forward.
            whole = self._whole()
            renewed |= {id(p): (p, whole[p]) for p in held if p in whole}
            follow(renewed, [optimizer])

    def _newest(self, parameter: torch.Tensor) -> torch.Tensor:
        """What has taken its place: other dimensions may have divided it before it was sharded."""
        while parameter in self._renewed:
            parameter = self._renewed[parameter]
        return parameter

    def _check_optimizers(self, bundle: Bundle) -> None:
        """Before anything is changed: an optimizer that would train what nobody reduces.

        Raises:
            PrepareError: all of its parameters belong to no model that is prepared.
        """
        known = {p for model in (*bundle.of("model"), *self.models) for p in model.parameters()}
        for optimizer in bundle.of("optimizer"):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if held and not any(p in known or p in self._renewed for p in held):
                raise PrepareError(
                    f"the {type(optimizer).__name__} holds parameters of no prepared model",
                    why="sharding gives a model new parameters, and its optimizer has to follow them",
                    fix="prepare both in one call: model, optimizer = accelerator.prepare(model, optimizer)",
                )

    # --- the loop

    def synchronises(self, model: nn.Module) -> bool:
        """Unless ``no_sync`` is around it."""
        from accelerate.strategy.sharding.grads import reduces

        return reduces(model)

    def accumulating(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Without ``sync`` every process keeps whole gradients: as much memory as unsharded ones take."""
        if sync:
            return NOTHING
        self._keeps_back = True
        return _quiet(models)

    def waiting(self, models: Iterable[nn.Module]) -> int:
        """Whole gradients take as many bytes as unsharded training's."""
        from accelerate.strategy.sharding.grads import unreduced

        return unreduced(model for model in models if model in self.models)

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """The next backward reduces, with what was kept back."""
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(True)  # type: ignore[operator]

    @property
    def holds_back(self) -> bool:
        """Since a micro-batch ran without reducing."""
        return self._keeps_back

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """The sharded ones: after a forward the root still has its whole ones in their places."""
        whole = self._whole()
        return [whole.get(p, p) for p in model.parameters()]

    def _whole(self) -> dict[torch.Tensor, torch.Tensor]:
        """Sharded parameters by the whole ones that stand in their places now and then."""
        from accelerate.strategy.sharding.grads import leaf, places

        pairs = ((leaf(place), p) for p, place in places(self.models).items())
        return {found: p for found, p in pairs if found is not None}

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The local parts, and whole gradients that have not been reduced yet."""
        from accelerate.strategy.sharding.grads import kept_back, local, places

        wanted = list(parameters)
        found = [local(p.grad) for p in wanted if p.grad is not None]
        if self._keeps_back:
            record = places(self.models)
            more = (kept_back(record[p]) for p in wanted if p in record)
            found += [grad for grad in more if grad is not None]
        return found

    def reached(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Graphs reach the whole parameters: those that they stand for."""
        from accelerate.strategy.sharding.grads import leaf, places

        found = leaves(loss)
        return found | {p for p, place in places(self.models).items() if leaf(place) in found}

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """The whole backward: other processes wait for every gather and reduction in it."""
        from accelerate.strategy.sharding.grads import zero_backward

        zero_backward(self.models, loss)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """By exchanges of one number."""
        from accelerate.strategy.sharding.grads import clip_norm

        device, elsewhere = self.world.device, self._counted()
        return clip_norm(parameters, max_norm, norm_type, device, self._stages, elsewhere)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Each process its part."""
        from accelerate.strategy.sharding.grads import clip_value

        clip_value(parameters, limit)

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Also what was kept back."""
        if self._keeps_back:
            from accelerate.strategy.sharding.grads import drop, places

            record = places(self.models)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in record:
                        drop(record[parameter])
        zero()

    # --- states

    @property
    def saves_sharded(self) -> bool:
        """As the plugin's ``state_dict_type`` says."""
        return "SHARDED_STATE_DICT" in str(self.plugin.state_dict_type)

    @property
    def _leads(self) -> bool:
        """Whether this process gets what is gathered."""
        return self.world.rank == 0

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Gathered, on the host of rank 0; other ranks get nothing. All processes must call it."""
        from accelerate.strategy.sharding.whole import model_state

        self._together("get_state_dict", type(model).__name__)
        return model_state(model, self._leads)

    def _together(self, operation: str, what: str) -> None:
        """Makes sure that all processes are here: torch's own collectives would wait for those that are not.

        Raises:
            CollectiveError: on all ranks, if some do something else.
        """
        collective.all_objects(what, operation)

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """A full state on every process; each takes its part."""
        from accelerate.strategy.sharding.whole import load_model

        return load_model(model, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gathered, on the host of rank 0."""
        from accelerate.strategy.sharding.whole import optimizer_state

        self._together("the state of an optimizer", type(optimizer).__name__)
        return optimizer_state(optimizer, self._leads)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """A full state on every process; each takes its part."""
        from accelerate.strategy.sharding.whole import load_optimizer

        load_optimizer(optimizer, state)


@contextmanager
def _quiet(models: Iterable[nn.Module]) -> Iterator[None]:
    found: list[Any] = [model for model in models if hasattr(model, "set_requires_gradient_sync")]
    for model in found:
        model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for model in found:
            model.set_requires_gradient_sync(True)
