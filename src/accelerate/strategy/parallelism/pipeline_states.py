"""Whole states out of those of the stages, and what a stage takes of a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.pipeline_cut import Names


@dataclass(frozen=True)
class Record:
    """What an optimizer was made for, before other stages' parameters were taken from it.

    Attributes:
        groups: the names of the parameters of each group.
        holders: the processes of the pipeline that have a parameter, by its name.
    """

    groups: list[list[str]]
    holders: dict[str, tuple[int, ...]]

    def here(self, place: int) -> list[list[str]]:
        """The names that a process has."""
        return [[name for name in group if place in self.holders[name]] for group in self.groups]

    def called(self) -> list[list[str]]:
        """The names by which checkpoints in parts go: of several models, with the number of each."""
        models = sorted({name.partition(":")[0] for name in self.names})
        if len(models) == 1:
            return [[name.partition(":")[2] for name in group] for group in self.groups]
        split = [[name.partition(":") for name in group] for group in self.groups]
        return [[f"{models.index(model)}.{name}" for model, _, name in group] for group in split]

    @property
    def names(self) -> list[str]:
        """All of them, in the order by which states number them."""
        return [name for group in self.groups for name in group]


def gathered(own: Mapping[Any, Any], group: Any, device: torch.device) -> dict[Any, Any]:
    """What the processes of a pipeline have, on the host of the first one; the others get nothing.

    Args:
        own: tensors on the host and plain values, by names that no other process gives.
        group: the processes.
        device: over which tensors travel.
    """
    here, size = dist.get_rank(group), dist.get_world_size(group)
    metas = {key: _Meta.of(value) for key, value in own.items()}
    listed: list[Any] = [None] * size
    dist.all_gather_object(listed, metas, group=group)
    found = dict(own) if here == 0 else {}
    for place in range(1, size):
        for key, meta in listed[place].items():
            if not isinstance(meta, _Meta):
                found.update({key: meta} if here == 0 else {})
            elif here == place:
                dist.send(own[key].to(device).contiguous(), dist.get_global_rank(group, 0), group)
            elif here == 0:
                tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                dist.recv(tensor, dist.get_global_rank(group, place), group)
                found[key] = tensor.cpu()
    return found


@dataclass(frozen=True)
class _Meta:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def whole_model(own: Mapping[str, Any], names: Names, group: Any, device: torch.device) -> dict[str, Any]:
    """A model's state by the user's names and in their order, on the first process of the pipeline."""
    here = dist.get_rank(group)
    mine = {name: value for name, value in own.items() if _gives(names, name, here)}
    found = gathered(mine, group, device)
    if here != 0:
        return {}
    for alias, first in names.first.items():
        if first in found:
            found[alias] = found[first]
    # Also what is in no list: extra states of modules.
    return {name: found[name] for name in (*names.order, *found) if name in found}


def _gives(names: Names, name: str, here: int) -> bool:
    """Whether this process gives a tensor: the first one that has it does, under its first name."""
    first = names.first.get(name, name)
    return first == name and names.holders.get(name, (here,))[0] == here


def own_model(
    state: Mapping[str, Any], names: Names, own: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """What a stage takes of a whole state.

    Args:
        state: whole, by the user's names.
        names: of the whole model.
        own: the stage's names.
        strict: refuse names that are missing or too many, on every stage alike.

    Raises:
        RuntimeError: as torch's ``load_state_dict`` does.
    """
    full = dict(state)
    for alias, first in names.first.items():
        group = [other for other, its in names.first.items() if its == first and other in full]
        if alias not in full and group:
            full[alias] = full[group[0]]
    missing = [name for name in names.order if name not in full]
    surplus = [name for name in full if name not in names.order]
    if strict and (missing or surplus):
        raise RuntimeError(
            f"the state does not fit the model: missing {missing[:6]}, unexpected {surplus[:6]}"
        )
    others = set(names.order) - set(own)
    return {name: value for name, value in full.items() if name not in others}


def whole_optimizer(
    own: Mapping[str, Any], record: Record, group: Any, device: torch.device
) -> dict[str, Any]:
    """An optimizer's state as one process would have it, on the first process of the pipeline."""
    here = dist.get_rank(group)
    called = [name for part in record.here(here) for name in part]
    mine: dict[Any, Any] = {}
    for number, values in own["state"].items():
        if record.holders[called[number]][0] == here:
            mine.update({(called[number], key): value for key, value in values.items()})
    found = gathered(mine, group, device)
    if here != 0:
        return {}
    numbers = {name: number for number, name in enumerate(record.names)}
    states: dict[int, dict[str, Any]] = {}
    for (name, key), value in found.items():
        states.setdefault(numbers[name], {})[key] = value
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(own["param_groups"], record.groups, strict=True)
    ]
    return {**own, "state": dict(sorted(states.items())), "param_groups": groups}


def own_optimizer(state: Mapping[str, Any], record: Record, here: int) -> dict[str, Any]:
    """What a stage takes of a whole state, numbered as its optimizer's own.

    Raises:
        PrepareError: it is of another number of parameters.
    """
    saved = [number for group in state["param_groups"] for number in group["params"]]
    if len(saved) != len(record.names):
        raise PrepareError(
            f"the state is of an optimizer of {len(saved)} parameters, and this one was made for "
            f"{len(record.names)}"
        )
    numbers = dict(zip(record.names, saved, strict=True))
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group, names in zip(state["param_groups"], record.here(here), strict=True):
        groups.append({**group, "params": list(range(count, count + len(names)))})
        for name in names:
            if numbers[name] in state["state"]:
                states[count] = state["state"][numbers[name]]
            count += 1
    return {**state, "state": states, "param_groups": groups}


def record_of(optimizer: Optimizer) -> Record | None:
    """What an optimizer was made for; None for one that no pipeline has seen."""
    return getattr(optimizer, "_pipeline_record", None)
