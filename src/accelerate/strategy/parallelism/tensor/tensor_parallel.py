"""Tensor parallelism: the processes of this dimension shard every layer, and see the same data.

A layer cut by columns computes a part of its features, the layer after it, cut by rows, adds up what all have
computed. torch's ``parallelize_module`` does that by hooks around the layers; what is not in the plan stays
whole, on every process alike. Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate import device as devices
from accelerate.core.errors import PrepareError
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.strategy.base import PrepareBundle, PrepareStep
from accelerate.strategy.parallelism.strategy import MeshDimension
from accelerate.world import watchdog

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.tensor.tp_plan import ResolvedTPPlan, TPPlanEntry


class TensorParallel(MeshDimension):
    """The tensor parallel dimension: layers sharded by columns and rows."""

    name: ClassVar[str] = "tp"

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._prepared_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watches_groups = False
        # The user's names that match modules of some model.
        self._matched_patterns: set[str] = set()

    def option_statuses(self) -> Iterator[OptionStatus]:
        """Report that ``enable_async_tp`` has no effect: communication does not overlap with computation."""
        if getattr(self.config.tp_handler, "enable_async_tp", False):
            yield RequestedOption("enable_async_tp", True, "TorchTensorParallelConfig").report_not_applied(
                "layers exchange what they have computed, and then the next one computes: nothing overlaps"
            )

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Shard the layers of every model that is not tensor parallel yet."""
        size = self.config._sizes["tp"]
        models = [m for m in dict.fromkeys(bundle.objects_of("model")) if m not in self._prepared_models]
        matched = self._matched_patterns | self._patterns_of(models)
        plans = {model: self._resolve_plan(model, size, matched) for model in models}
        descriptions = "; ".join(dict.fromkeys(_describe(model, plan) for model, plan in plans.items()))
        if plans:
            reason = f"{size} processes share layers and see the same data: {descriptions}"
            yield PrepareStep("tensor", reason, lambda b: self._shard_models(b, plans))

    @property
    def _user_plan(self) -> dict[str, Any]:
        return getattr(self.config.tp_handler, "plan", None) or {}

    def _patterns_of(self, models: list[nn.Module]) -> set[str]:
        """Return the names in the user's plan that match modules of ``models``."""
        from accelerate.strategy.parallelism.tensor.tp_plan import match_pattern

        names = {name for model in models for name, _ in model.named_modules()}
        return {pattern for pattern in self._user_plan if match_pattern(names, pattern)}

    def _resolve_plan(self, model: nn.Module, size: int, matched: set[str]) -> ResolvedTPPlan | None:
        """Resolve the plan of a model; None for a model that is tensor parallel already."""
        from accelerate.strategy.parallelism.tensor.tp_plan import resolve_plan

        shared = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
        if shared is None:
            return resolve_plan(model, self._user_plan, size, matched)
        current_size = getattr(model, "_tp_size", None) or shared.device_mesh.size(-1)
        if current_size != size:
            raise PrepareError(
                f"tp_size is {size}, and the {type(model).__name__} is tensor parallel over {current_size}",
                fix=f"ParallelismConfig(tp_size={current_size}), or load the model whole",
            )
        return None

    def _shard_models(self, bundle: PrepareBundle, plans: dict[nn.Module, ResolvedTPPlan | None]) -> None:
        from accelerate.strategy.parallelism.tensor.module_sharder import sum_gradients_once

        self._watch_groups()
        self._matched_patterns |= self._patterns_of(list(plans))
        for model, plan in plans.items():
            if plan is not None:
                self._shard_model(model, plan, bundle)
            else:  # optimizers may hold its parameters, though it is prepared as one that is only evaluated
                self.strategy.models[model] = None
                sum_gradients_once(model, self.strategy._plane[self.name])
            self._prepared_models.add(model)
            _TPGroupRNGSync(self.mesh[self.name]).attach(model)
        for optimizer in bundle.objects_of("optimizer") if plans else ():
            # Wrappers such as schedulefree's have no hooks.
            if hasattr(optimizer, "register_step_pre_hook"):
                self._compare_at_first_step(list(plans), optimizer)

    def _compare_at_first_step(self, models: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Warn at the first step of replicated parameters whose gradients differ between the processes."""
        from accelerate.strategy.sharding.grads import local_grad

        # FSDP2 replaces the parameters, not their names.
        names = [{n for n, p in model.named_parameters() if not isinstance(p, DTensor)} for model in models]

        def compare(*_: Any) -> None:
            handle.remove()
            params = {
                name: parameter
                for model, replicated in zip(models, names, strict=True)
                for name, parameter in model.named_parameters()
                if name in replicated and parameter.requires_grad
            }
            norms = [
                torch.zeros(()) if p.grad is None else local_grad(p.grad).norm().float()
                for p in params.values()
            ]
            if not norms:
                return
            low_high = torch.stack([norm.to(self.world.device) for norm in norms])
            low_high = torch.stack([-low_high, low_high])
            dist.all_reduce(low_high, dist.ReduceOp.MAX, self.mesh[self.name].get_group())
            low, high = -low_high[0], low_high[1]
            differing = [
                name for name, far in zip(params, (high - low > 0.001 * high).tolist(), strict=True) if far
            ]
            if differing:
                warnings.warn(
                    f"tensor parallel: the gradients of {', '.join(differing[:4])} differ between processes, "
                    "which hold these parameters whole. If they compute on sharded activations, as norms of "
                    "attention heads do, give the plan 'replicated_with_grad_allreduce' for them",
                    stacklevel=2,
                )

        handle = optimizer.register_step_pre_hook(compare)

    def _watch_groups(self) -> None:
        """Let the watchdog count the collectives of the tensor parallel groups, to detect deadlocks."""
        watch = watchdog.current()
        if watch is None or self._watches_groups or self.strategy._pipeline_groups:
            return
        self._watches_groups = True
        groups = [mesh[self.name].get_group() for mesh in (self.mesh, self.strategy._plane)]
        for group in {group.group_name: group for group in groups}.values():
            watch.track_group(group)

    def _shard_model(self, model: nn.Module, plan: ResolvedTPPlan, bundle: PrepareBundle) -> None:
        from accelerate.strategy.parallelism.tensor.module_sharder import ModuleSharder
        from accelerate.strategy.sharding.fsdp2_sharder import exchange_model_info

        sharing, plane = self.strategy._shard_mesh, self.strategy._plane
        together = plane[tuple(name for name in plane.mesh_dim_names or () if name != "pp")]
        _, values = exchange_model_info(model, None, together)
        sharder = ModuleSharder(plane[self.name], sharing, self.world.device, values)
        on_other_stages: list[TPPlanEntry] = []
        for part in plan.modules:
            if vars(part.module).get("_on_another_stage"):
                on_other_stages.append(part)
            else:
                sharder.shard_module(part)
        for part in on_other_stages:
            sharder.replace_tied(part)
        sharder.check_ties(model)
        # Parameters that will be sharded get their values then.
        sharder.materialize_rest(model, equal=not bundle.training)
        self.remap_optimizer_params(sharder.replaced, bundle.objects_of("optimizer"))


def _describe(model: nn.Module, plan: ResolvedTPPlan | None) -> str:
    if plan is None:
        return f"the {type(model).__name__} was loaded so"
    if not plan.modules and not plan.replicated:
        return f"the {type(model).__name__} stays whole"
    left = f", {', '.join(plan.replicated)} stay whole" if plan.replicated else ""
    return f"{len(plan.modules)} layers of the {type(model).__name__}{left}"


class _TPGroupRNGSync:
    """Copies the RNG state of the first tensor parallel rank to all before the first training forward.

    Dropout of replicated activations must be equal on all of them. All draw equally often: once is enough.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.handle: Any = None

    def attach(self, model: nn.Module) -> None:
        """Register the hook for the next forward."""
        self.handle = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or next(module.parameters()).is_meta:
            return
        self.handle.remove()
        rng_devices = [devices.get(kind) for kind in dict.fromkeys(("cpu", self.mesh.device_type))]
        states = [device.get_rng_state() for device in rng_devices]
        group = self.mesh.get_group()
        dist.broadcast_object_list(states, dist.get_global_rank(group, 0), group)
        for device, state in zip(rng_devices, states, strict=True):
            device.set_rng_state(state)
