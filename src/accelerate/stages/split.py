"""Cuts a model into pipeline stages: lists its blocks in order and finds the most even division.

Only names, classes and sizes of a model are read; nothing is run. At the end of the file, values sent between
stages are flattened into their tensors, and batches are cut.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core import tree
from accelerate.core.errors import PrepareError, UnknownNameError

# A longer chain is merged to so many pieces before the search for the best division, which is O(n^2).
_MAX_PIECES = 400
_INFINITE = float("inf")


@dataclass(frozen=True)
class ModelBlock:
    """A module that stays on one stage.

    Attributes:
        name: its full name in the model.
        weights: (identity, bytes) of its tensors, and of tensors of its parents that come just before it.
    """

    name: str
    weights: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """The bytes of its tensors, each counted once."""
        return sum(dict(self.weights).values())


def list_blocks(
    model: nn.Module, no_split: Iterable[str] = (), at_least: int = 1, used: Sequence[str] | None = None
) -> list[ModelBlock]:
    """Return the blocks of ``model`` in order of definition.

    The items of a list of equal modules (the layers of a transformer) are blocks, and so is every module
    beside such a list. If these are fewer than ``at_least``, the largest are split into their children.

    Args:
        no_split: class names of modules that are never split.
        used: names of the modules to list, in this order; None takes all, in order of definition.
    """
    closed = frozenset(no_split)
    order = None if used is None else {name: index for index, name in enumerate(used)}

    def open_module(name: str) -> list[ModelBlock]:
        inner = _iterate_blocks(model.get_submodule(name), name, closed)
        return [block for block in inner if order is None or block.name in order]

    blocks = open_module("")
    while len(blocks) < at_least:
        openable = [b for b in blocks if _can_open(model.get_submodule(b.name), closed)]
        if not openable:
            break
        largest = max(openable, key=lambda block: block.size)
        index = blocks.index(largest)
        blocks[index : index + 1] = open_module(largest.name)
    return blocks if order is None else sorted(blocks, key=lambda block: order[block.name])


def _iterate_blocks(module: nn.Module, name: str, closed: frozenset[str]) -> Iterator[ModelBlock]:
    """Yield the blocks inside a module; the first one carries the module's own weights."""
    own_sizes = tensor_sizes(module, recurse=False)
    for label, child in module.named_children():
        full = f"{name}.{label}" if name else label
        atomic = _is_chain(module) or not _is_opened(child, closed)
        inner = (
            [ModelBlock(full, tensor_sizes(child))] if atomic else list(_iterate_blocks(child, full, closed))
        )
        for block in inner:
            yield ModelBlock(block.name, (*own_sizes, *block.weights))
            own_sizes = ()


def tensor_sizes(module: nn.Module, *, recurse: bool = True) -> tuple[tuple[int, int], ...]:
    """Return (identity, bytes) of the tensors of a module."""
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    return tuple((id(tensor), tensor.numel() * tensor.element_size()) for tensor in tensors)


def _is_chain(module: nn.Module) -> bool:
    """Return True for a list of equal modules, such as the layers of a model."""
    children = list(module.children())
    return isinstance(module, nn.ModuleList | nn.Sequential) and len({type(c) for c in children}) < len(
        children
    )


def _is_opened(module: nn.Module, closed: frozenset[str]) -> bool:
    return _can_open(module, closed) and any(
        _is_chain(inner) for inner in module.modules() if type(inner).__name__ not in closed
    )


def _can_open(module: nn.Module, closed: frozenset[str]) -> bool:
    return type(module).__name__ not in closed and next(module.children(), None) is not None


def find_even_cuts(
    chain: Sequence[ModelBlock], stages: int, budgets: Sequence[float] | None = None
) -> list[int]:
    """Return the first block of each stage but the first, as indices into ``chain``.

    The heaviest stage is as light as any division allows, and among those the stages are as even as can be
    (the least sum of squares). A tensor that two stages use counts for both.

    Args:
        budgets: the memory limit of each stage in bytes.

    Raises:
        PrepareError: fewer blocks than stages, or no division fits the budgets.
    """
    if len(chain) < stages:
        raise PrepareError(
            f"the model has {len(chain)} blocks for {stages} processes",
            why="each process runs at least one block",
            fix=f"start {max(len(chain), 1)} processes, or fewer",
        )
    pieces = _merge_blocks(chain, stages)
    weight = _make_size_lookup([[w for block in piece for w in block.weights] for piece in pieces])
    limits = list(budgets or [_INFINITE] * stages)

    def limited_cost(stage: int, begin: int, end: int) -> float:
        value = weight(begin, end)
        return value if value <= limits[stage] else _INFINITE

    heaviest = _find_best_division(len(pieces), stages, limited_cost, max)[0]
    if heaviest == _INFINITE:
        raise PrepareError(
            f"the model cannot be divided into {stages} stages within {[int(b) for b in limits]} bytes",
            why=f"its blocks take {[block.size for block in chain]} bytes, in this order",
            fix="give more memory in max_memory, or start more processes",
        )

    def squared_cost(stage: int, begin: int, end: int) -> float:
        value = limited_cost(stage, begin, end)
        return value * value if value <= heaviest else _INFINITE

    begins = list(accumulate((len(piece) for piece in pieces), initial=0))
    return [begins[cut] for cut in _find_best_division(len(pieces), stages, squared_cost, operator.add)[1]]


def _merge_blocks(chain: Sequence[ModelBlock], stages: int) -> list[Sequence[ModelBlock]]:
    """Return the chain in pieces of one block, or of several where it is very long."""
    step = -(-len(chain) // max(_MAX_PIECES, stages))
    if len(chain) // step < stages:
        step = 1
    return [chain[i : i + step] for i in range(0, len(chain), step)]


def _make_size_lookup(pieces: Sequence[Sequence[tuple[int, int]]]) -> Callable[[int, int], float]:
    """Return a function for the bytes of pieces ``begin..end``, each tensor counted once."""
    table: list[list[int]] = []
    for begin in range(len(pieces)):
        seen: set[int] = set()
        row, total = [0] * (begin + 1), 0
        for piece in pieces[begin:]:
            for identity, size in piece:
                if identity not in seen:
                    seen.add(identity)
                    total += size
            row.append(total)
        table.append(row)
    return lambda begin, end: table[begin][end]


def _find_best_division(
    count: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Find the cheapest division of ``count`` pieces by dynamic programming; return (cost, cuts).

    ``cost(stage, begin, end)`` is the cost of one stage, and ``join`` combines two costs.
    """
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, 0, end), []) for end in range(1, count + 1)}
    for stage in range(1, stages):
        extended: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            value, cut = min((join(best[c][0], cost(stage, c, end)), c) for c in range(stage, end))
            extended[end] = value, [*best[cut][1], cut]
        best = extended
    return best[count]


def check_split_points(model: nn.Module, split_points: Sequence[str], stages: int) -> list[str]:
    """Check the user's split points and return them as a list.

    Raises:
        UnknownNameError: one is not a module of the model; the nearest is suggested.
        PrepareError: there are not ``stages - 1`` different ones.
    """
    module_names = [name for name, _ in model.named_modules() if name]
    for name in split_points:
        if name not in module_names:
            raise UnknownNameError("module", name, module_names, where="in split_points")
    if len(split_points) != stages - 1 or len(set(split_points)) != len(split_points):
        raise PrepareError(
            f"{len(split_points)} split points make {len(split_points) + 1} stages, "
            f"but there are {stages} processes",
            why="each process runs one stage, and a split point is the first module of the next stage",
            fix=f'give {stages - 1} different module names, or split_points="auto"',
        )
    return list(split_points)


def stage_map(chain: Sequence[ModelBlock], cuts: Sequence[int]) -> dict[str, int]:
    """Return the stage of each block, by the block's name."""
    return {block.name: sum(index >= cut for cut in cuts) for index, block in enumerate(chain)}


_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, enum.Enum)
_PLAIN += (torch.dtype, torch.device, torch.memory_format, torch.layout)


class TensorLeafIndex(int):
    """The index of a tensor in the list of tensors."""

    def __repr__(self) -> str:
        return f"tensor {int(self)}"


def flatten_tree(value: Any, label: str) -> tuple[Any, list[torch.Tensor]]:
    """Flatten a tree; return (structure, tensors).

    Args:
        value: containers, tensors and plain values (numbers, strings, None, dtypes ...).
        label: the name of the value in errors.

    Raises:
        PrepareError: the tree has another leaf, such as a cache.
    """
    tensors: list[torch.Tensor] = []

    def to_index(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return TensorLeafIndex(len(tensors) - 1)

    for path, leaf in tree.iterate_leaves(value):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise PrepareError(
                f"{label}{path} is a {type(leaf).__name__}, which cannot go through a pipeline",
                why="only tensors and plain values are cut into chunks and sent from stage to stage",
                fix="leave it out (for a cache of keys and values: use_cache=False)",
            )
    return tree.map_tree(to_index, value), tensors


def unflatten_tree(structure: Any, tensors: Sequence[Any]) -> Any:
    """Return the tree of a structure and a list of tensors."""
    return tree.map_tree(lambda leaf: tensors[leaf] if isinstance(leaf, TensorLeafIndex) else leaf, structure)


def batch_size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the length of dimension 0 of the first tensor that has one.

    Raises:
        PrepareError: there is none, or it is 0.
    """
    size = next((t.shape[0] for t in tensors if t.dim()), 0)
    if size == 0:
        raise PrepareError(
            "a pipeline was called without a batch",
            why="no tensor among its arguments has a first dimension with something in it",
            fix="call the model with the tensors of at least one sample",
        )
    return size


def padded_rows(tensor: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Return rows of a batch, padded beyond its end with the last sample, which is a valid one."""
    rows = tensor[begin : begin + count]
    missing = count - rows.shape[0]
    return torch.cat([rows, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else rows


def start_transfers(operations: Iterable[dist.P2POp]) -> list[dist.Work]:
    """Start transfers one by one: those between two processes keep their order."""
    works = [op.op(op.tensor, op.peer, op.group, op.tag) for op in operations]
    return [work for work in works if work is not None]
