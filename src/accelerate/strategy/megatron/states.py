"""Whole states by the names of the user's model, gathered from the parts of all processes, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from accelerate.core.errors import PrepareError
from accelerate.strategy.megatron.build import ruled, tied_names
from accelerate.strategy.megatron.rules import Rule

if TYPE_CHECKING:
    from accelerate.strategy.megatron.engine import MegatronEngine
    from accelerate.strategy.megatron.optimizer import Stepper

Parts = Sequence[tuple[Rule, nn.Parameter | None]]


class Whole:
    """Tensors of the user's model out of the engine's, on process 0, and back into them.

    Args:
        engine: of the model.
        rules: of its tensors.
    """

    def __init__(self, engine: MegatronEngine, rules: Mapping[str, Rule]) -> None:
        from megatron.core.utils import unwrap_model

        self.engine, self.layout, self.rules = engine, engine.layout, rules
        gpt: Any = unwrap_model(engine.module)
        own = {id(rule): parameter for rule, parameter in ruled(gpt, rules)}
        self.parts: Parts = [(rule, own.get(id(rule))) for rule in rules.values() if not rule.copy]
        self.copies: Parts = [(rule, own.get(id(rule))) for rule in rules.values() if rule.copy]

    @property
    def keeps(self) -> bool:
        """Whether this process gets the whole."""
        return self.layout.rank == 0

    # --- weights

    @torch.no_grad()
    def weights(self) -> dict[str, Any]:
        """The weights, on the host of process 0; nothing elsewhere."""
        found: dict[str, Any] = {}
        for rule, parameter in self.parts:
            local = None if parameter is None else {"": self._values(parameter)}
            for name, kept in self._gathered(rule, local).items():
                found[name] = kept[""]
        if not self.keeps:
            return {}
        ties = tied_names(self.engine.base_model)
        found |= {alias: found[name] for alias, name in ties.items() if name in found}
        order = self.engine.base_model.state_dict()
        return {name: found[name] for name in order if name in found}

    def _values(self, parameter: nn.Parameter) -> torch.Tensor:
        stepper = self.engine.stepper
        return parameter.detach() if stepper is None else stepper.weights(parameter)

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> _IncompatibleKeys:
        """Takes this process's part of whole weights, which every process has."""
        ties = tied_names(self.engine.base_model)
        known = dict(state)
        known |= {name: state[alias] for alias, name in ties.items() if alias in state and name not in state}
        wanted = [name for rule, _ in self.parts for name in rule.names]
        missing = [name for name in wanted if name not in known]
        more = [name for name in state if name not in wanted and name not in ties]
        if strict and (missing or more):
            raise PrepareError(
                f"the state does not fit {type(self.engine.base_model).__name__}: "
                f"{len(missing)} missing, {len(more)} unexpected ({', '.join([*missing, *more][:4])})"
            )
        for rule, parameter in (*self.parts, *self.copies):
            if parameter is not None and all(name in known for name in rule.names):
                self._overwrite(parameter, self._part(rule, [known[name] for name in rule.names]))
        return _IncompatibleKeys(missing, more)

    def _overwrite(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if self.engine.stepper is None:
            parameter.copy_(value)
        else:
            self.engine.stepper.overwrite(parameter, value)

    def _part(self, rule: Rule, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        return rule.cut([whole.to(self.engine.device) for whole in wholes], self.layout.tp)[
            self.layout.tp_rank
        ]

    # --- what optimizers keep

    @torch.no_grad()
    def optimizer(self, stepper: Stepper) -> dict[str, Any]:
        """The optimizer's state as that of one process would be, on process 0."""
        numbers, state = stepper.groups.numbers, {}
        for rule, parameter in self.parts:
            if any(name not in numbers for name in rule.names):
                continue
            local = None if parameter is None else stepper.kept(parameter)
            for name, kept in self._gathered(rule, local).items():
                if kept:
                    state[numbers[name]] = kept
        groups = []
        for group, names in zip(stepper.engine.param_groups, stepper.groups.names, strict=True):
            rest = {name: value for name, value in group.items() if name != "params"}
            groups.append({**rest, "params": [numbers[name] for name in names]})
        return {"state": state if self.keeps else {}, "param_groups": groups}

    @torch.no_grad()
    def load_optimizer(self, stepper: Stepper, state: Mapping[str, Any]) -> None:
        """Takes this process's part of a whole state, which every process has."""
        numbers, kept = stepper.groups.numbers, state["state"]
        for rule, parameter in (*self.parts, *self.copies):
            if parameter is None or any(numbers.get(name) not in kept for name in rule.names):
                continue
            several = [kept[numbers[name]] for name in rule.names]
            stepper.keep(
                parameter, {key: self._moment(rule, [one[key] for one in several]) for key in several[0]}
            )
        for group, saved in zip(stepper.engine.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _moment(self, rule: Rule, values: list[Any]) -> Any:
        tensors = isinstance(values[0], torch.Tensor) and values[0].dim() > 0
        return self._part(rule, values) if tensors else values[0]

    # --- from all processes

    def _gathered(self, rule: Rule, local: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
        """What belongs to each of a rule's names: key -> whole tensor or plain value; on process 0.

        Args:
            rule: of the tensor.
            local: key -> this process's part; None where another stage has it.
        """
        found: dict[str, dict[str, Any]] = {name: {} for name in rule.names}
        if local is not None:
            for key, value in local.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    for name in rule.names:
                        found[name][key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                for name, whole in zip(rule.names, rule.join(self._all_parts(value)), strict=True):
                    found[name][key] = whole
        if self.layout.pp > 1:
            found = self._to_first_stage(found, local is not None)
        return {name: _on_host(kept) for name, kept in found.items()} if self.keeps else {}

    def _all_parts(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all processes that share this layer."""
        if self.layout.tp == 1:
            return [value]
        from megatron.core import parallel_state

        found = [
            torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.layout.tp)
        ]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(found, value.contiguous(), group=group)
        return found

    def _to_first_stage(self, found: dict[str, Any], here: bool) -> dict[str, Any]:
        """From the stage that has it."""
        from megatron.core import parallel_state

        group: Any = parallel_state.get_pipeline_model_parallel_group()
        every: list[Any] = [None] * self.layout.pp
        described = (
            {n: {k: _described(v) for k, v in kept.items()} for n, kept in found.items()} if here else None
        )
        dist.all_gather_object(every, described, group=group)
        stage = next(index for index, each in enumerate(every) if each is not None)
        source = dist.get_global_rank(group, stage)
        result: dict[str, dict[str, Any]] = {}
        for name, kept in every[stage].items():
            result[name] = {}
            for key, (shape, dtype, plain) in kept.items():
                if dtype is None:
                    result[name][key] = plain
                    continue
                value = (
                    found[name][key].contiguous()
                    if here
                    else torch.empty(shape, dtype=dtype, device=self.engine.device)
                )
                dist.broadcast(value, src=source, group=group)
                result[name][key] = value
        return result


def _described(value: Any) -> tuple[Any, Any, Any]:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return tuple(value.shape), value.dtype, None
    return None, None, value


def _on_host(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Copies: training goes on in the tensors themselves."""
    return {
        key: value.to("cpu", copy=True).contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in kept.items()
    }
