"""Control flow of user code: can one process execute both of two lines?

Ranks may call the same collective from two lines of one function on purpose: the lines are branches of a
condition, or are under a condition on the rank. Otherwise one rank has skipped a call, and would receive the
values of another call.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import Any

# A step from the module down to a statement: the parent node, its field, and the index in that field.
PathStep = tuple[ast.AST, str, int]

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.Match, getattr(ast, "TryStar", ast.Try))
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_RANK = re.compile(r"rank|main|process_index|is_last|is_local", re.IGNORECASE)


@lru_cache(maxsize=256)
def on_same_path(file: str, lines: frozenset[int]) -> bool:
    """Return True if one process certainly executes two of the lines.

    That is: in the same function, without a branch or a condition on the rank between them.

    Args:
        file: the source file; the result is False when its text is not known.
        lines: from 1.
    """
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a notebook cell with magic commands
        return False
    paths = [path for line in lines if (path := list(_path_to_line(tree, line)))]
    return any(_can_follow(first, other) for first, other in combinations(paths, 2))


def _path_to_line(tree: ast.AST, line: int) -> Iterator[PathStep]:
    """Yield the path from the module down to the innermost statement of a line."""
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


def _can_follow(one: list[PathStep], other: list[PathStep]) -> bool:
    """Return True if a process that executed one statement can go on to the other."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared == len(one) or shared == len(other):
        return False  # the same statement
    (node, field, place), (_, other_field, other_place) = one[shared], other[shared]
    rest = [*one[shared:], *other[shared:]]
    if any(isinstance(each, _FUNCTION) for each, _, _ in rest[1:] if each is not node):
        return False
    if field != other_field or field == "handlers":
        return not isinstance(node, _BRANCHES)
    if any(isinstance(each, ast.If) and _RANK.search(ast.unparse(each.test)) for each, _, _ in rest):
        return False
    earlier = one if place < other_place else other
    return not any(_block_exits(*step) for step in earlier[shared + 1 :])


def _block_exits(node: ast.AST, field: str, place: int) -> bool:
    """Return True if the block of a statement ends with return, raise, continue or break."""
    block: Any = getattr(node, field, None)
    return isinstance(block, list) and isinstance(block[-1], _EXITS)
