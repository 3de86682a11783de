"""Static analysis of the user's code: does it pick samples by its rank, or does it only mention the rank?

A dataset that prints its rank, seeds by it or stores it holds the whole data; one that slices or indexes by
it, or hands the rank and the world size to a function, divides the data. Nothing is called here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
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
_NUMBER_CALLS = frozenset(
    ("int", "get", "getenv", "min", "max", "ceil", "floor", "round", "range", "arange", "list", "tuple")
)
_SLICING_CALLS = frozenset(("range", "islice", "arange", "Subset"))
# Words in the names of functions to which the rank says who logs or draws.
_OTHER_USES = frozenset(
    (
        *("print", "log", "logger", "logging", "info", "debug", "warn", "warning", "error", "write"),
        *("format", "seed", "seeds", "random", "rng", "tqdm", "description"),
    )
)
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
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


def find_rank_arithmetic(functions: Iterable[Any], *attributes: str, counts_texts: bool = False) -> set[str]:
    """Return which of "rank" and "size" the functions use to pick samples.

    Args:
        functions: those of one object; the user's global functions that they call are read too.
        attributes: more names of the rank, then of the world size.
        counts_texts: the rank in a text picks too, as in the name of a file, unless it is printed or raised.

    Returns:
        Both where a function that mentions the rank has no source, as typed into an interpreter.
    """
    ranks, sizes = _RANK_NAMES.union(attributes[:1]), _SIZE_NAMES.union(attributes[1:])
    every = _with_helpers(functions, _HELPER_DEPTH)
    mentions = [function for function in every if _names_any(function, ranks)]
    if not mentions:
        return set()
    trees = [tree for function in every if (tree := _parse(function)) is not None]
    if any(_parse(function) is None for function in mentions):
        return {"rank", "size"}
    uses = _NumberUses(trees, ranks, sizes)
    return uses.picked | (uses.written(trees) if counts_texts else set[str]())


def only_stores_rank(holder: Any, *attributes: str) -> bool:
    """Return whether the user's code of an object picks nothing by the rank that it stores.

    Args:
        holder: the object.
        attributes: see ``find_rank_arithmetic``.
    """
    functions = own_functions(holder)
    return bool(functions) and "rank" not in find_rank_arithmetic(functions, *attributes, counts_texts=True)


def has_index_per_rank_part(dataset: Any) -> bool:
    """Return whether map-style data that pick by the rank have as many indices as all ranks fetch together.

    Their length is multiplied by the world size, so the indices are to be shared out.
    """
    length = getattr(type(dataset), "__len__", None)
    if not hasattr(dataset, "__getitem__") or not isinstance(length, types.FunctionType):
        return False
    tree = _parse(length)
    return tree is not None and _NumberUses([tree], frozenset(), _SIZE_NAMES).multiplies(tree)


def _names_any(function: types.FunctionType, names: frozenset[str]) -> bool:
    code = function.__code__
    own = [*function_names(function, 0), *code.co_varnames, *code.co_freevars]
    return not names.isdisjoint(own) or not names.isdisjoint(name.strip("_") for name in own)


def _parse(function: types.FunctionType) -> ast.AST | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a function typed into an interpreter, or a part of a line
        return None
    # From Python 3.13 on, code of exec() under `python -c` has that command for its source.
    name = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_name", "<lambda>")
    is_its_own = name == "<lambda>" or any(getattr(node, "name", None) == name for node in ast.walk(tree))
    return tree if is_its_own else None


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


class _NumberUses:
    """The uses of the rank and the world size in code.

    Args:
        trees: the functions.
        ranks, sizes: names of the two numbers.
    """

    def __init__(self, trees: list[ast.AST], ranks: frozenset[str], sizes: frozenset[str]) -> None:
        self.names: dict[str, set[str]] = {
            **{name: {"rank"} for name in ranks},
            **{name: {"size"} for name in sizes},
        }
        self.returned: dict[str, ast.Tuple] = {}
        self.picked: set[str] = set()
        self.scope = 0
        count = -1
        while count != (count := sum(map(len, self.names.values()))):
            for self.scope, tree in enumerate(trees):
                for node in ast.walk(tree):
                    self._follow(node)
        for self.scope, tree in enumerate(trees):
            for node in ast.walk(tree):
                self.picked |= self._kinds_picked(node)

    def written(self, trees: list[ast.AST]) -> set[str]:
        """Return the kinds of numbers in texts that are neither printed, logged nor raised."""
        kinds: set[str] = set()
        for self.scope, tree in enumerate(trees):
            shown: set[ast.AST] = set()
            for node in ast.walk(tree):  # outer nodes come first
                is_told = isinstance(node, ast.Call) and _is_other_use(_name_of(node.func))
                is_text_of_object = isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__")
                if is_told or is_text_of_object or isinstance(node, ast.Raise | ast.Assert):
                    shown.update(ast.walk(node))
                if node in shown:
                    continue
                if isinstance(node, ast.JoinedStr):
                    kinds |= self._kinds(*(v.value for v in node.values if isinstance(v, ast.FormattedValue)))
                elif isinstance(node, ast.Call) and _name_of(node.func) == "str":
                    kinds |= self._kinds(*node.args)
                elif isinstance(node, ast.BinOp) and _is_text(node):
                    kinds |= self._kinds(node.right)
        return kinds

    def multiplies(self, tree: ast.AST) -> bool:
        """Return whether code multiplies something by one of the numbers."""
        products = (each for each in ast.walk(tree) if isinstance(each, ast.BinOp))
        return any(isinstance(each.op, ast.Mult) and self._kinds(each.left, each.right) for each in products)

    def _kinds(self, *nodes: ast.AST | None) -> set[str]:
        """Return the kinds of numbers in expressions, without texts, comparisons and arguments of calls."""
        kinds: set[str] = set()
        todo = [*nodes]
        while todo:
            node = todo.pop()
            if node is None or isinstance(node, ast.JoinedStr | ast.Compare) or _is_text(node):
                continue
            name = _name_of(node)
            for known in (name, name.strip("_"), f"{self.scope}:{name}"):
                kinds |= self.names.get(known, set())
            if isinstance(node, ast.Call) and _name_of(node.func) not in _NUMBER_CALLS:
                todo.append(node.func)
            else:
                todo += ast.iter_child_nodes(node)
        return kinds

    def _follow(self, node: ast.AST) -> None:
        """Give the variables, attributes and functions the kinds of what is assigned or returned."""
        if isinstance(node, ast.FunctionDef):
            values = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            self.returned.update((node.name, each) for each in values if isinstance(each, ast.Tuple))
            self.names.setdefault(node.name, set()).update(self._kinds(*values))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
            self._assign(node.target, node.value)

    def _assign(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Tuple):
            if isinstance(value, ast.Call):
                value = self.returned.get(_name_of(value.func))
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                for each, part in zip(target.elts, value.elts, strict=True):
                    self._assign(each, part)
        elif isinstance(target, ast.Name | ast.Attribute):
            name = _name_of(target)
            key = f"{self.scope}:{name}" if isinstance(target, ast.Name) else name
            self.names.setdefault(key, set()).update(self._kinds(value))

    def _kinds_picked(self, node: ast.AST) -> set[str]:
        """Return the kinds of numbers by which an expression picks samples."""
        if isinstance(node, ast.Subscript):
            kinds = set() if isinstance(node.slice, ast.Constant) else self._kinds(node.slice)
            parts = node.value.args if kinds and isinstance(node.value, ast.Call) else []
            return kinds | self._kinds(*parts)  # array_split(indices, world_size)[rank]
        if isinstance(node, ast.Compare):  # index % world_size == rank
            sides = (node.left, *node.comparators)
            is_modulo = any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in sides)
            return self._kinds(*sides) if is_modulo else set()
        if isinstance(node, ast.Call):
            name = _name_of(node.func)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            kinds = self._kinds(*arguments)
            return kinds if name in _SLICING_CALLS or (len(kinds) == 2 and not _is_other_use(name)) else set()
        return set()


def _is_other_use(name: str) -> bool:
    """Return whether a function of that name is told the rank for another purpose than to pick samples."""
    words = {word.lower() for word in _WORD.findall(name)}
    return name == "__init__" or name.startswith("init_process") or not words.isdisjoint(_OTHER_USES)


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
