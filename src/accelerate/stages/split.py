"""Where a model is cut into stages: its blocks in order, and the division of them that is most even.

A pure room: it reads names, classes and sizes of a model, and runs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from accelerate.core.errors import PrepareError, UnknownNameError

# A chain longer than this is joined to pieces before the best division is looked for, which takes n^2.
_LONGEST = 400
_INFINITE = float("inf")


@dataclass(frozen=True)
class Block:
    """A module that is not cut.

    Attributes:
        name: its full name in the model.
        weights: (identity, bytes) of its tensors, and of those of its parents that come just before it.
    """

    name: str
    weights: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Bytes of its tensors, each counted once."""
        return sum(dict(self.weights).values())


def blocks(
    model: nn.Module, no_split: Iterable[str] = (), at_least: int = 1, used: Sequence[str] | None = None
) -> list[Block]:
    """The blocks of ``model`` in the order in which they were defined.

    The items of a list of equal modules (the layers of a transformer) are blocks, and so is whatever stands
    beside such a list. If these are fewer than ``at_least``, the largest are opened.

    Args:
        no_split: class names of modules that are never opened.
        used: names of the modules that count, in their order; None takes all, as they were defined.
    """
    closed = frozenset(no_split)
    order = None if used is None else {name: place for place, name in enumerate(used)}

    def inside(name: str) -> list[Block]:
        found = _inside(model.get_submodule(name), name, closed)
        return [block for block in found if order is None or block.name in order]

    found = inside("")
    while len(found) < at_least:
        openable = [b for b in found if _can_open(model.get_submodule(b.name), closed)]
        if not openable:
            break
        largest = max(openable, key=lambda block: block.size)
        place = found.index(largest)
        found[place : place + 1] = inside(largest.name)
    return found if order is None else sorted(found, key=lambda block: order[block.name])


def _inside(module: nn.Module, name: str, closed: frozenset[str]) -> Iterator[Block]:
    """The blocks of a module that is opened; its own weights go with the first."""
    own = weights(module, recurse=False)
    for label, child in module.named_children():
        full = f"{name}.{label}" if name else label
        atomic = _is_chain(module) or not _is_opened(child, closed)
        inner = [Block(full, weights(child))] if atomic else list(_inside(child, full, closed))
        for block in inner:
            yield Block(block.name, (*own, *block.weights))
            own = ()


def weights(module: nn.Module, *, recurse: bool = True) -> tuple[tuple[int, int], ...]:
    """(identity, bytes) of the tensors of a module."""
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    return tuple((id(tensor), tensor.numel() * tensor.element_size()) for tensor in tensors)


def _is_chain(module: nn.Module) -> bool:
    """Whether it is a list of equal modules: the layers of a model."""
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


def even_cuts(chain: Sequence[Block], stages: int, budgets: Sequence[float] | None = None) -> list[int]:
    """Where each stage but the first begins: indices into ``chain``.

    The heaviest stage is as light as any division allows, and among those the stages are as even as can be
    (the least sum of squares). A tensor that two stages use counts in both.

    Args:
        budgets: the most bytes of each stage.

    Raises:
        PrepareError: fewer blocks than stages, or no division keeps to the budgets.
    """
    if len(chain) < stages:
        raise PrepareError(
            f"the model has {len(chain)} blocks for {stages} processes",
            why="each process runs at least one block",
            fix=f"start {max(len(chain), 1)} processes, or fewer",
        )
    pieces = _shortened(chain, stages)
    weight = _weight_of([[w for block in piece for w in block.weights] for piece in pieces])
    limits = list(budgets or [_INFINITE] * stages)

    def allowed(stage: int, begin: int, end: int) -> float:
        value = weight(begin, end)
        return value if value <= limits[stage] else _INFINITE

    heaviest = _best(len(pieces), stages, allowed, max)[0]
    if heaviest == _INFINITE:
        raise PrepareError(
            f"the model cannot be divided into {stages} stages within {[int(b) for b in limits]} bytes",
            why=f"its blocks take {[block.size for block in chain]} bytes, in this order",
            fix="give more memory in max_memory, or start more processes",
        )

    def square(stage: int, begin: int, end: int) -> float:
        value = allowed(stage, begin, end)
        return value * value if value <= heaviest else _INFINITE

    begins = list(accumulate((len(piece) for piece in pieces), initial=0))
    return [begins[cut] for cut in _best(len(pieces), stages, square, operator.add)[1]]


def _shortened(chain: Sequence[Block], stages: int) -> list[Sequence[Block]]:
    """The chain in pieces of one block, or of several where it is very long."""
    step = -(-len(chain) // max(_LONGEST, stages))
    if len(chain) // step < stages:
        step = 1
    return [chain[i : i + step] for i in range(0, len(chain), step)]


def _weight_of(pieces: Sequence[Sequence[tuple[int, int]]]) -> Callable[[int, int], float]:
    """The bytes of pieces ``begin..end``, each tensor counted once."""
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


def _best(
    count: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The cheapest division of ``count`` pieces, by dynamic programming, and where its later stages begin.

    ``cost(stage, begin, end)`` is that of one stage, and ``join`` makes one cost of two.
    """
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, 0, end), []) for end in range(1, count + 1)}
    for stage in range(1, stages):
        reached: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            value, cut = min((join(best[c][0], cost(stage, c, end)), c) for c in range(stage, end))
            reached[end] = value, [*best[cut][1], cut]
        best = reached
    return best[count]


def named_cuts(model: nn.Module, split_points: Sequence[str], stages: int) -> list[str]:
    """The split points that the user gave, checked.

    Raises:
        UnknownNameError: one is no module of the model; the nearest is suggested.
        PrepareError: there are not ``stages - 1`` different ones.
    """
    known = [name for name, _ in model.named_modules() if name]
    for name in split_points:
        if name not in known:
            raise UnknownNameError("module", name, known, where="in split_points")
    if len(split_points) != stages - 1 or len(set(split_points)) != len(split_points):
        raise PrepareError(
            f"{len(split_points)} split points make {len(split_points) + 1} stages, "
            f"but there are {stages} processes",
            why="each process runs one stage, and a split point is the first module of the next stage",
            fix=f'give {stages - 1} different module names, or split_points="auto"',
        )
    return list(split_points)


def sizes_of(chain: Sequence[Block], cuts: Sequence[int]) -> list[int]:
    """Bytes of each stage."""
    borders = [0, *cuts, len(chain)]
    stages = [chain[a:b] for a, b in pairwise(borders)]
    return [sum(dict(weight for block in stage for weight in block.weights).values()) for stage in stages]


def stage_map(chain: Sequence[Block], cuts: Sequence[int]) -> dict[str, int]:
    """Which stage each block belongs to."""
    return {block.name: sum(index >= cut for cut in cuts) for index, block in enumerate(chain)}
