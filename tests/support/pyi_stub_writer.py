"""Writes the ``.pyi`` files that show lazily loaded names to type checkers, from the table of names.

A name of this package is imported from its source, so it has the type it has there. A name that a public
module only has because the module of Accelerate 1.x imported it is ``Any``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from accelerate.core.lazy_names import PublicNames
from accelerate.names import NAMES

COMMAND = "python -m tests.support.pyi_stub_writer"
HEADER = f"# Written by `{COMMAND}` from the table of names. Do not edit.\n# ruff: noqa\n"
WIDTH = 110
PLAIN = {"bool", "int", "str", "float", "None"}


def stub_texts(names: PublicNames) -> dict[Path, str]:
    """Return path -> text of every stub, one beside each public module."""
    return {_stub_path(module): _stub_text(names, module) for module in names.sources}


def _stub_path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin).with_suffix(".pyi")


def _stub_text(names: PublicNames, module: str) -> str:
    is_complete = module in names.complete_modules
    shown = names.list_names(module) if is_complete else sorted(names.sources[module])
    lines = [line for name in shown for line in _declaration(names, module, name)]
    if hasattr(importlib.import_module(module), "__version__"):
        lines.append("__version__: str")
    submodules = [name for name in names.list_submodules(module) if name not in shown]
    lines += [f"from {module} import {name} as {name}" for name in submodules]
    if names.reexports.get(module) and not is_complete:
        lines.append("def __getattr__(name: str) -> Any: ...")
    if any("Any" in line for line in lines):
        lines.append("from typing import Any")
    groups = [
        "\n".join(_wrap_import(line) for line in sorted(lines) if line.startswith("from ")),
        "\n".join(line for line in lines if not line.startswith(("from ", "def "))),
        "\n".join(line for line in lines if line.startswith("def ")),
    ]
    return "\n".join([HEADER.rstrip(), *(f"\n{group}" for group in groups if group)]) + "\n"


def _declaration(names: PublicNames, module: str, name: str) -> list[str]:
    """Return the lines of one name: an import from its source, or a declaration.

    Type checkers take an import for public only where it renames nothing: another name is assigned.
    """
    owner = names.find_owner(module, name)
    assert owner is not None, name
    source = names.sources[owner][name]
    if isinstance(source, str):
        file, _, attribute = source.partition(":")
        source_line = f"from {names.package}.{file} import {attribute} as "
        renamed = f"_source_of_{name}"
        return [source_line + name] if attribute == name else [source_line + renamed, f"{name} = {renamed}"]
    if owner != module:
        return [f"from {owner} import {name} as {name}"]
    return [_value_declaration(name, names.resolve(module, name))]


def _value_declaration(name: str, value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"def {name}{_format_signature(value)}: ..."
    kind = type(value).__name__
    if isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value)):
        kind = "list[str]"
    return f"{name}: {kind if kind in PLAIN or kind == 'list[str]' else 'Any'}"


def _format_signature(function: FunctionType) -> str:
    """Return parameters and result as text; an annotation that needs an import is ``Any``."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=_UnquotedAnnotation(_format_annotation(each.annotation, each.default)))
        for each in signature.parameters.values()
    ]
    result = _UnquotedAnnotation(_format_annotation(signature.return_annotation, False))
    return str(signature.replace(parameters=parameters, return_annotation=result)).replace("'", '"')


def _format_annotation(annotation: Any, default: Any) -> str:
    """Return an annotation as text; an absent one is the type of the default, of a result ``bool``."""
    if annotation is inspect.Parameter.empty:
        kind = type(default).__name__
        return kind if kind in PLAIN else "Any"
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text if all(part in PLAIN for part in text.replace("|", " ").split()) else "Any"


class _UnquotedAnnotation:
    """An annotation that prints as its text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _wrap_import(line: str) -> str:
    """Return an import line as the formatter writes it."""
    if len(line) <= WIDTH:
        return line
    head, _, name = line.partition(" import ")
    return f"{head} import (\n    {name},\n)"


if __name__ == "__main__":
    for _path, _text in stub_texts(NAMES).items():
        _path.write_text(_text, encoding="utf-8")
