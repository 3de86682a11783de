"""Gather full states by the names of the user's model from all shards, and load them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import tied_names
from accelerate.strategy.megatron.gpt_model import params_with_rules
from accelerate.strategy.megatron.model_families import WeightRule
from accelerate.world.collective import gather_to_first

if TYPE_CHECKING:
    from accelerate.strategy.megatron.engine import MegatronEngine
    from accelerate.strategy.megatron.user_optimizer_adapter import MegatronOptimizerStepper

RuleParams = Sequence[tuple[WeightRule, nn.Parameter | None]]


class MegatronFullStateConverter:
    """Converts between Megatron-LM's shards and full states by the user's names.

    Args:
        engine: of the model.
        rules: of its tensors.
    """

    def __init__(self, engine: MegatronEngine, rules: Mapping[str, WeightRule]) -> None:
        from megatron.core.utils import unwrap_model

        self.engine, self.layout, self.rules = engine, engine.layout, rules
        gpt: Any = unwrap_model(engine.module)
        params_by_rule = {id(rule): parameter for rule, parameter in params_with_rules(gpt, rules)}
        self.params: RuleParams = [
            (rule, params_by_rule.get(id(rule))) for rule in rules.values() if not rule.is_copy
        ]
        self.copies: RuleParams = [
            (rule, params_by_rule.get(id(rule))) for rule in rules.values() if rule.is_copy
        ]

    @property
    def receives_full(self) -> bool:
        """Return whether this process gets the full state: rank 0 does."""
        return self.layout.rank == 0

    # --- weights

    @torch.no_grad()
    def model_state(self) -> dict[str, Any]:
        """Gather the weights on the host of rank 0; other ranks return nothing."""
        full: dict[str, Any] = {}
        stepper = self.engine.stepper
        for rule, parameter in self.params:
            local = None
            if parameter is not None:
                local = {"": parameter.detach() if stepper is None else stepper.master_weight(parameter)}
            for name, values in self._gather_full(rule, local).items():
                full[name] = values[""]
        if not self.receives_full:
            return {}
        ties = tied_names(self.engine.base_model)
        full |= {alias: full[name] for alias, name in ties.items() if name in full}
        order = self.engine.base_model.state_dict()
        return {name: full[name] for name in order if name in full}

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> _IncompatibleKeys:
        """Load this process's shard of full weights, which every process has."""
        ties = tied_names(self.engine.base_model)
        weights = dict(state)
        weights |= {
            name: state[alias] for alias, name in ties.items() if alias in state and name not in state
        }
        expected_names = [name for rule, _ in self.params for name in rule.names]
        missing = [name for name in expected_names if name not in weights]
        more = [name for name in state if name not in expected_names and name not in ties]
        if strict and (missing or more):
            raise PrepareError(
                f"the state does not fit {type(self.engine.base_model).__name__}: "
                f"{len(missing)} missing, {len(more)} unexpected ({', '.join([*missing, *more][:4])})"
            )
        for rule, parameter in (*self.params, *self.copies):
            if parameter is not None and all(name in weights for name in rule.names):
                value = self.local_shard(rule, [weights[name] for name in rule.names])
                if self.engine.stepper is None:
                    parameter.copy_(value)
                else:
                    self.engine.stepper.overwrite_param(parameter, value)
        return _IncompatibleKeys(missing, more)

    def local_shard(self, rule: WeightRule, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this process's shard of full tensors."""
        return rule.shard([whole.to(self.engine.device) for whole in wholes], self.layout.tp)[
            self.layout.tp_rank
        ]

    # --- optimizer state

    @torch.no_grad()
    def optimizer_state(self, stepper: MegatronOptimizerStepper) -> dict[str, Any]:
        """Gather the optimizer state on rank 0, as a single process would have it."""
        numbers, state = stepper.groups.numbers, {}
        for rule, parameter in self.params:
            if any(name not in numbers for name in rule.names):
                continue
            local = None if parameter is None else stepper.full_param_state(parameter)
            for name, param_state in self._gather_full(rule, local).items():
                if param_state:
                    state[numbers[name]] = param_state
        groups = []
        for group, names in zip(stepper.megatron_optimizer.param_groups, stepper.groups.names, strict=True):
            rest = {name: value for name, value in group.items() if name != "params"}
            groups.append({**rest, "params": [numbers[name] for name in names]})
        return {"state": state if self.receives_full else {}, "param_groups": groups}

    @torch.no_grad()
    def load_optimizer(self, stepper: MegatronOptimizerStepper, state: Mapping[str, Any]) -> None:
        """Load this process's shard of a full optimizer state, which every process has."""
        numbers, saved_states = stepper.groups.numbers, state["state"]
        for rule, parameter in (*self.params, *self.copies):
            if parameter is None or any(numbers.get(name) not in saved_states for name in rule.names):
                continue
            several = [saved_states[numbers[name]] for name in rule.names]
            stepper.load_param_state(
                parameter,
                {key: self._local_value(rule, [values[key] for values in several]) for key in several[0]},
            )
        for group, saved in zip(stepper.megatron_optimizer.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _local_value(self, rule: WeightRule, values: list[Any]) -> Any:
        tensors = isinstance(values[0], torch.Tensor) and values[0].dim() > 0
        return self.local_shard(rule, values) if tensors else values[0]

    # --- gathering

    def _gather_full(self, rule: WeightRule, local: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Gather the tensors of a rule on rank 0: name -> key -> full tensor or plain value.

        Args:
            rule: of the tensor.
            local: key -> this process's shard; None where another stage has it.
        """
        full: dict[str, dict[str, Any]] = {name: {} for name in rule.names}
        if local is not None:
            for key, value in local.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    for name in rule.names:
                        full[name][key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                for name, whole in zip(rule.names, rule.join(self.gather_tp_shards(value)), strict=True):
                    full[name][key] = whole
        if self.layout.pp > 1:
            from megatron.core import parallel_state

            values = {(name, key): value for name, kept in full.items() for key, value in kept.items()}
            group: Any = parallel_state.get_pipeline_model_parallel_group()
            gathered = gather_to_first(values if local is not None else {}, group, self.engine.device)
            for (name, key), value in gathered.items():
                full[name][key] = value
        return {name: _copy_to_host(values) for name, values in full.items()} if self.receives_full else {}

    def gather_tp_shards(self, value: torch.Tensor) -> list[torch.Tensor]:
        """All-gather a tensor over the tensor parallel group."""
        if self.layout.tp == 1:
            return [value]
        from megatron.core import parallel_state

        full = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.layout.tp)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(full, value.contiguous(), group=group)
        return full


def _copy_to_host(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Copy values to the host, since training continues in the tensors themselves."""
    return {
        key: value.to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in kept.items()
    }
