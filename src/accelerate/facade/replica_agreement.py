"""The comparison of ranks: of optimizers when they are prepared, of replicas when a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import nn

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.core.user_warning import warn_user
from accelerate.world import collective

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def settle_optimizers(optimizers: Sequence[Any], options: list[Any]) -> None:
    """Refuse optimizers with other options on other ranks; give those with another state that of rank 0.

    Collective; called when a digest has told that they differ.

    Args:
        optimizers: the optimizers of one ``prepare``.
        options: of each, the options of each group.

    Raises:
        PrepareError: options differ, or the weights are on the meta device; on all ranks.
    """
    is_meta = any(p.is_meta for o in optimizers for group in o.param_groups for p in group["params"])
    answers = collective.all_gather_object((options, is_meta), "prepare(optimizer)")
    _refuse_other_options(optimizers, [options for options, _ in answers])
    if any(is_meta for _, is_meta in answers):
        raise PrepareError(
            "the state of the optimizer is not the same on all ranks, and parameters are on the meta device",
            why="each rank shards the state that it has",
            fix="load the state after prepare, with accelerator.load_state",
        )
    for optimizer in (each for each in optimizers if isinstance(each, torch.optim.Optimizer)):
        state = optimizer.state_dict()
        # Numbers stand for the parameters, which are each rank's own.
        first: dict[str, Any] = collective.broadcast_object(tree.map_tree(_to_host, state["state"]), 0)
        if collective.rank() != 0:
            optimizer.load_state_dict({**state, "state": first})
    if collective.rank() == 0:
        warn_user(
            "the state of an optimizer was not the same on all ranks when it was prepared: that of rank 0 "
            "counts, as the weights of rank 0 do"
        )


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _refuse_other_options(optimizers: Sequence[Any], options_by_rank: list[list[Any]]) -> None:
    for rank, options in enumerate(options_by_rank):
        pairs = zip(optimizers, options_by_rank[0], options, strict=False)
        for optimizer, groups, others in pairs:
            if len(groups) != len(others):
                _refuse(optimizer, "the number of groups", len(groups), len(others), rank)
            for number, (group, other) in enumerate(zip(groups, others, strict=True)):
                for name in dict.fromkeys((*group, *other)):
                    if group.get(name) != other.get(name):
                        what = f"{name} of group {number}"
                        _refuse(optimizer, what, group.get(name), other.get(name), rank)


def _refuse(optimizer: Any, what: str, first: Any, other: Any, rank: int) -> None:
    raise PrepareError(
        f"{what} of the {type(optimizer).__name__} is {first} on rank 0 and {other} on rank {rank}",
        why="the ranks train one model: with other options on each, its replicas or shards drift apart",
        fix="make the optimizer with the same options on all ranks",
    )


def check_replicas(models: Iterable[nn.Module], optimizers: Iterable[Any], action: str) -> None:
    """Warn on rank 0 about the first parameter of a replica, or the first learning rate, that differs.

    Collective. Each parameter is read once, and one message is exchanged; a checksum is the sum of its bits.

    Args:
        models: those of which each rank has a replica.
        optimizers: those of all models; the ranks step with equal learning rates, sharded or not.
        action: the save, for the error if another rank does not save.
    """
    named = [
        (f"{name} of model {number}" if number else name, parameter)
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    ]
    sums = [_bits(parameter).sum(dtype=torch.int64) for _, parameter in named]
    devices = {total.device for total in sums}
    # One copy to the host for each device.
    by_device = {d: iter(torch.stack([s for s in sums if s.device == d]).tolist()) for d in devices}
    facts = {name: next(by_device[total.device]) for (name, _), total in zip(named, sums, strict=True)}
    rates = {
        f"the learning rate of group {number} of the {type(optimizer.optimizer).__name__}": repr(
            group.get("lr")
        )
        for optimizer in optimizers
        for number, group in enumerate(optimizer.optimizer.param_groups)
    }
    local: dict[str, Any] = {**facts, **rates}
    digest = crc32(repr(local).encode())
    if len(set(collective.all_gather_object(digest, "save_state", label=action))) == 1:
        return
    by_rank: list[dict[str, Any]] = collective.all_gather_object(local, "save_state", label=action)
    if collective.rank() == 0:
        warn_user(_describe_drift(by_rank))


def _describe_drift(by_rank: list[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for facts in by_rank for name in facts)
    other = [name for name in names if len({facts.get(name) for facts in by_rank}) > 1]
    ranks = [rank for rank, facts in enumerate(by_rank) if facts.get(other[0]) != by_rank[0].get(other[0])]
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    return (
        f"the ranks have drifted apart: {other[0]}{more} of rank {ranks[0]} is not that of rank 0, whose "
        "values are saved. A gradient was not averaged, or the ranks step differently"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach()
    data = torch.view_as_real(data) if data.is_complex() else data
    return data.view(_INTEGERS[data.itemsize])
