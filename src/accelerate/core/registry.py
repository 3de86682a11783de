"""Registries of plug-ins: to add a plug-in is to add one file to a folder.

A registry lists a folder of a package. Every module in it that defines ``PLUGIN`` is one plug-in,
known by its file's name. One that takes several files is a folder: its ``PLUGIN`` is in the file called
after the kind (``strategy/fsdp1/strategy.py``). Other packages add theirs through an entry point group, tests
through ``add``. A plug-in is imported only when it is requested.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, Generic, TypeVar, cast

from accelerate.core.errors import UnknownNameError

T = TypeVar("T")


@cache
def _external_groups() -> frozenset[str]:
    """Return the entry point groups of this package that installed distributions use.

    There is nearly always none. ``importlib.metadata`` takes longer to import than a help text may take to
    appear, so it is imported only when the files that it would read mention a group.
    """
    names: set[str] = set()
    for folder in filter(os.path.isdir, (entry or "." for entry in sys.path)):
        try:
            files = os.listdir(folder)
        except (FileNotFoundError, PermissionError):  # Python's imports pass over it too
            continue
        for info in (name for name in files if name.endswith("-info")):
            try:
                with open(f"{folder}/{info}/entry_points.txt", "rb") as text:
                    groups = re.findall(rb"^\[(accelerate\.[^]]+)\]", text.read(), re.MULTILINE)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
                continue
            names.update(group.decode() for group in groups)
    return frozenset(names)


class Registry(Generic[T]):
    """The plug-ins of one folder.

    Args:
        kind: the kind of plug-in, for errors: ``"device"``.
        package: the folder as a package name: ``"accelerate.device"``.
        group: the entry point group other packages register in: ``"accelerate.devices"``.
        exclude: files of the folder that are not plug-ins.
    """

    def __init__(self, kind: str, package: str, group: str, exclude: tuple[str, ...] = ("base",)) -> None:
        self.kind, self.package, self.group, self.exclude = kind, package, group, exclude
        self._extra: dict[str, T] = {}
        self._loaded: dict[str, T] = {}

    @cached_property
    def sources(self) -> dict[str, Any]:
        """The definition of each plug-in, by name: files in order, then those of other packages.

        A file, or the file of a folder, is its module below the package; another's is an entry point.
        """
        modules: dict[str, Any] = {}
        for folder in importlib.import_module(self.package).__path__:
            for module in pkgutil.iter_modules([folder]):
                name = module.name
                if not module.ispkg:
                    modules[name] = name
                elif os.path.exists(os.path.join(folder, name, f"{self.kind}.py")):
                    modules[name] = f"{name}.{self.kind}"
        files = {n: modules[n] for n in sorted(modules) if n not in self.exclude and not n.startswith("_")}
        if self.group not in _external_groups():
            return files
        from importlib.metadata import entry_points

        points = {point.name: point for point in entry_points(group=self.group)}
        return files | {name: point for name, point in points.items() if name not in files}

    def names(self) -> tuple[str, ...]:
        """Return every known name: files first, then those of other packages, then added ones."""
        return tuple(dict.fromkeys((*self.sources, *self._extra)))

    def __iter__(self) -> Iterator[T]:
        return (self.get(name) for name in self.names())

    def __contains__(self, name: str) -> bool:
        return name in self._extra or name in self.sources

    def get(self, name: str) -> T:
        """Return the plug-in of that name.

        Raises:
            UnknownNameError: there is none; the nearest name is suggested.
        """
        if name in self._extra:
            return self._extra[name]
        if name not in self._loaded:
            source = self.sources.get(name)
            if source is None:
                raise UnknownNameError(self.kind, name, self.names())
            is_file = isinstance(source, str)
            module = importlib.import_module(f"{self.package}.{source}") if is_file else None
            self._loaded[name] = cast(T, source.load() if module is None else module.PLUGIN)
        return self._loaded[name]

    def summary(self, name: str) -> str:
        """Return the text after the colon in the first line of the plug-in's file, without importing it.

        Empty for plug-ins that are not files: those must be asked themselves.
        """
        module = self.sources.get(name)
        if name in self._extra or not isinstance(module, str):
            return ""
        for folder in importlib.import_module(self.package).__path__:
            source = os.path.join(folder, *module.split(".")) + ".py"
            if os.path.exists(source):
                with open(source, encoding="utf-8") as text:
                    summary = text.readline().strip().strip('"').partition(": ")[2]
                return summary[:1].upper() + summary[1:]
        return ""

    @contextmanager
    def add(self, name: str, plugin: T) -> Generator[T]:
        """Add a plug-in for the length of a ``with`` block."""
        self._extra[name] = plugin
        try:
            yield plugin
        finally:
            del self._extra[name]
