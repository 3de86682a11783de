"""The engine's optimizer around the user's own: which parameters it has, and what it keeps for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.megatron.rules import Rule

# What an optimizer keeps for a parameter, by its own names: "exp_avg", "step", ...
Kept = dict[str, Any]


class Groups:
    """The groups of the user's optimizer by the names of the user's parameters.

    Args:
        optimizer: the user's, before it gets the engine's parameters.
        model: the user's.

    Raises:
        PrepareError: it has stepped, or holds other parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in named for parameter in held)
        if strange:
            raise PrepareError(
                f"the {type(optimizer).__name__} holds {strange} parameters of no model in this prepare",
                why="Megatron-LM gives the model new parameters, and its optimizer has to follow them",
                fix="prepare both in one call: model, optimizer = accelerator.prepare(model, optimizer)",
            )
        if optimizer.state:
            raise PrepareError(
                f"the {type(optimizer).__name__} has stepped before prepare",
                why="what it keeps is for whole parameters, and Megatron-LM gives it parts of joined ones",
                fix="prepare it first, and accelerator.load_state(...) then",
            )
        self.names = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.of = {name: index for index, group in enumerate(self.names) for name in group}
        self.numbers = {name: n for n, name in enumerate(name for group in self.names for name in group)}

    def place(self, rule: Rule) -> int | None:
        """The group of a tensor of the engine; None if the optimizer has none of what it is made of.

        Raises:
            PrepareError: what it is made of lies in several groups.
        """
        places = {self.of.get(name) for name in rule.names}
        if len(places) > 1:
            raise PrepareError(
                f"{', '.join(rule.names)} are in different groups of the optimizer",
                why="the engine has one tensor for all of them",
                fix="put them into one group",
            )
        return places.pop()

    def follow(self, optimizer: torch.optim.Optimizer, ruled: Sequence[tuple[Rule, nn.Parameter]]) -> None:
        """Gives the optimizer the engine's parameters instead."""
        fresh: list[list[nn.Parameter]] = [[] for _ in self.names]
        for rule, parameter in ruled:
            place = self.place(rule)
            if place is not None and parameter.requires_grad:
                fresh[place].append(parameter)
        for group, parameters in zip(optimizer.param_groups, fresh, strict=True):
            group["params"] = parameters


class Stepper:
    """Steps the user's optimizer the engine's way.

    Args:
        optimizer: the user's, with the engine's parameters.
        engine: of the model.
        groups: of the user's optimizer by names.

    Attributes:
        engine: the engine's optimizer.
        last_norm: of all gradients in the last step, before clipping; None where nothing was clipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any, groups: Groups) -> None:
        self.optimizer, self.model, self.groups = optimizer, engine, groups
        # The optimizer may get other tensors in their places: 32-bit copies, or parts.
        self._held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.engine = self._made()
        self.norm: float | None = None
        self.last_norm: float | None = None
        self.ready = self.skips = False

    def _made(self) -> Any:
        from megatron.core import parallel_state as groups
        from megatron.core.optimizer import (
            DistributedOptimizer,
            Float16OptimizerWithFloat16Params,
            FP32Optimizer,
            OptimizerConfig,
        )

        plugin, half = self.model.plugin, self.model.module_config.bf16
        config = OptimizerConfig(
            bf16=half,
            params_dtype=self.model.module_config.params_dtype,
            clip_grad=plugin.gradient_clipping or 0.0,
            use_distributed_optimizer=plugin.use_distributed_optimizer,
        )
        no_scaler: Any = None
        if plugin.use_distributed_optimizer:
            _check_adam(self.optimizer)
            copies: Any = groups.get_data_parallel_group(with_context_parallel=True)
            parts: Any = groups.get_model_parallel_group()
            made: Any = DistributedOptimizer(
                self.optimizer,
                config,
                no_scaler,
                _nothing,
                model_chunks=[self.model.module],
                per_model_buffers={0: self.model.module.buffers},
                data_parallel_group=copies,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=parts.rank(),
                distributed_optimizer_instance_id=0,
            )
            made.grad_stats_parallel_group = groups.get_intra_distributed_optimizer_instance_group()
        else:
            made = (
                Float16OptimizerWithFloat16Params(self.optimizer, config, no_scaler, _nothing)
                if half
                else FP32Optimizer(self.optimizer, config, _nothing)
            )
            made.grad_stats_parallel_group = groups.get_model_parallel_group()
        made.tp_group = groups.get_tensor_model_parallel_group()
        return made

    # --- a step

    def prepare(self) -> None:
        """Complete gradients, where the optimizer looks for them; once in a window."""
        if self.ready or not self.model.calls:
            return
        self.model.finish()
        self.skips = bool(self.engine.prepare_grads())
        self.ready = True

    def clip(self, limit: float, kind: float) -> float:
        """Scales all gradients to a norm of at most ``limit``; the norm before."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

        self.prepare()
        norm = float(
            get_grad_norm_fp32(
                self.engine.get_main_grads_for_grad_norm(),
                norm_type=kind,
                grad_stats_parallel_group=self.engine.get_grad_stats_parallel_group(),
            )
        )
        clip_grad_by_total_norm_fp32(self.engine.get_parameters(), limit, norm)
        self.norm = norm
        return norm

    def step(self) -> None:
        """One step. What ``clip`` has done in this window counts; else the plugin's limit does."""
        if not self.model.calls or self.model.stale:
            return
        self.prepare()
        limit = self.engine.config.clip_grad
        if self.norm is None and limit > 0:
            self.clip(limit, 2.0)
        self.last_norm = self.norm
        if not self.skips:
            self.engine.step_with_ready_grads()
        self._forget()
        self.model.stepped()

    def clear(self) -> None:
        """Drops gradients."""
        self._forget()
        self.model.clear()

    def _forget(self) -> None:
        self.engine.zero_grad()
        self.norm, self.ready = None, False

    # --- what is kept for a parameter

    def kept(self, parameter: nn.Parameter) -> Kept:
        """What the optimizer keeps for this process's part of a tensor, whole; a collective of its copies."""
        main, cut = self._main(parameter)
        state: Kept = dict(self.optimizer.state.get(main, {})) if main is not None else {}
        if cut is None:
            return state
        return _assembled(state, parameter, cut)

    def keep(self, parameter: nn.Parameter, state: Kept) -> None:
        """Puts back what ``kept`` gave."""
        main, cut = self._main(parameter)
        if main is None:
            return
        fitted: Kept = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                part = value if cut is None else value.reshape(-1)[cut]
                value = part.to(
                    main.device, main.dtype if value.is_floating_point() else value.dtype, copy=True
                )
            fitted[name] = value.clone() if isinstance(value, torch.Tensor) else value
        self.optimizer.state[main] = fitted

    def weights(self, parameter: nn.Parameter) -> torch.Tensor:
        """The values that are trained: in 32 bits, where the model computes in 16."""
        main, cut = self._main(parameter)
        if cut is not None:
            state = {"main": main.detach()} if main is not None else {}
            return _assembled(state, parameter, cut)["main"]
        return (parameter if main is None else main).detach()

    def overwrite(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Gives a parameter and its 32-bit copy new values."""
        parameter.data.copy_(value)
        main, cut = self._main(parameter)
        if main is not None and main is not parameter:
            main.data.copy_(value if cut is None else value.reshape(-1)[cut])

    def _main(self, parameter: nn.Parameter) -> tuple[Any, slice | None]:
        """The tensor that the optimizer has for a parameter, and which part of it; None where it has none."""
        if id(parameter) not in self._held:
            return None, None
        if not self.model.plugin.use_distributed_optimizer:
            return getattr(parameter, "main_param", parameter), None
        index = self.engine.model_param_group_index_map.get(parameter)
        if index is None:
            return None, slice(0, 0)
        place = self.engine._get_model_param_range_map(parameter)["param"]
        group, order = index
        return self.engine.optimizer.param_groups[group]["params"][order], slice(place.start, place.end)


def _assembled(state: Kept, parameter: nn.Parameter, cut: slice) -> Kept:
    """The parts of all copies of the model, put together: each has some elements."""
    from megatron.core import parallel_state

    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    names: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(
        names, {name: _like(value) for name, value in state.items()}, group=group
    )
    every: Mapping[str, Any] = {name: like for found in names for name, like in found.items()}
    whole: Kept = {}
    for name, (flat, dtype, value) in every.items():
        if not flat:
            whole[name] = value
            continue
        total = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        if name in state:
            total[cut] = state[name].to(parameter.device)
        torch.distributed.all_reduce(total, group=group)
        whole[name] = total.view(parameter.shape)
    return whole


def _like(value: Any) -> tuple[bool, Any, Any]:
    """Whether a value has an element for each of the parameter's, its dtype, and else itself."""
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        return True, value.dtype, None
    return False, None, value


def _nothing(*_: Any) -> None:
    """The engine's way to make an optimizer's state ahead: not needed."""


def _check_adam(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that the engine does not shard.

    Raises:
        PrepareError: it is one.
    """
    from megatron.core.optimizer import distrib_optimizer

    own: Any = vars(distrib_optimizer)["Adam"]
    if not isinstance(optimizer, own | torch.optim.AdamW):
        raise PrepareError(
            f"use_distributed_optimizer does not go with {type(optimizer).__name__}",
            why="the engine shards the state of AdamW only",
            fix="use torch.optim.AdamW, or leave use_distributed_optimizer out",
        )
