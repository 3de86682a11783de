"""FSDP2: every rank holds a shard of parameters, gradients and optimizer state, which are sharded in place.

Before an FSDP unit computes, its parameters are all-gathered, and they are freed afterwards; its gradients
are reduce-scattered. torch's ``fully_shard`` does it in place: the model stays the user's object, with its
names, and its parameters are ``DTensor``. The work stands in the files of ``sharding``, which are loaded only
when such a strategy is chosen: they cost a second of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core.lazy_names import get_override
from accelerate.core.option_report import OptionStatus
from accelerate.strategy.base import CustomSharding, PrepareBundle, StrategySelection, SubclassGathering
from accelerate.strategy.protocol.gradient_sync import ZeroBackward, graph_leaves, run_with_zero_gradients
from accelerate.strategy.sharding.sharded_strategy import (
    FSDP_SELECTION,
    MethodCalls,
    ShardedStrategy,
    watch_unprepared_optimizers,
)
from accelerate.world import collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accelerate.strategy.protocol.gradient_sync import GradientPiece
    from accelerate.strategy.sharding.sharding_layout import ShardingLayout


class FSDP2Strategy(ShardedStrategy, SubclassGathering, CustomSharding):
    """FSDP2 over all ranks, by torch's ``fully_shard``."""

    name: ClassVar[str] = "fsdp"
    selection: ClassVar[StrategySelection] = dataclasses.replace(
        FSDP_SELECTION,
        unused_reason="one process has nothing to shard, so it trains as a single process does",
    )
    priority: ClassVar[int] = 10

    def adapt_objects(self, accelerator: Any, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Checkpoint activations and shard models by functions that a program has replaced.

        They are ``fsdp2_apply_ac`` and ``fsdp2_prepare_model`` of ``accelerate.accelerator``.
        """
        names = ("fsdp2_apply_ac", "fsdp2_prepare_model")
        apply_ac, shard = (get_override("accelerate.accelerator", name, None) for name in names)
        if apply_ac is None and shard is None:
            return objects
        from accelerate.strategy.sharding.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model, shard_by

        adapted = list(objects)
        for index, model in enumerate(objects):
            if not isinstance(model, nn.Module) or self._is_sharded(model):
                continue
            if apply_ac not in (None, fsdp2_apply_ac) and self.plugin.activation_checkpointing:
                adapted[index] = model = apply_ac(accelerator, model)
                self._checkpointed.add(model)
            if shard not in (None, fsdp2_prepare_model):
                adapted[index] = shard_by(shard, accelerator, model)
        return tuple(adapted)

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterator[OptionStatus]:
        """Return the status of each option; see ``fsdp2_options.py``."""
        from accelerate.strategy.sharding.fsdp2_options import option_statuses

        self.plugin.imply_mixed_precision(self.request.compute_format)  # another Accelerator may have it too
        return option_statuses(self._requested_options, self.plugin, [m for m in models if m in self.models])

    def call_late_hooks(self, model: nn.Module) -> None:
        """Call the hooks on the unsharded parameters, which the graph reaches."""
        from accelerate.strategy.sharding.fsdp2_sharder import call_late_hooks

        call_late_hooks(model)

    # --- device mesh

    @property
    def _pipeline_groups(self) -> Sequence[ProcessGroup]:
        """The pipeline parallel groups: ranks with other layers of the model, which count for its norm."""
        return ()

    def _params_counted_elsewhere(self) -> Sequence[torch.Tensor]:
        """Return the parameters that another rank of such a group has as well, and counts."""
        return ()

    # --- prepare

    def _plan_layout(self, model: nn.Module) -> ShardingLayout:
        from accelerate.strategy.sharding.sharding_layout import plan_layout

        return plan_layout(model, self.plugin, self.request.compute_format)

    def _shard_models(self, bundle: PrepareBundle) -> None:
        for model in dict.fromkeys(bundle.objects_of("model")):
            if not self._is_sharded(model):
                self.shard(model, bundle.objects_of("optimizer"))
        if self._replaced_params:  # somebody holds them
            watch_unprepared_optimizers(self)

    def shard(self, model: nn.Module, optimizers: Sequence[Any] = ()) -> None:
        """Shard one model in place, and make ``optimizers`` hold its new parameters."""
        from accelerate.strategy.sharding.fsdp2_sharder import Sharder

        sharder = Sharder(
            self._shard_mesh,
            self.plugin,
            self.world.device,
            self._replicated_meshes,
            checkpoints=bool(self.plugin.activation_checkpointing) and model not in self._checkpointed,
            is_data_parallel=self.data_shard.count == self.world.size,
        )
        layout = self._plan_layout(model)
        sharder.shard(model, layout, optimizers, self._replaced_params)
        self._ignored_params.update(dict.fromkeys(layout.ignored))
        state: Any = model._get_fsdp_state()  # type: ignore[operator]
        calls = MethodCalls(state, state._pre_forward, state._post_forward)
        state._pre_forward, state._post_forward = calls.pre_forward, calls.post_forward
        self._register(model)

    def _is_sharded(self, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return isinstance(model, FSDPModule)

    def holds_shards(self, model: nn.Module, module: nn.Module) -> bool:
        """Return whether a parameter of the module's own is sharded by FSDP now."""
        from accelerate.strategy.sharding.grads import fsdp_params

        sharded = fsdp_params([model])
        return any(p in sharded for p in module.parameters(recurse=False))

    def _remap_optimizers(self, renewed: Mapping[int, tuple[Any, Any]], optimizers: list[Any]) -> None:
        from accelerate.strategy.sharding.fsdp2_sharder import move_hooks, remap_optimizer_params

        remap_optimizer_params(renewed, optimizers)
        move_hooks(renewed.values())
        for old, new in renewed.values():
            self._replaced_params[old] = new
        watch_unprepared_optimizers(self)

    def _update_optimizers(self, bundle: PrepareBundle) -> None:
        """Remap optimizers also when their model was prepared in an earlier call."""
        from torch.distributed.tensor import DTensor

        from accelerate.strategy.sharding.fsdp2_sharder import remap_optimizer_params

        for optimizer in bundle.objects_of("optimizer"):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            renewed = {id(p): (p, self._current_param(p)) for p in params if p in self._replaced_params}
            if not all(isinstance(p, DTensor) and p.device_mesh == self._shard_mesh for p in params):
                # It may have been made right after a forward.
                whole = self._sharded_by_unsharded()
                renewed |= {id(p): (p, whole[p]) for p in params if p in whole}
            if renewed:
                remap_optimizer_params(renewed, [optimizer])

    def reshard(self, model: nn.Module) -> None:
        """Free the unsharded parameters that torch has kept after a forward."""
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- the loop

    def current_params(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sharded parameters of those that were listed before ``prepare``, or after a forward."""
        from torch.distributed.tensor import DTensor

        current = super().current_params(parameters)
        if all(isinstance(p, DTensor) or p.grad is not None or not p.requires_grad for p in current):
            return current
        whole = self._sharded_by_unsharded()
        return [whole.get(p, p) for p in current]

    def late_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the trained parameters that are not sharded."""
        from torch.distributed.tensor import DTensor

        trained = (p for p in parameters if p.requires_grad and p.grad is not None)
        return [p for p in trained if not isinstance(p, DTensor)]

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether no ``no_sync`` is active."""
        from accelerate.strategy.sharding.grads import reduces_gradients

        return reduces_gradients(model)

    def accumulation_bytes(self, models: Iterable[nn.Module]) -> int:
        """Return the bytes of unsharded gradients."""
        from accelerate.strategy.sharding.grads import unreduced_bytes

        return unreduced_bytes(model for model in models if model in self.models)

    @staticmethod
    def _set_gradient_sync(model: nn.Module, sync: bool) -> None:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(sync)  # type: ignore[operator]

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Make the next backward reduce, together with the unreduced gradients."""
        FSDP2Strategy._set_gradient_sync(model, True)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the sharded parameters, also while the root module holds unsharded ones."""
        whole = self._sharded_by_unsharded()
        return [whole.get(p, p) for p in model.parameters()]

    def _sharded_by_unsharded(self) -> dict[torch.Tensor, torch.Tensor]:
        # The root module holds unsharded parameters between its forward and its backward.
        from accelerate.strategy.sharding.grads import fsdp_params, unsharded_param

        pairs = ((unsharded_param(fsdp_param), p) for p, fsdp_param in fsdp_params(self.models).items())
        return {unsharded: p for unsharded, p in pairs if unsharded is not None}

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the local shards of gradients, and unsharded gradients that have not been reduced yet."""
        from accelerate.strategy.sharding.grads import fsdp_params, local_grad, unreduced_grad

        params = list(parameters)
        grads = [local_grad(p.grad) for p in params if p.grad is not None]
        if self._has_unreduced:
            by_param = fsdp_params(self.models)
            more = (unreduced_grad(by_param[p]) for p in params if p in by_param)
            grads += [grad for grad in more if grad is not None]
        return grads

    def reached_params(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Return also the sharded parameters of the unsharded ones that the graph reaches."""
        leaves = graph_leaves(loss)
        return leaves | {p for whole, p in self._sharded_by_unsharded().items() if whole in leaves}

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run the whole backward with zero gradients: other ranks wait for each of its collectives.

        Raises:
            PrepareError: there are parameters that the program has sharded.
        """
        self._refuse_program_sharded(zero.parameters)
        run_with_zero_gradients(self._sharded_by_unsharded(), zero.loss.backward)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the global norm, with all-reduces of one number."""
        from accelerate.strategy.sharding.grads import clip_norm

        device, elsewhere = self.world.device, self._params_counted_elsewhere()
        return clip_norm(parameters, max_norm, norm_type, device, self._pipeline_groups, elsewhere)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clamp the local shard of each gradient."""
        from accelerate.strategy.sharding.grads import clip_value

        clip_value(parameters, limit)

    def flag_reduction(self) -> Callable[[torch.Tensor], Any] | None:
        """Return a max all-reduce over all ranks where the program has sharded a module by itself."""
        # Torch reduces a flag over the mesh of the first gradient, which may be the program's.
        if not any(hasattr(p, "device_mesh") for p in self._ignored_params):
            return None
        return partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX)

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear gradients, also unreduced ones."""
        if self._has_unreduced:
            from accelerate.strategy.sharding.grads import clear_unreduced, fsdp_params

            by_param = fsdp_params(self.models)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in by_param:
                        clear_unreduced(by_param[parameter])
        zero()

    # --- gradients of a window that is not complete

    @property
    def gradient_layout(self) -> str:
        """Add the names and sizes of the mesh; empty where torch takes no unreduced gradients back."""
        from accelerate.strategy.sharding.grads import takes_unreduced

        if not takes_unreduced(self.models):
            return ""
        mesh = self.mesh
        sizes = () if mesh is None else tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        return f"{super().gradient_layout} over {sizes}"

    def gradient_pieces(self, model: nn.Module) -> dict[str, list[GradientPiece]]:
        """Return this rank's shards, and its unsharded gradients that have not been reduced yet."""
        from accelerate.strategy.sharding.grads import gradient_pieces

        stages = self._pipeline_groups[0].size() if self._pipeline_groups else 1
        return gradient_pieces(model, self.world.size // stages)

    def restore_pieces(self, model: nn.Module, pieces: Mapping[str, Sequence[GradientPiece]]) -> None:
        """Put this rank's shards and unreduced gradients back."""
        from accelerate.strategy.sharding.grads import restore_pieces

        self._has_unreduced = True
        restore_pieces(model, pieces)

    def load_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Keep this rank's shard."""
        from accelerate.strategy.sharding.grads import load_gradients

        load_gradients(model, gradients)

    # --- states

    @property
    def saves_sharded(self) -> bool:
        """True if the plugin's ``state_dict_type`` is sharded."""
        return "SHARDED_STATE_DICT" in str(self.plugin.state_dict_type)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the gathered state dict, on the host of rank 0; other ranks get nothing.

        Collective, unless the model was never prepared and has no sharded parameters.
        """
        from torch.distributed.tensor import DTensor

        from accelerate.strategy.sharding.full_state import model_state
        from accelerate.strategy.sharding.initial_weights import refuse_uninitialized, uninitialized_names

        if model in self.models or any(isinstance(p, DTensor) for p in model.parameters()):
            names = collective.compare_objects(uninitialized_names(model), "get_state_dict")
            refuse_uninitialized(chain.from_iterable(names))
        return model_state(model, self._is_leader)

    def check_materialized(self, model: nn.Module) -> None:
        """Refuse parameters whose local shard has no values yet."""
        from accelerate.strategy.sharding.initial_weights import refuse_uninitialized, uninitialized_names

        if names := uninitialized_names(model):
            refuse_uninitialized(names)

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state that every rank passes; each keeps its shard."""
        from accelerate.strategy.sharding.full_state import load_model

        return load_model(model, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Return the gathered optimizer state, on the host of rank 0."""
        from accelerate.strategy.sharding.full_state import optimizer_state

        # Torch's own collectives would wait for a rank that does something else.
        collective.compare_objects(None, "the state of an optimizer")
        return optimizer_state(optimizer, self._is_leader)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state that every rank passes; each keeps its shard."""
        from accelerate.strategy.sharding.full_state import load_optimizer

        load_optimizer(optimizer, state)


PLUGIN = FSDP2Strategy
