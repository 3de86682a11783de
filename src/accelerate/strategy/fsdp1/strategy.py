"""FSDP1: fully sharded data parallel by torch's class ``FullyShardedDataParallel``.

Every FSDP unit of the model is wrapped in an object of that class, and so is the root: ``prepare`` returns
that object, which forwards the attributes that it lacks. Files and state dicts have the user's names. The
work stands in the other files of this folder, which are loaded only when this strategy is chosen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.core.option_report import OptionStatus
from accelerate.core.setting import load_settings
from accelerate.strategy.base import ModuleWrapping, PrepareBundle, StrategyRequest, StrategySelection
from accelerate.strategy.launch_settings.fsdp import FSDPSettings, implied_versions
from accelerate.strategy.protocol.gradient_sync import ZeroBackward, graph_leaves, run_with_zero_gradients
from accelerate.strategy.sharding.sharded_strategy import (
    FSDP_SELECTION,
    ShardedStrategy,
    watch_unprepared_optimizers,
)
from accelerate.world import collective

if TYPE_CHECKING:
    from torch.distributed.fsdp import ShardingStrategy

    from accelerate.strategy.fsdp1.flat_parameter_layout import FlatParam
    from accelerate.strategy.fsdp1.model_state_dict import FSDP1WrappedModel
    from accelerate.strategy.fsdp1.optimizer_state import FSDP1Optimizer, ParamOrder
    from accelerate.strategy.fsdp1.wrap import FSDP1WrapLayout
    from accelerate.strategy.protocol.gradient_sync import GradientPiece

_WRAPPED_MODULE = "_fsdp_wrapped_module"


class FSDP1Strategy(ShardedStrategy, ModuleWrapping):
    """Training by torch's ``FullyShardedDataParallel`` around each FSDP unit."""

    name: ClassVar[str] = "fsdp1"
    selection: ClassVar[StrategySelection] = FSDP_SELECTION
    priority: ClassVar[int] = 11

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self._roots: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        # The user's parameters of each optimizer group, where flat parameters replace them.
        self._orders: weakref.WeakKeyDictionary[Any, ParamOrder] = weakref.WeakKeyDictionary()
        self._hooked_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Return whether there are several ranks, and the plugin or the launcher asks for version 1."""
        if not super().claims(request):
            return False
        if plugins := cls.selection.plugins(request):
            return bool(plugins[0].fsdp_version == 1)
        loaded = load_settings(FSDPSettings)
        version = loaded.value.fsdp_version
        return version == 1 or (version is None and implied_versions(loaded) == {1})

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterator[OptionStatus]:
        """Return the status of each option; see ``fsdp1_options.py``."""
        from accelerate.strategy.sharding.fsdp1_options import option_statuses

        return option_statuses(self._requested_options, self.plugin, [m for m in models if m in self.models])

    @property
    def _sharding_strategy(self) -> ShardingStrategy:
        """Torch's sharding strategy; HSDP with one replica is the simple strategy."""
        from torch.distributed.fsdp import ShardingStrategy

        strategy: ShardingStrategy = self.plugin.sharding_strategy
        simple = {
            ShardingStrategy.HYBRID_SHARD: ShardingStrategy.FULL_SHARD,
            ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.SHARD_GRAD_OP,
        }
        return simple.get(strategy, strategy) if self._mesh_shape[0] == 1 else strategy

    # --- prepare

    @property
    def _is_replicated(self) -> bool:
        """True if every rank keeps unsharded parameters (NO_SHARD)."""
        return self.plugin.sharding_strategy.name == "NO_SHARD"

    @property
    def _shard_count(self) -> int:
        """The number of ranks that shard a parameter; 1 under NO_SHARD."""
        return 1 if self._is_replicated else super()._shard_count

    @property
    def _shard_description(self) -> str:
        """The clause that says which part of a model a rank holds."""
        if self._is_replicated:
            return f"each of {self.world.size} processes holds all parameters, and gradients are averaged"
        return super()._shard_description

    def _plan_layout(self, model: nn.Module) -> FSDP1WrapLayout:
        from accelerate.strategy.fsdp1.wrap import make_layout

        return make_layout(model, self.plugin, self.request.compute_format)

    def _is_sharded(self, model: nn.Module) -> bool:
        """Return whether ``model`` is wrapped already.

        Raises:
            PrepareError: the user has wrapped it.
        """
        from accelerate.strategy.fsdp1.wrap import is_wrapped, wrapped_model_of

        if is_wrapped(model) and wrapped_model_of(model) is None:
            raise PrepareError(
                "the model is wrapped in torch's FullyShardedDataParallel already",
                why="prepare wraps it itself, so that states and optimizers go by the user's names",
                fix="give prepare the plain model, and say in FullyShardedDataParallelPlugin how to wrap it",
            )
        return is_wrapped(model)

    def _shard_models(self, bundle: PrepareBundle) -> None:
        if self.world.device.type == "meta":
            raise PrepareError(
                "FSDP1 has no dry run with empty tensors",
                why="torch's class gives them memory",
                fix="use fsdp_version=2 for the dry run: the shards of a rank are as large",
            )
        bundle.replace("model", self._wrap_model)
        if self._replaced_params:  # somebody holds them
            watch_unprepared_optimizers(self)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if self._is_sharded(model):
            return model
        from accelerate.strategy.fsdp1.wrap import FSDP1Wrapper

        wrapper = FSDP1Wrapper(self._shard_mesh, self.plugin, self._sharding_strategy, self.world.device)
        layout = self._plan_layout(model)
        wrapped_model, renewed = wrapper.wrap(model, layout)
        self._ignored_params.update(dict.fromkeys(layout.ignored))
        self._replaced_params.update(renewed)
        self._register(wrapped_model.root)
        return wrapped_model.root

    def _register(self, model: nn.Module) -> None:
        """Remember the wrapped model, also by the user's own module."""
        super()._register(model)
        self._roots[self.unwrap(model)] = weakref.ref(model)

    def holds_shards(self, model: nn.Module, module: nn.Module) -> bool:
        """Return whether the flat parameter with the module's own parameters is not all-gathered now."""
        wrapped_model = self._wrapped_model(model)
        unit = None if wrapped_model is None else wrapped_model.flat_param_in.get(module)
        return unit is not None and not unit.is_gathered

    def _update_optimizers(self, bundle: PrepareBundle) -> None:
        """Remap optimizers also when their model was prepared in an earlier call."""
        from accelerate.strategy.fsdp1.optimizer_state import remap_optimizer
        from accelerate.strategy.protocol.flat_optimizers import warn_of_statistics

        sync = bool(self.plugin.sync_module_states)
        for optimizer in bundle.objects_of("optimizer"):
            inner_optimizer = getattr(optimizer, "optimizer", optimizer)
            remap_optimizer(
                inner_optimizer, self._replaced_params, self._flat_params(), self._orders, sync=sync
            )
            if (
                isinstance(inner_optimizer, torch.optim.Optimizer)
                and inner_optimizer not in self._hooked_optimizers
            ):
                self._hooked_optimizers.add(inner_optimizer)
                if not self._is_replicated:
                    warn_of_statistics(inner_optimizer, "FSDP1")
                inner_optimizer.register_step_post_hook(self._reshard_after_step)

    def _reshard_after_step(self, *_: Any) -> None:
        # A forward before a step leaves unsharded values of the root unit, which are old now.
        for model in self.models:
            self.reshard(model)

    def call_late_hooks(self, model: nn.Module) -> None:
        """Warn that the hooks are not called."""
        from accelerate.strategy.fsdp1.wrap import warn_of_hooks

        warn_of_hooks(model)

    def reshard(self, model: nn.Module) -> None:
        """Free the unsharded values of flat parameters that torch has kept after a forward."""
        wrapped_model = self._wrapped_model(model)
        for unit in () if wrapped_model is None else wrapped_model.flat_params:
            if unit.is_idle:  # not in torch's summon_full_params
                unit.reshard()

    def _check_optimizers(self, bundle: PrepareBundle) -> None:
        """Refuse also optimizers that cannot be remapped.

        Raises:
            PrepareError: a flat parameter would be in several groups, the optimizer needs whole matrices, or
                an error of the base class.
        """
        super()._check_optimizers(bundle)
        if not self._is_replicated:
            from accelerate.strategy.protocol.flat_optimizers import check_elementwise

            for optimizer in bundle.objects_of("optimizer"):
                check_elementwise(getattr(optimizer, "optimizer", optimizer), "FSDP1")
        if not bundle.training or self.plugin.use_orig_params:
            return
        from accelerate.strategy.fsdp1.optimizer_state import check_param_groups

        fresh = [model for model in bundle.objects_of("model") if not self._is_sharded(model)]
        for optimizer in bundle.objects_of("optimizer"):
            for model in fresh:
                check_param_groups(optimizer, [params for _, params in self._plan_layout(model).units])

    # --- the loop

    def late_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the trained parameters that no flat parameter holds."""
        flat = {p for unit in self._flat_params() for p in unit.parameters}
        # A DTensor is reduced by what has sharded it.
        late = (p for p in parameters if p not in flat and not hasattr(p, "device_mesh"))
        return [p for p in late if p.requires_grad and p.grad is not None]

    def _flat_params(self) -> list[FlatParam]:
        """Return the flat parameters of all models."""
        from accelerate.strategy.fsdp1.wrap import wrapped_model_of

        wrapped_models = [each for each in map(wrapped_model_of, self.models) if each is not None]
        return [unit for each in wrapped_models for unit in each.flat_params]

    def _wrapped_model(self, model: nn.Module) -> FSDP1WrappedModel | None:
        """Return the ``FSDP1WrappedModel`` of torch's root wrapper, or of the user's module in one.

        Either may have been compiled after ``prepare``, and the user's module before it.
        """
        from accelerate.strategy.fsdp1.wrap import wrapped_model_of

        inner = getattr(model, "_modules", {}).get("_orig_mod", model)
        root = self._roots.get(model) or self._roots.get(inner)
        return wrapped_model_of(inner if root is None else root())

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether no ``no_sync`` is active."""
        return bool(getattr(model, "_sync_gradients", True))

    @staticmethod
    def _set_gradient_sync(model: nn.Module, sync: bool) -> None:
        """Do what torch's ``no_sync`` does; a backward inside may still be set to reduce."""
        if _WRAPPED_MODULE in getattr(model, "_modules", {}):
            for module in model.modules():
                if _WRAPPED_MODULE in module._modules:
                    module._sync_gradients = sync  # type: ignore[assignment]

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Make the next backward reduce, together with the unreduced gradients."""
        FSDP1Strategy._set_gradient_sync(model, True)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the user's parameters or the flat ones, also between a forward and its backward."""
        from accelerate.strategy.fsdp1.grads import optimizer_parameters

        wrapped_model = self._wrapped_model(model)
        return super().parameters(model) if wrapped_model is None else optimizer_parameters(wrapped_model)

    def current_params(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that optimizers hold in the place of ``parameters``: a flat one once."""
        return list(dict.fromkeys(self._replaced_params.get(p, (p, None))[0] for p in parameters))

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's pieces of gradients, or unsharded gradients that have not been reduced yet."""
        from accelerate.strategy.fsdp1.grads import local_gradients

        return local_gradients(self._flat_params(), parameters)

    @property
    def gradient_layout(self) -> str:
        """Return an empty text: flat gradients are always joined and sharded again."""
        return ""

    def gradient_pieces(self, model: nn.Module) -> dict[str, list[GradientPiece]]:
        """Return this rank's pieces, sharded or not reduced yet."""
        from accelerate.strategy.fsdp1.grads import gradient_pieces

        wrapped_model = self._wrapped_model(model)
        if wrapped_model is None:
            return super().gradient_pieces(model)
        return gradient_pieces(wrapped_model, self.world.size)

    def load_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Keep this rank's pieces of unsharded gradients."""
        from accelerate.strategy.fsdp1.grads import load_gradients

        wrapped_model = self._wrapped_model(model)
        if wrapped_model is None:
            super().load_gradients(model, gradients)
        else:
            load_gradients(wrapped_model, gradients)

    def reached_params(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Return also the user's parameters in the flat parameters that the graph reaches."""
        from accelerate.strategy.fsdp1.grads import reached_parameters

        return reached_parameters(self._flat_params(), graph_leaves(loss))

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run the whole backward with zero gradients: other ranks wait for each of its collectives.

        Raises:
            PrepareError: there are parameters that the program has sharded.
        """
        self._refuse_program_sharded(zero.parameters)
        run_with_zero_gradients([unit.flat for unit in self._flat_params()], zero.loss.backward)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the global norm, with one all-reduce of one number."""
        from accelerate.strategy.fsdp1.grads import clip_norm

        return clip_norm(self._flat_params(), parameters, max_norm, float(norm_type), self.world.device)

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear gradients, also unreduced ones."""
        if self._has_unreduced:
            from accelerate.strategy.fsdp1.grads import clear_gradients

            clear_gradients(
                self._flat_params(), (p for group in optimizer.param_groups for p in group["params"])
            )
        zero()

    def flag_reduction(self) -> Callable[[torch.Tensor], Any]:
        """Return a max all-reduce: a flag about the pieces of one rank counts for all."""
        return partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX)

    # --- states

    @property
    def saves_sharded(self) -> bool:
        """True unless the plugin's ``state_dict_type`` is the full one."""
        return "FULL_STATE_DICT" not in str(self.plugin.state_dict_type)

    def model_checkpoint_view(self, model: nn.Module) -> Any:
        """Return the model by the user's names, with DTensors where it is sharded."""
        from accelerate.strategy.fsdp1.model_state_dict import wrapped_model_view

        wrapped_model = self._wrapped_model(model)
        return self.unwrap(model) if wrapped_model is None else wrapped_model_view(wrapped_model)

    def optimizer_checkpoint_view(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer by the user's parameters, with DTensors where they are sharded."""
        from accelerate.strategy.fsdp1.optimizer_state import wrapped_optimizer_view

        return wrapped_optimizer_view(self._wrapped_optimizer(optimizer))

    def _wrapped_optimizer(self, optimizer: torch.optim.Optimizer) -> FSDP1Optimizer:
        from accelerate.strategy.fsdp1.optimizer_state import FSDP1Optimizer

        return FSDP1Optimizer(optimizer, self._flat_params(), self._orders.get(optimizer, ()))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the gathered state dict, on the host of rank 0; other ranks get nothing. Collective."""
        from accelerate.strategy.fsdp1.model_state_dict import discard_value, to_host

        wrapped_model = self._wrapped_model(model)
        if wrapped_model is None:
            return super().model_state(model)
        # Torch's own collectives would wait for a rank that does something else.
        collective.compare_objects(None, "get_state_dict")
        return wrapped_model.gather_state(to_host if self._is_leader else discard_value)

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state that every rank passes; each keeps its shard."""
        wrapped_model = self._wrapped_model(model)
        return (
            super().load_model(model, state, strict=strict)
            if wrapped_model is None
            else wrapped_model.load_state(state, strict=strict)
        )

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Return the gathered optimizer state, on the host of rank 0."""
        from accelerate.strategy.fsdp1.model_state_dict import discard_value, to_host

        state = self._wrapped_optimizer(optimizer).gather_state(to_host if self._is_leader else discard_value)
        return state if self._is_leader else {}

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state that every rank passes; each keeps its shard."""
        self._wrapped_optimizer(optimizer).load_state(state)

    @staticmethod
    def inner_module(model: Any) -> Any:
        """Return the module inside torch's wrapper; its forward all-gathers only the FSDP units inside it."""
        inner = getattr(model, "_modules", {}).get(_WRAPPED_MODULE)
        return model if inner is None else inner

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self.inner_module(model)


PLUGIN = FSDP1Strategy
