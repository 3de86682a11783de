"""Split a model into pipeline stages in place: a process keeps its stages' weights and drops the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core.errors import PrepareError, UnknownNameError
from accelerate.stages import split
from accelerate.strategy.sharding.sharding_layout import exchange_digests
from accelerate.world import collective


@dataclass(frozen=True)
class StageAssignment:
    """The assignment of blocks to stages.

    Attributes:
        stage_of: the stage of each block, by its name, in the order of definition.
        count: how many stages.
        processes: how many processes have them; stage n is on process n % processes.
    """

    stage_of: dict[str, int]
    count: int
    processes: int

    def blocks(self, stage: int) -> list[str]:
        """Return the blocks of a stage."""
        return [name for name, block_stage in self.stage_of.items() if block_stage == stage]

    def rank_of(self, name: str) -> int:
        """Return the pipeline rank that holds a block."""
        return self.stage_of[name] % self.processes

    def split_points(self) -> list[str]:
        """Return the first block of every stage but the first."""
        return [self.blocks(stage)[0] for stage in range(1, self.count)]


def assign_stages(model: nn.Module, options: Any, processes: int) -> StageAssignment:
    """Assign the blocks of a model to stages, so that the heaviest stage is as light as can be.

    Args:
        model: whole; its weights may have no values.
        options: a ``PipelineParallelConfig``.
        processes: those of the pipeline.

    Raises:
        UnknownNameError: a name of the options is no module of the model.
        PrepareError: fewer blocks than stages, or another number of split points.
    """
    count = processes * options.stages_per_process
    module_names = [name for name, _ in model.named_modules() if name]
    for name in options.on_all_stages:
        if name not in module_names:
            raise UnknownNameError("module", name, module_names, where="in on_all_stages")
    points = (
        [] if options.split_points == "auto" else split.check_split_points(model, options.split_points, count)
    )
    closed = options.no_split_module_classes
    closed = list(getattr(model, "_no_split_modules", None) or () if closed is None else closed)
    blocks = _find_blocks(model, closed, count, points, options.on_all_stages)
    if not points:
        cuts = split.find_even_cuts(blocks, count)
    else:
        names = [block.name for block in blocks]
        cuts = sorted(_block_index(names, point) for point in points)
        if len(set(cuts)) < len(cuts) or cuts[0] == 0:
            raise PrepareError(
                f"the split points {points} leave a stage without parameters",
                fix=f"choose among {', '.join(names[1:])}",
            )
    return StageAssignment(split.stage_map(blocks, cuts), count, processes)


def _find_blocks(
    model: nn.Module, closed: Sequence[str], count: int, points: Sequence[str], everywhere: Sequence[str]
) -> list[split.ModelBlock]:
    """The modules with parameters that are called as a whole, enough of them for all stages."""
    min_count = count
    while True:
        blocks = split.list_blocks(model, closed, min_count)
        stage_blocks = [
            b for b in blocks if _has_params(model, b.name) and not _is_within(b.name, everywhere)
        ]
        if len(stage_blocks) >= count or len(blocks) < min_count:
            break
        min_count = len(blocks) + 1
    for name in [*points, *everywhere]:
        while (outer := next((b for b in stage_blocks if name.startswith(f"{b.name}.")), None)) is not None:
            place = stage_blocks.index(outer)
            inner = [f"{outer.name}.{label}" for label, _ in model.get_submodule(outer.name).named_children()]
            stage_blocks[place : place + 1] = [
                split.ModelBlock(n, ())
                for n in inner
                if _has_params(model, n) and not _is_within(n, everywhere)
            ]
    return [split.ModelBlock(b.name, split.tensor_sizes(model.get_submodule(b.name))) for b in stage_blocks]


def _has_params(model: nn.Module, name: str) -> bool:
    return next(model.get_submodule(name).parameters(), None) is not None


def _is_within(name: str, outer: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in outer)


def _block_index(names: Sequence[str], point: str) -> int:
    """The first block that is, or is inside of, the module of that name."""
    place = next((i for i, name in enumerate(names) if _is_within(name, [point])), None)
    if place is None:
        raise UnknownNameError(
            "split point", point, names, why="a stage begins with a module that has parameters"
        )
    return place


@dataclass
class FullModelStateNames:
    """The names and holders of the unsplit model's tensors, for states by the user's names.

    Attributes:
        order: all names of its state, in their order.
        first: of each name of a parameter, the first name of the same parameter.
        holders: of each first name, and of each buffer, the processes of the pipeline that have it.
        buffers: the names of buffers, and of extra states.
    """

    order: list[str]
    first: dict[str, str]
    holders: dict[str, tuple[int, ...]]
    buffers: set[str]

    @classmethod
    def from_model(cls, model: nn.Module, cut: StageAssignment) -> FullModelStateNames:
        """Read the names and holders from an unsplit model."""
        places = {id(p): set(range(cut.processes)) for p in (*model.parameters(), *model.buffers())}
        inside: dict[int, set[int]] = {}
        for name in cut.stage_of:
            block = model.get_submodule(name)
            for tensor in (*block.parameters(), *block.buffers()):
                inside.setdefault(id(tensor), set()).add(cut.rank_of(name))
        outside = _tensors_outside_blocks(model, cut)
        places |= {key: ranks for key, ranks in inside.items() if key not in outside}
        called: dict[int, str] = {}
        first: dict[str, str] = {}
        holders: dict[str, tuple[int, ...]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            first[name] = called.setdefault(id(p), name)
            holders[first[name]] = tuple(sorted(places[id(p)]))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        holders |= {name: tuple(sorted(places[id(b)])) for name, b in buffers.items()}
        order = list(model.state_dict(keep_vars=True))
        extra = [name for name in order if name.endswith("_extra_state")]
        for name in extra:
            block = next((block for block in cut.stage_of if name.startswith(f"{block}.")), None)
            holders[name] = tuple(range(cut.processes)) if block is None else (cut.rank_of(block),)
        return cls(order, first, holders, {*buffers, *extra})


def _tensors_outside_blocks(model: nn.Module, cut: StageAssignment) -> set[int]:
    """The tensors between the blocks: all stages have them."""
    inner = {id(part) for name in cut.stage_of for part in model.get_submodule(name).modules()}
    between = [module for module in model.modules() if id(module) not in inner]
    tables = [table for m in between for table in (m._parameters, m._buffers)]
    return {id(t) for table in tables for t in table.values() if t is not None}


def check_same_model(model: nn.Module) -> set[int] | None:
    """Refuse models whose structure differs between processes, and those without values on rank 0.

    Returns:
        The ranks whose model lacks values; None in a dry run, which has no other processes.

    Raises:
        PrepareError: on all ranks.
    """
    empty_names = exchange_digests(model)
    if collective.world_size() == 1:
        return None
    if empty_names[0]:
        raise PrepareError(
            f"{empty_names[0]} is on the meta device, on rank 0 too",
            why="the weights of rank 0 are those that the stages begin with",
            fix="load the weights on rank 0",
        )
    return {rank for rank, name in enumerate(empty_names) if name}


@torch.no_grad()
def keep_local_stages(
    model: nn.Module, names: FullModelStateNames, group: Any, rank: int, device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """Move this process's weights to its device, and drop the others.

    Values are those of the process that has the first stage.

    Args:
        model: whole.
        names: which process has what.
        group: the processes; None if they are not there, or if the first has no values: sharding will
            broadcast those of the first pipeline.
        rank: this one's place among them.
        device: where its weights go.

    Returns:
        (old, new) of each parameter that was replaced, by ``id`` of the old one; new is None where it is on
        other stages.
    """
    replacements: dict[int, Any] = {}
    changed: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    called = [*model.named_parameters(), *model.named_buffers()]
    for name, old in called:
        holders = names.holders[name]
        if group is None:
            new = old if rank in holders else None
        else:
            new = _receive_param(old, holders, rank, group, device)
        replacements[id(old)] = new
        if isinstance(old, nn.Parameter) and new is not old:
            changed[id(old)] = old, new
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for label, old in list(table.items()):
                if old is None or id(old) not in replacements:
                    continue
                if replacements[id(old)] is not None:
                    table[label] = replacements[id(old)]  # type: ignore[assignment]
                else:
                    # Not a parameter any more, but code that asks for its type finds one.
                    del table[label]
                    vars(module)[label] = torch.empty_like(old, device="meta").detach()
    return changed


def _receive_param(
    old: torch.Tensor, holders: Sequence[int], rank: int, group: Any, device: torch.device
) -> torch.Tensor | None:
    """Receive a tensor from the first pipeline rank; return None where it is not held."""
    data = old.detach()
    if rank == 0 and any(place != 0 for place in holders):
        sent = data.to(device).contiguous()
        for place in holders:
            if place != 0:
                dist.send(sent, dist.get_global_rank(group, place), group)
    if rank not in holders:
        return None
    if rank != 0:
        data = torch.empty(old.shape, dtype=old.dtype, device=device)
        dist.recv(data, dist.get_global_rank(group, 0), group)
    if old.device == device:
        old.data = data.to(device)
        return old
    data = data.to(device)
    if not isinstance(old, nn.Parameter):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    return new
