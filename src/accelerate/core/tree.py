"""Nested data: dict, list, tuple, named tuple, dataclass, and mappings of any class.

A leaf is a value that is not one of these containers. This module does not know tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, Generic, TypeGuard, TypeVar, cast

Leaf = Callable[[Any], Any]
_STORAGE = (MutableMapping, list)
K = TypeVar("K")
V = TypeVar("V")


class LazyMapping(Mapping[K, V], Generic[K, V]):
    """A mapping whose values are read at each access."""

    def __init__(self, readers: Mapping[K, Callable[[], V]]) -> None:
        self._readers = readers

    def __getitem__(self, key: K) -> V:
        return self._readers[key]()

    def __iter__(self) -> Iterator[K]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, key: object) -> bool:
        return key in self._readers


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return True for a mapping of any class."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return True for a list or a tuple, named or not."""
    return isinstance(value, (list, tuple))


def is_namedtuple(value: object) -> bool:
    """Return True for a named tuple (of ``collections`` or ``typing``)."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")  # pyright: ignore[reportUnknownArgumentType]


def make_same_type(original: Any, items: Iterator[Any] | list[Any]) -> Any:
    """Return a list or tuple of ``original``'s own type that holds ``items``."""
    if is_namedtuple(original):
        return type(original)(*items)
    return type(original)(items)


def is_container(value: object) -> bool:
    """Return True when ``map_tree`` descends into ``value``."""
    return is_sequence(value) or is_mapping(value) or _is_dataclass_value(value)


def _is_dataclass_value(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def dataclass_items(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object by name, but for those that are not set (``init=False``)."""
    names = (item.name for item in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def map_tree(function: Leaf, tree: Any) -> Any:
    """Replace every leaf of ``tree`` by ``function(leaf)``; containers keep their type and order."""
    if is_sequence(tree):
        return make_same_type(tree, [map_tree(function, value) for value in tree])
    if is_mapping(tree):
        return make_mapping_like(tree, {key: map_tree(function, value) for key, value in tree.items()})
    if _is_dataclass_value(tree):
        duplicate = copy(tree)
        for name, value in dataclass_items(tree).items():
            # object.__setattr__ also fills frozen dataclasses; the copy is ours alone.
            object.__setattr__(duplicate, name, map_tree(function, value))
        return duplicate
    return function(tree)


def make_mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the original's class that holds ``items``, by a copy or else by its constructor."""
    if type(original) is dict:
        return items
    try:
        duplicate: Any = copy(original)
        if not (isinstance(original, dict) or hasattr(type(original), "__copy__")):
            _separate_items(duplicate)
        for key, value in items.items():
            duplicate[key] = value
    except TypeError:  # not assignable, or without attributes
        return type(original)(items)  # type: ignore[call-arg]
    return duplicate


def _separate_items(duplicate: Any) -> None:
    """Copy the attributes that may hold the items of a mapping, which a copy shares with its original."""
    attributes = cast("dict[str, Any]", vars(duplicate))
    for name in [name for name, value in attributes.items() if isinstance(value, _STORAGE)]:
        attributes[name] = copy(attributes[name])


def iterate_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of every leaf, in order; a path reads like Python: ``['a'][0].x``."""
    if is_mapping(tree):
        for key, value in tree.items():
            yield from iterate_leaves(value, f"{path}[{key!r}]")
    elif is_sequence(tree):
        names = getattr(tree, "_fields", None)
        for index, value in enumerate(tree):
            yield from iterate_leaves(value, f"{path}.{names[index]}" if names else f"{path}[{index}]")
    elif _is_dataclass_value(tree):
        for name, value in dataclass_items(tree).items():
            yield from iterate_leaves(value, f"{path}.{name}")
    else:
        yield path, tree


def find_leaf(predicate: Callable[[Any], bool], tree: Any) -> Any | None:
    """Return the first leaf for which ``predicate`` holds, or None."""
    for _, leaf in iterate_leaves(tree):
        if predicate(leaf):
            return leaf
    return None


def replace_leaves(tree: Any, new_leaves: Iterator[Any]) -> Any:
    """Return ``tree`` with its leaves replaced, in order, by the values of ``new_leaves``."""
    return map_tree(lambda _: next(new_leaves), tree)
