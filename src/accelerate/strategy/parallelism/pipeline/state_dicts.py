"""Gather full state dicts from pipeline stages, and select a stage's part of a full one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accelerate.strategy.base import number_groups
from accelerate.strategy.parallelism.pipeline.model_split import FullModelStateNames
from accelerate.strategy.sharding.full_state import saved_numbers
from accelerate.world.collective import gather_to_first


@dataclass(frozen=True)
class UnsplitOptimizerParamGroups:
    """The parameter names and groups of an optimizer, before other stages' parameters were removed.

    Attributes:
        groups: the names of the parameters of each group.
        holders: the processes of the pipeline that have a parameter, by its name.
    """

    groups: list[list[str]]
    holders: dict[str, tuple[int, ...]]

    def local_groups(self, place: int) -> list[list[str]]:
        """Return the names that a process holds, by group."""
        return [[name for name in group if place in self.holders[name]] for group in self.groups]

    def checkpoint_names(self) -> list[list[str]]:
        """Return the names in sharded checkpoints; with several models, prefixed by the model's number."""
        models = sorted({name.partition(":")[0] for name in self.names})
        if len(models) == 1:
            return [[name.partition(":")[2] for name in group] for group in self.groups]
        split = [[name.partition(":") for name in group] for group in self.groups]
        return [[f"{models.index(model)}.{name}" for model, _, name in group] for group in split]

    @property
    def names(self) -> list[str]:
        """All names, in the order of state dict indices."""
        return [name for group in self.groups for name in group]


def gather_model_state(
    own: Mapping[str, Any], names: FullModelStateNames, group: Any, device: torch.device
) -> dict[str, Any]:
    """Gather a model's state, by the user's names in their order, on the first pipeline rank."""
    rank = dist.get_rank(group)
    sent_state = {name: value for name, value in own.items() if _is_sender(names, name, rank)}
    gathered = gather_to_first(sent_state, group, device)
    if rank != 0:
        return {}
    for alias, first in names.first.items():
        if first in gathered:
            gathered[alias] = gathered[first]
    # Also what is in no list: extra states of modules.
    return {name: gathered[name] for name in (*names.order, *gathered) if name in gathered}


def _is_sender(names: FullModelStateNames, name: str, here: int) -> bool:
    """Return whether this process sends a tensor: the first holder does, under its first name."""
    first = names.first.get(name, name)
    return first == name and names.holders.get(name, (here,))[0] == here


def select_model_state(
    state: Mapping[str, Any], names: FullModelStateNames, own: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Select a stage's part of a full model state.

    Args:
        state: whole, by the user's names.
        names: of the whole model.
        own: the stage's names.
        strict: refuse names that are missing or too many, on every stage alike.

    Raises:
        RuntimeError: as torch's ``load_state_dict`` does.
    """
    full = dict(state)
    values = {names.first[name]: full[name] for name in reversed(names.first) if name in full}
    full |= {alias: values[f] for alias, f in names.first.items() if alias not in full and f in values}
    known = set(names.order)
    missing = [name for name in names.order if name not in full]
    surplus = [name for name in full if name not in known]
    if strict and (missing or surplus):
        raise RuntimeError(
            f"the state does not fit the model: missing {missing[:6]}, unexpected {surplus[:6]}"
        )
    others = known - own.keys()
    return {name: value for name, value in full.items() if name not in others}


def gather_optimizer_state(
    own: Mapping[str, Any], layout: UnsplitOptimizerParamGroups, group: Any, device: torch.device
) -> dict[str, Any]:
    """Gather an optimizer's state on the first pipeline rank, as a single process would have it."""
    rank = dist.get_rank(group)
    called = [name for part in layout.local_groups(rank) for name in part]
    sent_state: dict[Any, Any] = {}
    for number, values in own["state"].items():
        if layout.holders[called[number]][0] == rank:
            sent_state.update({(called[number], key): value for key, value in values.items()})
    gathered = gather_to_first(sent_state, group, device)
    if rank != 0:
        return {}
    numbers = {name: number for number, name in enumerate(layout.names)}
    states: dict[int, dict[str, Any]] = {}
    for (name, key), value in gathered.items():
        states.setdefault(numbers[name], {})[key] = value
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(own["param_groups"], layout.groups, strict=True)
    ]
    return {**own, "state": dict(sorted(states.items())), "param_groups": groups}


def select_optimizer_state(
    state: Mapping[str, Any], layout: UnsplitOptimizerParamGroups, here: int
) -> dict[str, Any]:
    """Select a stage's part of a full optimizer state, with its optimizer's own indices.

    Raises:
        PrepareError: it is of another number of parameters.
    """
    numbers = dict(zip(layout.names, saved_numbers(state, len(layout.names)), strict=True))
    local_groups = layout.local_groups(here)
    saved = [numbers[name] for names in local_groups for name in names]
    states = {index: state["state"][number] for index, number in enumerate(saved) if number in state["state"]}
    groups = number_groups(state["param_groups"], map(len, local_groups))
    return {**state, "state": states, "param_groups": groups}


def original_groups_of(optimizer: Optimizer) -> UnsplitOptimizerParamGroups | None:
    """Return the recorded layout of an optimizer; None for one that no pipeline has pruned."""
    return getattr(optimizer, "_pipeline_record", None)
