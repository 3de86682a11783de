"""Megatron-LM's optimizer around the user's own: its parameters, its steps and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.megatron.model_families import WeightRule

# The optimizer state of one parameter, by the optimizer's own keys: "exp_avg", "step", ...
OptimizerState = dict[str, Any]


class ParamGroupMap:
    """The parameter groups of the user's optimizer, by the names of the user's parameters.

    Args:
        optimizer: the user's, before it gets Megatron-LM's parameters.
        model: the user's.

    Raises:
        PrepareError: it has stepped, or holds other parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unknown = sum(id(parameter) not in named for parameter in params)
        if unknown:
            raise PrepareError(
                f"the {type(optimizer).__name__} holds {unknown} parameters of no model in this prepare",
                why="Megatron-LM gives the model new parameters, and its optimizer has to follow them",
                fix="prepare both in one call: model, optimizer = accelerator.prepare(model, optimizer)",
            )
        if optimizer.state:
            raise PrepareError(
                f"the {type(optimizer).__name__} has stepped before prepare",
                why="its state is for full parameters, and Megatron-LM gives it shards of flattened buffers",
                fix="prepare it first, and accelerator.load_state(...) then",
            )
        self.names = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.index_of = {name: index for index, group in enumerate(self.names) for name in group}
        self.numbers = {name: n for n, name in enumerate(name for group in self.names for name in group)}

    def group_index(self, rule: WeightRule) -> int | None:
        """Return the group of a Megatron-LM tensor; None if the optimizer has none of its source parameters.

        Raises:
            PrepareError: its source parameters are in several groups.
        """
        places = {self.index_of.get(name) for name in rule.names}
        if len(places) > 1:
            raise PrepareError(
                f"{', '.join(rule.names)} are in different groups of the optimizer",
                why="Megatron-LM has one tensor for all of them",
                fix="put them into one group",
            )
        return places.pop()

    def replace_params(
        self, optimizer: torch.optim.Optimizer, params: Sequence[tuple[WeightRule, nn.Parameter]]
    ) -> None:
        """Replace the optimizer's parameters by Megatron-LM's."""
        fresh: list[list[nn.Parameter]] = [[] for _ in self.names]
        for rule, parameter in params:
            place = self.group_index(rule)
            if place is not None and parameter.requires_grad:
                fresh[place].append(parameter)
        for group, parameters in zip(optimizer.param_groups, fresh, strict=True):
            group["params"] = parameters


class MegatronOptimizerStepper:
    """Steps the user's optimizer as Megatron-LM does.

    Args:
        optimizer: the user's, with Megatron-LM's parameters.
        engine: of the model.
        groups: of the user's optimizer by names.

    Attributes:
        megatron_optimizer: Megatron-LM's optimizer.
        last_norm: of all gradients in the last step, before clipping; None where nothing was clipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any, groups: ParamGroupMap) -> None:
        self.optimizer, self.engine, self.groups = optimizer, engine, groups
        # The optimizer may get other tensors in their places: 32-bit copies, or parts.
        self._params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.megatron_optimizer = self._build_optimizer()
        self.norm: float | None = None
        self.last_norm: float | None = None
        self.ready = self.skips_step = False

    def _build_optimizer(self) -> Any:
        from megatron.core import parallel_state as groups
        from megatron.core.optimizer import (
            DistributedOptimizer,
            Float16OptimizerWithFloat16Params,
            FP32Optimizer,
            OptimizerConfig,
        )

        plugin, half = self.engine.plugin, self.engine.module_config.bf16
        config = OptimizerConfig(
            bf16=half,
            params_dtype=self.engine.module_config.params_dtype,
            clip_grad=plugin.gradient_clipping or 0.0,
            use_distributed_optimizer=plugin.use_distributed_optimizer,
        )
        no_scaler: Any = None
        if plugin.use_distributed_optimizer:
            _check_adam(self.optimizer)
            copies: Any = groups.get_data_parallel_group(with_context_parallel=True)
            parts: Any = groups.get_model_parallel_group()
            megatron_optimizer: Any = DistributedOptimizer(
                self.optimizer,
                config,
                no_scaler,
                _skip_state_init,
                model_chunks=[self.engine.module],
                per_model_buffers={0: self.engine.module.buffers},
                data_parallel_group=copies,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=parts.rank(),
                distributed_optimizer_instance_id=0,
            )
            megatron_optimizer.grad_stats_parallel_group = (
                groups.get_intra_distributed_optimizer_instance_group()
            )
        else:
            megatron_optimizer = (
                Float16OptimizerWithFloat16Params(self.optimizer, config, no_scaler, _skip_state_init)
                if half
                else FP32Optimizer(self.optimizer, config, _skip_state_init)
            )
            megatron_optimizer.grad_stats_parallel_group = groups.get_model_parallel_group()
        megatron_optimizer.tp_group = groups.get_tensor_model_parallel_group()
        return megatron_optimizer

    # --- a step

    def finish_gradients(self) -> None:
        """Reduce the gradients and put them where the optimizer reads them; once per accumulation window."""
        if self.ready or not self.engine.has_gradients:
            return
        self.engine.finish_gradients()
        self.skips_step = bool(self.megatron_optimizer.prepare_grads())
        self.ready = True

    def clip_norm(self, limit: float, kind: float) -> float:
        """Scale all gradients to a norm of at most ``limit``, and return the norm before."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

        self.finish_gradients()
        grads = self.megatron_optimizer.get_main_grads_for_grad_norm()
        norm = float(
            get_grad_norm_fp32(
                # A stage may train nothing, which Megatron-LM expects for the norm 2 alone.
                grads or [torch.zeros(1, device=self.engine.device)],
                norm_type=kind,
                grad_stats_parallel_group=self.megatron_optimizer.get_grad_stats_parallel_group(),
            )
        )
        clip_grad_by_total_norm_fp32(self.megatron_optimizer.get_parameters(), limit, norm)
        self.norm = norm
        return norm

    def step(self) -> None:
        """Run one optimizer step; the plugin's clipping applies unless ``clip_norm`` ran in this window."""
        if not self.engine.has_gradients or self.engine.grads_stale:
            return
        self.finish_gradients()
        limit = self.megatron_optimizer.config.clip_grad
        if self.norm is None and limit > 0:
            self.clip_norm(limit, 2.0)
        self.last_norm = self.norm
        if not self.skips_step:
            self.megatron_optimizer.step_with_ready_grads()
        self._reset_window()
        self.engine.mark_stepped()

    def clear(self) -> None:
        """Drop the gradients."""
        self._reset_window()
        self.engine.clear()

    def _reset_window(self) -> None:
        self.megatron_optimizer.zero_grad()
        self.norm, self.ready = None, False

    # --- optimizer state of a parameter

    def full_param_state(self, parameter: nn.Parameter) -> OptimizerState:
        """Return the full optimizer state of a parameter; a collective of its data parallel replicas."""
        main, cut = self._main_param(parameter)
        state: OptimizerState = dict(self.optimizer.state.get(main, {})) if main is not None else {}
        if cut is None:
            return state
        return _gather_over_replicas(state, parameter, cut)

    def load_param_state(self, parameter: nn.Parameter, state: OptimizerState) -> None:
        """Load a state that ``full_param_state`` returned."""
        main, cut = self._main_param(parameter)
        if main is None:
            return
        fitted: OptimizerState = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                part = value if cut is None else value.reshape(-1)[cut]
                value = part.to(
                    main.device, main.dtype if value.is_floating_point() else value.dtype, copy=True
                )
            fitted[name] = value.clone() if isinstance(value, torch.Tensor) else value
        self.optimizer.state[main] = fitted

    def master_weight(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the master weight: in 32 bits, where the model computes in 16."""
        main, cut = self._main_param(parameter)
        if cut is not None:
            state = {"main": main.detach()} if main is not None else {}
            return _gather_over_replicas(state, parameter, cut)["main"]
        return (parameter if main is None else main).detach()

    def overwrite_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite a parameter and its 32-bit master weight."""
        parameter.data.copy_(value)
        main, cut = self._main_param(parameter)
        if main is not None and main is not parameter:
            main.data.copy_(value if cut is None else value.reshape(-1)[cut])

    def _main_param(self, parameter: nn.Parameter) -> tuple[Any, slice | None]:
        """Return the optimizer's tensor for a parameter, or None, and the slice that it covers."""
        if id(parameter) not in self._params:
            return None, None
        if not self.engine.plugin.use_distributed_optimizer:
            return getattr(parameter, "main_param", parameter), None
        index = self.megatron_optimizer.model_param_group_index_map.get(parameter)
        if index is None:
            return None, slice(0, 0)
        place = self.megatron_optimizer._get_model_param_range_map(parameter)["param"]
        group, order = index
        return self.megatron_optimizer.optimizer.param_groups[group]["params"][order], slice(
            place.start, place.end
        )


def _gather_over_replicas(state: OptimizerState, parameter: nn.Parameter, cut: slice) -> OptimizerState:
    """Assemble the state of a parameter from the slices of all data parallel replicas."""
    from megatron.core import parallel_state

    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(
        names, {name: _describe_value(value) for name, value in state.items()}, group=group
    )
    descriptions: Mapping[str, Any] = {
        name: like for rank_names in names for name, like in rank_names.items()
    }
    whole: OptimizerState = {}
    for name, (flat, dtype, value) in descriptions.items():
        if not flat:
            whole[name] = value
            continue
        total = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        if name in state:
            total[cut] = state[name].to(parameter.device)
        torch.distributed.all_reduce(total, group=group)
        whole[name] = total.view(parameter.shape)
    return whole


def _describe_value(value: Any) -> tuple[bool, Any, Any]:
    """Return (value is per element, its dtype, else the plain value itself)."""
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        return True, value.dtype, None
    return False, None, value


def _skip_state_init(*_: Any) -> None:
    """Stand in for Megatron-LM's function that initializes optimizer state; it is not needed."""


def _check_adam(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that Megatron-LM does not shard.

    Raises:
        PrepareError: it is one.
    """
    from megatron.core.optimizer import distrib_optimizer

    adam_class: Any = vars(distrib_optimizer)["Adam"]
    if not isinstance(optimizer, adam_class | torch.optim.AdamW):
        raise PrepareError(
            f"use_distributed_optimizer does not go with {type(optimizer).__name__}",
            why="Megatron-LM shards the state of AdamW only",
            fix="use torch.optim.AdamW, or leave use_distributed_optimizer out",
        )
