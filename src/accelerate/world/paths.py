"""Whether two lines of a program can both be on the way of one process.

Ranks that meet in the same collective, called from two lines of one function, may mean it so: the lines are
branches of a condition, or stand under a condition on the rank. Otherwise one rank has left out a call, and
would take another's values for those it asked for.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import Any

# A step of the way to a statement: the node that holds it, in which of its fields, at which place.
Step = tuple[ast.AST, str, int]

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.Match, getattr(ast, "TryStar", ast.Try))
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_RANK = re.compile(r"rank|main|process_index|is_last|is_local", re.IGNORECASE)


@lru_cache(maxsize=256)
def one_way(file: str, lines: frozenset[int]) -> bool:
    """Whether two of the lines are certainly on one way: same function, no branch and no rank between them.

    Args:
        file: of the program; False when its text is not known.
        lines: from 1.
    """
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell of a notebook with its own commands
        return False
    ways = [way for line in lines if (way := list(_way(tree, line)))]
    return any(_both(one, other) for one, other in combinations(ways, 2))


def _way(tree: ast.AST, line: int) -> Iterator[Step]:
    """From the module down to the innermost statement that a line belongs to."""
    node = tree
    while True:
        for field, place, child in _statements(node):
            if child.lineno <= line <= (child.end_lineno or child.lineno):
                yield node, field, place
                node = child
                break
        else:
            return


def _statements(node: ast.AST) -> Iterator[tuple[str, int, ast.stmt | ast.excepthandler]]:
    fields: Iterator[tuple[str, Any]] = ast.iter_fields(node)
    for field, value in fields:
        if not isinstance(value, list):
            continue
        children: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        for place, child in enumerate(children):
            if isinstance(child, ast.stmt | ast.excepthandler):
                yield field, place, child
            elif isinstance(child, ast.match_case):
                yield from ((f"case {place}", inner, s) for inner, s in enumerate(child.body))


def _both(one: list[Step], other: list[Step]) -> bool:
    """Whether a process that has come along one way can go on to the end of the other."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared == len(one) or shared == len(other):
        return False  # one statement
    (node, field, place), (_, other_field, other_place) = one[shared], other[shared]
    apart = [*one[shared:], *other[shared:]]
    if any(isinstance(each, _FUNCTION) for each, _, _ in apart[1:] if each is not node):
        return False
    if field != other_field or field == "handlers":
        return not isinstance(node, _BRANCHES)
    if any(isinstance(each, ast.If) and _RANK.search(ast.unparse(each.test)) for each, _, _ in apart):
        return False
    earlier = one if place < other_place else other
    return not any(_leaves(*step) for step in earlier[shared + 1 :])


def _leaves(node: ast.AST, field: str, place: int) -> bool:
    """Whether the block that holds a statement ends by leaving."""
    block: Any = getattr(node, field, None)
    return isinstance(block, list) and isinstance(block[-1], _LEAVES)
