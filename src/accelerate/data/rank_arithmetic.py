"""Static analysis of the user's code: does it pick samples by its rank, or does it only mention the rank?

A dataset that prints its rank, seeds by it or stores it holds the whole data; one that slices or indexes by
it, or hands the rank and the world size to a function, divides the data. Nothing is called here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import ChainDataset, Dataset

# Attribute names of samplers and streams for the number of shards and the index of theirs.
SIZE_ATTRIBUTES = (
    *("num_replicas", "num_processes", "world_size", "world", "num_ranks", "num_shards", "n_shards"),
    *("dp_size", "dp_world_size", "data_parallel_size"),
)
RANK_ATTRIBUTES = (
    *("rank", "process_index", "global_rank", "shard_index", "shard_id", "shard_rank", "shard"),
    *("dp_rank", "data_parallel_rank"),
)
# Names by which code asks for its rank and the world size.
RANK_CALLS = frozenset(("get_rank", "process_index", "RANK", "get_node_local_rank", "local_process_index"))
SIZE_CALLS = frozenset(("get_world_size", "num_processes", "WORLD_SIZE"))
LIBRARIES = frozenset(
    (
        *("torch", "accelerate", "datasets", "torchdata", "numpy", "transformers"),
        *("builtins", "functools", "typing", "abc"),
    )
)
# Names in code; those of shards also name files and rows there.
_RANK_NAMES = RANK_CALLS | {name for name in RANK_ATTRIBUTES if "rank" in name}
_SIZE_NAMES = SIZE_CALLS | {name for name in SIZE_ATTRIBUTES if "shards" not in name}
_SLICING_CALLS = frozenset(("range", "islice", "arange", "Subset"))
# Words of the names of functions and variables to which the rank says who logs, draws or computes where.
_OTHER_USES = frozenset(
    (
        *("print", "log", "logger", "info", "debug", "warn", "warning", "error", "write", "format", "str"),
        *("seed", "random", "rng", "generator", "device", "gpu", "cuda", "init_process_group", "__init__"),
    )
)
# How far the objects that a stream holds are followed: levels, and objects in all.
_HELD_DEPTH = 6
_HELD_COUNT = 200
# Calls of the user's global functions, in one another, that are read.
_HELPER_DEPTH = 3


def own_functions(holder: Any, with_init: bool = True) -> list[Any]:
    """Return the functions of the user's classes of an object: methods, properties and static ones."""
    own = [c for c in type(holder).__mro__ if not is_of_library(c)]
    members = [member for c in own for name, member in vars(c).items() if with_init or name != "__init__"]
    return [getattr(each, "__func__", getattr(each, "fget", each)) for each in members]


def is_of_library(item: Any) -> bool:
    """Return whether a class or function comes from a library whose code is known."""
    return str(getattr(item, "__module__", None)).partition(".")[0] in LIBRARIES


def function_names(function: Any, depth: int = _HELPER_DEPTH) -> Iterator[str]:
    """Yield the names and strings in a function and in the user's global functions that it calls."""
    code = function if isinstance(function, types.CodeType) else getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return
    yield from code.co_names
    outside: dict[str, Any] = getattr(function, "__globals__", {})
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from function_names(constant, depth)
    for name in code.co_names if depth else ():
        called = outside.get(name)
        if isinstance(called, types.FunctionType):
            if not is_of_library(called):
                yield from function_names(called, depth - 1)
            else:
                yield called.__name__


def held_functions(stream: Dataset[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the functions that a stream holds, with a name: its own, and those of objects in its attributes.

    Attributes, lists, tuples, values of dicts, bound methods and partials are followed some levels deep.
    """
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(stream, _HELD_DEPTH)]
    while todo and len(seen) < _HELD_COUNT:
        item, depth = todo.pop(0)
        if id(item) in seen or isinstance(item, type | torch.Tensor | torch.nn.Module):
            continue
        seen.add(id(item))
        inside: Iterable[Any] = ()
        if isinstance(item, list | tuple | dict):
            inside = [*islice(item.values() if isinstance(item, dict) else item, _HELD_COUNT)]
        elif isinstance(item, functools.partial):
            inside = (item.func, *item.args, *item.keywords.values())
        elif isinstance(item, types.MethodType):
            inside = (item.__func__, item.__self__)
        elif isinstance(item, types.FunctionType):
            if not is_of_library(item):
                yield item.__name__, [item]
        elif not is_of_library(type(item)) or isinstance(item, ChainDataset):
            inside = vars(item).values() if hasattr(item, "__dict__") else ()
            if item is not stream:
                yield type(item).__name__, own_functions(item)
        if depth:
            todo += [(each, depth - 1) for each in inside if callable(each) or hasattr(each, "__dict__")]
            todo += [(each, depth - 1) for each in inside if isinstance(each, list | tuple | dict)]


def picks_by_rank(functions: Iterable[Any], *attributes: str) -> bool:
    """Return whether the functions compute with the rank, as code does that picks samples by it.

    Args:
        functions: those of one object; the user's global functions that they call are read too.
        attributes: more names of the rank, then of the world size.

    Returns:
        True also where a function that mentions the rank has no source, as typed into an interpreter.
    """
    ranks, sizes = _RANK_NAMES.union(attributes[:1]), _SIZE_NAMES.union(attributes[1:])
    every = _with_helpers(functions, _HELPER_DEPTH)
    mentions = [function for function in every if _names_any(function, ranks)]
    trees = [tree for function in every if (tree := _parse(function)) is not None]
    if not mentions or any(_parse(function) is None for function in mentions):
        return bool(mentions)
    uses = _RankUses(ranks, sizes)
    for tree in (*trees, *trees):  # an attribute may be read in a function before the one that sets it
        uses.visit(tree)
    return uses.is_picking


def picks_by_rank_and_size(functions: Iterable[Any]) -> bool:
    """Return whether the functions pick samples by the rank, and mention the world size."""
    every = _with_helpers(functions, _HELPER_DEPTH)
    return any(_names_any(function, _SIZE_NAMES) for function in every) and picks_by_rank(every)


def _names_any(function: types.FunctionType, names: frozenset[str]) -> bool:
    code = function.__code__
    own = [*function_names(function, 0), *code.co_varnames, *code.co_freevars]
    return not names.isdisjoint(own) or not names.isdisjoint(name.strip("_") for name in own)


def _parse(function: types.FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a function typed into an interpreter, or a part of a line
        return None


def _with_helpers(functions: Iterable[Any], depth: int) -> list[types.FunctionType]:
    """Return the functions and the user's global functions that they call, each once."""
    known: dict[types.FunctionType, None] = {}
    todo = [function for function in functions if isinstance(function, types.FunctionType)]
    for _ in range(depth + 1):
        known.update(dict.fromkeys(todo))
        called = [f.__globals__.get(name) for f in todo for name in f.__code__.co_names]
        todo = [
            f for f in called if isinstance(f, types.FunctionType) and not is_of_library(f) and f not in known
        ]
    return [*known]


class _RankUses(ast.NodeVisitor):
    """A walk through code that looks for arithmetic, subscripts and arguments with the rank.

    Texts, comparisons with other numbers than a remainder, logs, seeds and devices are no such uses.

    Args:
        ranks, sizes: names of the rank and the world size; variables that are assigned the rank are added.

    Attributes:
        is_picking: whether there is such a use.
    """

    def __init__(self, ranks: frozenset[str], sizes: frozenset[str]) -> None:
        self.ranks, self.sizes = set(ranks), sizes
        self.is_picking = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = set(self.ranks)
        self.generic_visit(node)
        variables = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        self.ranks -= variables - before

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_other_use(_name_of(node.target)):
            self.visit_BinOp(ast.BinOp(node.target, node.op, node.value))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts, strict=False):
                self._assign(each, part)
        elif not _is_other_use(name := _name_of(target)):
            self.visit(value)
            if name and self._names(value, self.ranks):
                self.ranks.add(name)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not _is_text(node):
            self.is_picking |= self._names(node, self.ranks)
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.is_picking |= not isinstance(node.slice, ast.Constant) and self._names(node.slice, self.ranks)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        if any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in sides):
            self.is_picking |= any(self._names(each, self.ranks) for each in sides)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if _is_other_use(name):
            return
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(self._names(each, self.ranks) for each in arguments):
            has_size = any(self._names(each, self.sizes) for each in arguments)
            self.is_picking |= has_size or name in _SLICING_CALLS
        self.generic_visit(node)

    def _names(self, node: ast.AST, names: Collection[str]) -> bool:
        """Return whether an expression has one of the names, outside of texts, comparisons and other uses."""
        if isinstance(node, ast.JoinedStr | ast.Compare) or _is_text(node):
            return False
        if isinstance(node, ast.Call) and _is_other_use(_name_of(node.func)):
            return False
        name = _name_of(node)
        return (
            name in names
            or name.strip("_") in names
            or any(self._names(each, names) for each in ast.iter_child_nodes(node))
        )


def _is_other_use(name: str) -> bool:
    words = name.lower().split("_")
    return name in _OTHER_USES or not _OTHER_USES.isdisjoint(words)


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_text(node: ast.AST) -> bool:
    """Return whether an operator joins or formats texts."""
    if not isinstance(node, ast.BinOp):
        return False
    sides = node.left, node.right
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        or _is_text(each)
        for each in sides
    )
