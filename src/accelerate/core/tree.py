"""Nested data: dict, list, tuple, named tuple, dataclass, and mappings of any class, kept as they are.

A leaf is whatever is not one of these containers. Nothing here knows tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, TypeGuard

Leaf = Callable[[Any], Any]


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether ``value`` is a mapping of any class."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether ``value`` is a list or a tuple, named or not."""
    return isinstance(value, list | tuple)


def is_namedtuple(value: object) -> bool:
    """Whether ``value`` is a named tuple (of ``collections`` or ``typing``)."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")  # pyright: ignore[reportUnknownArgumentType]


def same_type(original: Any, items: Iterator[Any] | list[Any]) -> Any:
    """A list or tuple of ``original``'s own type holding ``items``."""
    if is_namedtuple(original):
        return type(original)(*items)
    return type(original)(items)


def is_container(value: object) -> bool:
    """Whether ``map_tree`` looks inside ``value``."""
    return is_sequence(value) or is_mapping(value) or _is_dataclass_value(value)


def _is_dataclass_value(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def map_tree(function: Leaf, tree: Any) -> Any:
    """``tree`` with every leaf replaced by ``function(leaf)``; containers keep their type and order."""
    if is_sequence(tree):
        return same_type(tree, [map_tree(function, value) for value in tree])
    if is_mapping(tree):
        return like_mapping(tree, {key: map_tree(function, value) for key, value in tree.items()})
    if _is_dataclass_value(tree):
        twin = copy(tree)
        for item in dataclasses.fields(tree):
            # object.__setattr__ also fills frozen dataclasses; the twin is ours alone.
            object.__setattr__(twin, item.name, map_tree(function, getattr(tree, item.name)))
        return twin
    return function(tree)


def like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the original's class holding ``items``, by a copy or else by its constructor."""
    if type(original) is dict:
        return items
    try:
        twin: Any = copy(original)
        for key, value in items.items():
            twin[key] = value
    except TypeError:  # not assignable
        return type(original)(items)  # type: ignore[call-arg]
    return twin


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf, in order; a path reads like Python: ``['a'][0].x``."""
    if is_mapping(tree):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif is_sequence(tree):
        names = getattr(tree, "_fields", None)
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}.{names[index]}" if names else f"{path}[{index}]")
    elif _is_dataclass_value(tree):
        for item in dataclasses.fields(tree):
            yield from leaves(getattr(tree, item.name), f"{path}.{item.name}")
    else:
        yield path, tree


def find(predicate: Callable[[Any], bool], tree: Any) -> Any | None:
    """The first leaf for which ``predicate`` holds, or None."""
    for _, leaf in leaves(tree):
        if predicate(leaf):
            return leaf
    return None


def rebuild(tree: Any, new_leaves: Iterator[Any]) -> Any:
    """``tree`` with its leaves replaced, in order, by those of ``new_leaves``."""
    return map_tree(lambda _: next(new_leaves), tree)
