"""The base of FSDP1 (wraps modules) and FSDP2 (shards in place): preparing, and the training loop."""

from __future__ import annotations

import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core import environ
from accelerate.core.errors import PrepareError
from accelerate.strategy.base import PrepareBundle, PrepareStep, Strategy, StrategyRequest, StrategySelection
from accelerate.strategy.launch_settings.fsdp import UseFSDPSetting
from accelerate.strategy.protocol.gradient_sync import (
    NO_CONTEXT,
    OpenGradients,
    ParamReplacement,
    ReductionMonitor,
)
from accelerate.world import watchdog

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
    from accelerate.strategy.sharding.sharding_layout import ShardingLayout


_HSDP = ("dp_replicate", "dp_shard")


FSDP_SELECTION = StrategySelection((UseFSDPSetting,), "FullyShardedDataParallelPlugin", "fsdp_plugin", 2)


def watch_mesh(mesh: DeviceMesh) -> None:
    """Let the watchdog count the collectives of the groups of a mesh, to detect deadlocks."""
    if (watch := watchdog.current()) is not None:
        for group in mesh.get_all_groups():
            watch.track_group(group)


_watched_strategies: weakref.WeakSet[ShardedStrategy] = weakref.WeakSet()


def watch_unprepared_optimizers(strategy: ShardedStrategy) -> None:
    """Let every optimizer be checked before it steps; see ``ShardedStrategy.refuse_replaced_params``."""
    _register_check()
    _watched_strategies.add(strategy)


@cache
def _register_check() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for strategy in tuple(_watched_strategies):
        strategy.refuse_replaced_params(optimizer)


class ShardedStrategy(OpenGradients, Strategy, ReductionMonitor, ParamReplacement):
    """Parameters, gradients and optimizer state sharded over ranks.

    Attributes:
        plugin: the options.
        models: the models that it has sharded, or that another strategy of its kind has sharded before.
    """

    shards_params: ClassVar[bool] = True
    # Further meshes of one dimension along which plain parameters are replicated.
    _replicated_meshes: Sequence[DeviceMesh] = ()

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

        plugins = FSDP_SELECTION.plugins(request)
        self.plugin: FullyShardedDataParallelPlugin = (
            plugins[0] if plugins else FullyShardedDataParallelPlugin()
        )
        if request.precision != self.plugin._implied[0]:
            # Programs shard further models by the policy of the plugin, such as a reference.
            self.plugin.imply_mixed_precision(request.compute_format)
        if self.plugin.cpu_ram_efficient_loading:
            # transformers reads pretrained weights on rank 0 alone where both variables say so.
            environ.set_variables({"ACCELERATE_USE_FSDP": "true"})
        # In the order of ``prepare``, which all ranks share: collectives follow it.
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        # Models before their first forward with gradients: hooks of parameters may be registered until then.
        self.models_without_forward: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # New parameters by the replaced ones, which optimizers may still hold.
        self._replaced_params: Any = WeakIdKeyDictionary()
        # Parameters of ignored modules, as a set.
        self._ignored_params: Any = WeakIdKeyDictionary()
        # Models whose activations a program checkpoints by its own function.
        self._checkpointed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._has_unreduced = False
        self._no_sync_models: set[nn.Module] = set()
        self.unreduced = set()

    def check(self) -> None:
        """Refuse a number of HSDP replicas that does not divide the world size."""
        _ = self._mesh_shape

    @property
    def plugins(self) -> dict[str, Any]:
        """The FSDP plugin."""
        return {"fsdp_plugin": self.plugin}

    # --- device mesh

    @cached_property
    def _mesh_shape(self) -> tuple[int, int]:
        """(replicas, ranks that shard each replica); known before any device mesh is made.

        Raises:
            SettingError: the replicas do not divide the world size.
        """
        copies = self.plugin.replicate_count(self.world.size, self.world.nodes)
        return copies, self.world.size // copies

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """The device mesh: one dimension of shards, or two with replicas (HSDP)."""
        from torch.distributed.device_mesh import init_device_mesh

        copies, shards = self._mesh_shape
        # A dry run has no device.
        kind = "cpu" if self.world.device.type == "meta" else self.world.device.type
        # One dimension has no name, as in torch's default mesh: a model that the user shards beside this one,
        # a reference model for example, has an equal mesh, and DTensors of both can be combined.
        shape, names = ((shards,), None) if copies == 1 else ((copies, shards), _HSDP)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        watch_mesh(mesh)
        return mesh

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of two dimensions under HSDP; else None."""
        return self._shard_mesh if self._mesh_shape[0] > 1 else None

    # --- prepare

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return the steps that shard every model and remap the optimizers to its parameters."""
        models = dict.fromkeys(bundle.objects_of("model"))
        fresh = [model for model in models if not self._is_sharded(model)]
        if any(model not in fresh and model not in self.models for model in models):
            yield PrepareStep(
                "take over", "the model is sharded already, as another Accelerator said", self._adopt_sharded
            )
        if bundle.training and fresh:
            classes = {type(part).__name__ for model in fresh for part in model.modules()}
            self.plugin._layer_names |= classes.intersection(self.plugin.transformer_cls_names_to_wrap or ())
            layouts = {model: self._plan_layout(model) for model in fresh}
            yield PrepareStep(
                "shard",
                lambda: self._describe_shards(layouts),
                self._shard_models,
                lambda: self._shard_memory(layouts),
            )
        elif fresh:
            yield PrepareStep("place", f"the weights go to {self.world.device}", self._move_to_device)
        if bundle.objects_of("optimizer"):
            self._check_optimizers(bundle)
            yield PrepareStep("parameters", "optimizers hold the sharded parameters", self._update_optimizers)
        if any(hasattr(item, "param_groups") for item in bundle.objects_of("other")):
            reason = "an optimizer that is not prepared holds none of the replaced parameters"
            yield PrepareStep("check", reason, self._check_unprepared)

    def _describe_shards(self, layouts: Mapping[nn.Module, ShardingLayout]) -> str:
        return "; ".join(dict.fromkeys([self._shard_description, *(p.describe() for p in layouts.values())]))

    def _shard_memory(self, layouts: Mapping[nn.Module, ShardingLayout]) -> tuple[int, int]:
        """Return the bytes of models on this rank's device before and after they are sharded."""
        device_type = self.world.device.type
        tensors = [t for model in layouts for t in (*model.parameters(), *model.buffers())]
        before = sum(t.numel() * t.element_size() for t in tensors if t.device.type in (device_type, "meta"))
        offloaded = self.plugin.offloads_params and device_type != "cpu"
        return before, sum(
            layout.bytes_per_process(model, self._shard_count, offloaded=offloaded)
            for model, layout in layouts.items()
        )

    @property
    def _shard_count(self) -> int:
        """The number of ranks that shard a parameter."""
        return self._mesh_shape[1]

    @property
    def _shard_description(self) -> str:
        """The clause that says which part of a model a rank holds."""
        copies, shards = self._mesh_shape
        several = f", in {copies} replicas" if copies > 1 else ""
        return f"each of {shards} processes holds a shard of every parameter{several}"

    @abstractmethod
    def _plan_layout(self, model: nn.Module) -> ShardingLayout:
        """Return how ``model`` will be sharded; changes nothing."""

    @abstractmethod
    def _is_sharded(self, model: nn.Module) -> bool:
        """Return whether ``model`` is sharded already."""

    @abstractmethod
    def holds_shards(self, model: nn.Module, module: nn.Module) -> bool:
        """Return whether a module of ``model`` has parameters of its own that are not all-gathered now."""

    @abstractmethod
    def _shard_models(self, bundle: PrepareBundle) -> None:
        """Shard the models of ``bundle`` that are not sharded yet."""

    def _adopt_sharded(self, bundle: PrepareBundle) -> None:
        for model in filter(self._is_sharded, bundle.objects_of("model")):
            self._register(model)

    def _register(self, model: nn.Module) -> None:
        """Remember that ``model`` is sharded, keep its buffers equal, and name calls around its forward."""
        from accelerate.strategy.sharding import forward_bypass

        self.models[model] = None
        if model not in forward_bypass.STRATEGIES:
            hook: Any = torch.compiler.disable(_finish_forward)
            model.register_forward_hook(hook)
            self.models_without_forward.add(model)
            if self.request.compute_format != "no":
                scalars = ScalarInputs()
                model.register_forward_pre_hook(scalars.keep, prepend=True, with_kwargs=True)
                self.unwrap(model).register_forward_pre_hook(scalars.put_back, with_kwargs=True)
        forward_bypass.STRATEGIES[model] = self
        if self.world.device.type != "meta" and next(model.buffers(), None) is not None:
            from accelerate.strategy.protocol.replicated_buffers import sync_buffers

            meshes = (*self._replicated_meshes, self._shard_mesh)
            sync_buffers(model, [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)])

    def _move_to_device(self, bundle: PrepareBundle) -> None:
        for index in bundle.positions("model"):
            if bundle.place_on_device[index]:
                bundle.objects[index].to(self.world.device)

    @abstractmethod
    def _update_optimizers(self, bundle: PrepareBundle) -> None:
        """Make the optimizers of ``bundle`` hold the new parameters."""

    @abstractmethod
    def call_late_hooks(self, model: nn.Module) -> None:
        """Call gradient hooks of parameters that the user has registered after ``prepare``, or warn.

        The model has had its first forward with gradients, and no backward yet.
        """

    @abstractmethod
    def reshard(self, model: nn.Module) -> None:
        """Free the unsharded parameters that torch has kept after a forward."""

    def _check_optimizers(self, bundle: PrepareBundle) -> None:
        """Refuse, before anything is changed, an optimizer of parameters whose gradients nobody reduces.

        Raises:
            PrepareError: all of its parameters belong to no model that is prepared.
        """
        model_params = {
            p for model in (*bundle.objects_of("model"), *self.models) for p in model.parameters()
        }
        model_params |= {p for model in self.models for p in self.parameters(model)}
        for optimizer in bundle.objects_of("optimizer"):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if params and not any(p in model_params or p in self._replaced_params for p in params):
                raise PrepareError(
                    f"the {type(optimizer).__name__} holds parameters of no prepared model",
                    why="sharding gives a model new parameters, and its optimizer has to follow them",
                    fix="prepare both in one call: model, optimizer = accelerator.prepare(model, optimizer)",
                )

    def _check_unprepared(self, bundle: PrepareBundle) -> None:
        """Refuse an unprepared optimizer of parameters that sharding has replaced: it would train nothing."""
        for item in bundle.objects_of("other"):
            params = [p for group in getattr(item, "param_groups", ()) for p in group["params"]]
            current = set(map(id, self.current_params(params)))
            if any(id(p) not in current for p in params):
                raise PrepareError(
                    f"the {type(item).__name__} holds parameters that sharding has replaced",
                    why="prepare gives an optimizer that is no torch.optim.Optimizer back as it is",
                    fix="optimizer = accelerator.prepare_optimizer(optimizer), after that of the model",
                )

    # --- the loop

    def refuse_replaced_params(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the step of an optimizer of parameters that sharding has replaced: it would train nothing.

        Raises:
            PrepareError: it has some.
        """
        replaced = self._replaced_params
        if replaced and any(p in replaced for group in optimizer.param_groups for p in group["params"]):
            raise PrepareError(
                f"the {type(optimizer).__name__} steps parameters that sharding has replaced",
                why="the model has new ones, of which only an optimizer that is prepared knows",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )

    def _current_param(self, parameter: torch.Tensor) -> torch.Tensor:
        # Tensor parallelism may have replaced it before it was sharded.
        while parameter in self._replaced_params:
            parameter = self._replaced_params[parameter]
        return parameter

    def current_params(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that sharding has put in the place of ``parameters``."""
        # Those that were replaced are seldom kept by anybody.
        return [*map(self._current_param, parameters)] if self._replaced_params else list(parameters)

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Keep unsharded gradients on each rank where ``sync`` is False: they take unsharded memory."""
        # Scripts also give a list of models as one argument: as in 1.x its gradients are reduced each time.
        local_models = [] if sync else [model for model in models if isinstance(model, nn.Module)]
        if not local_models:
            return NO_CONTEXT
        self._has_unreduced = True
        return self._no_sync(local_models)

    @contextmanager
    def _no_sync(self, models: list[nn.Module]) -> Iterator[None]:
        # Inside another no_sync of the same model the end of this one is not the end of that one.
        outermost = [model for model in models if model not in self._no_sync_models]
        self._no_sync_models.update(outermost)
        for model in models:
            self._set_gradient_sync(model, False)
        try:
            yield
        finally:
            self._no_sync_models.difference_update(outermost)
            for model in outermost:
                self._set_gradient_sync(model, True)

    def _refuse_program_sharded(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse a zero backward with ignored DTensors: the program has sharded them.

        Raises:
            PrepareError: there is one.
        """
        if any(p in self._ignored_params and hasattr(p, "device_mesh") for p in parameters):
            raise PrepareError(
                "backward(loss, num_items=0) of a model with DTensors in ignored modules",
                why="the program reduces their gradients inside of the backward, so that a mean over nothing "
                "(NaN) would reach every rank",
                fix="give each rank an item in every micro-batch, or leave num_items out",
            )

    @staticmethod
    @abstractmethod
    def _set_gradient_sync(model: nn.Module, sync: bool) -> None:
        """Set whether backwards through ``model`` reduce gradients; does nothing to another model."""

    # --- states

    @property
    def _is_leader(self) -> bool:
        """True on the rank that gets gathered states."""
        return self.world.rank == 0


def _finish_forward(model: nn.Module, *_: Any) -> None:
    # Torch keeps unsharded values for a backward. After a forward without one it would take them for the
    # newest, whatever is written into the parameters meanwhile: an average of the weights, or the weights
    # again. A copy of a model has the hook too, and no strategy.
    from accelerate.strategy.sharding import forward_bypass

    strategy = forward_bypass.STRATEGIES.get(model)
    if strategy is None:
        return
    caller = sys._getframe()
    while caller is not None and caller.f_code is not forward_bypass.FUNCTIONAL_CALL:
        caller = caller.f_back
    if caller is not None:
        forward_bypass.refuse_other_weights(model, **caller.f_locals)
    if not torch.is_grad_enabled():
        strategy.reshard(model)
    elif model in strategy.models_without_forward:
        strategy.models_without_forward.discard(model)
        strategy.call_late_hooks(model)


@dataclass(eq=False)
class ScalarInputs:
    """Scalars among the arguments of a forward under autocast, which torch rounds to the compute dtype.

    Losses are divided by them: the Trainer of transformers gives a number of tokens, ``num_items_in_batch``,
    of which two digits would be left.

    Attributes:
        kept: those of the running forward, by place or by name.
    """

    kept: dict[int | str, torch.Tensor] = field(default_factory=dict)

    def keep(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep them as they are; the hook before those of torch."""
        self.kept = {key: v for key, v in (*enumerate(args), *kwargs.items()) if _is_float_scalar(v)}

    def put_back(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the forward what was kept, on the device to which torch has moved it."""
        kept, self.kept = self.kept, {}
        if not kept:
            return None
        exact = {
            key: kept[key].to(v.device) if key in kept and _is_float_scalar(v) else v
            for key, v in (*enumerate(args), *kwargs.items())
        }
        return tuple(exact[place] for place in range(len(args))), {name: exact[name] for name in kwargs}


def _is_float_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


@dataclass(eq=False)
class MethodCalls:
    """The calls of methods that are told to ``register_fsdp_forward_method``: torch runs no forward hooks.

    Attributes:
        state: torch's state of the root module, which calls these methods in place of its own.
        enter: its own ``_pre_forward``.
        leave: its own ``_post_forward``.
        are_outer: for the running calls, whether each is in no other call of the module.
    """

    state: Any
    enter: Callable[..., Any]
    leave: Callable[..., Any]
    are_outer: list[bool] = field(default_factory=list)

    def pre_forward(self, *args: Any) -> Any:
        """All-gather before a method."""
        self.are_outer.append(self.state._training_state.name == "IDLE")
        return self.enter(*args)

    def post_forward(self, module: nn.Module, *args: Any) -> Any:
        """Finish a method as a forward is finished."""
        output = self.leave(module, *args)
        if self.are_outer.pop():
            _finish_forward(module)
        return output
