"""The ``.pyi`` files that show lazily loaded names to type checkers, written from the table of names.

A name of this package is imported from its home, so it has the type it has there. A name that a public
module only has because its ancestor imported it is ``Any``: writing all of those out would say nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from accelerate.core.lazy import Names, Plan

COMMAND = "python -m accelerate.core.stubs accelerate.names"
HEADER = f"# Written by `{COMMAND}` from the table of names. Do not edit.\n# ruff: noqa\n"
WIDTH = 110
PLAIN = {"bool", "int", "str", "float", "None"}


def texts(names: Names) -> dict[Path, str]:
    """Path -> text of every stub, one beside each public module."""
    return {_path(module): _text(names, module) for module in names.homes}


def write(names: Names) -> None:
    """Writes every stub."""
    for path, text in texts(names).items():
        path.write_text(text, encoding="utf-8")


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin).with_suffix(".pyi")


def _text(names: Names, module: str) -> str:
    whole = module in names.whole
    shown = names.names(module) if whole else sorted(names.homes[module])
    lines = [_declaration(names, module, name) for name in shown]
    if hasattr(importlib.import_module(module), "__version__"):
        lines.append("__version__: str")
    submodules = [name for name in names.submodules(module) if name not in shown]
    lines += [f"from {module} import {name} as {name}" for name in submodules]
    if names.also.get(module) and not whole:
        lines.append("def __getattr__(name: str) -> Any: ...")
    if any("Any" in line for line in lines):
        lines.append("from typing import Any")
    groups = [
        "\n".join(_wrapped(line) for line in sorted(lines) if line.startswith("from ")),
        "\n".join(line for line in lines if not line.startswith(("from ", "class ", "def "))),
        "\n\n".join(line for line in lines if line.startswith("class ")),
        "\n".join(line for line in lines if line.startswith("def ")),
    ]
    return "\n".join([HEADER.rstrip(), *(f"\n{group}" for group in groups if group)]) + "\n"


def _declaration(names: Names, module: str, name: str) -> str:
    """One name: an import from its home, or what stands for it."""
    source = names.source(module, name)
    assert source is not None, name
    home = names.homes[source][name]
    if isinstance(home, str):
        file, _, attribute = home.partition(":")
        return f"from {names.package}.{file} import {attribute} as {name}"
    if source != module:
        return f"from {source} import {name} as {name}"
    return _planned(name) if isinstance(home, Plan) else _value(name, names.resolve(module, name))


def _planned(name: str) -> str:
    if name.isupper():
        return f"{name}: Any"
    if name[0].isupper():
        return (
            f"class {name}:\n"
            "    def __init__(self, *args: Any, **kwargs: Any) -> None: ...\n"
            "    def __getattr__(self, name: str) -> Any: ..."
        )
    return f"def {name}(*args: Any, **kwargs: Any) -> Any: ..."


def _value(name: str, value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"def {name}{_signature(value)}: ..."
    kind = type(value).__name__
    if isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value)):
        kind = "list[str]"
    return f"{name}: {kind if kind in PLAIN or kind == 'list[str]' else 'Any'}"


def _signature(function: FunctionType) -> str:
    """The parameters and the result; an annotation that needs an import is ``Any``."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=_Bare(_annotation(each.annotation, each.default)))
        for each in signature.parameters.values()
    ]
    result = _Bare(_annotation(signature.return_annotation, False))
    return str(signature.replace(parameters=parameters, return_annotation=result)).replace("'", '"')


def _annotation(annotation: Any, default: Any) -> str:
    """An annotation as text; an absent one is the type of the default, a result yes or no."""
    if annotation is inspect.Parameter.empty:
        kind = type(default).__name__
        return kind if kind in PLAIN else "Any"
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text if all(part in PLAIN for part in text.replace("|", " ").split()) else "Any"


class _Bare:
    """An annotation that prints as its text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _wrapped(line: str) -> str:
    """An import as the formatter writes it."""
    if len(line) <= WIDTH:
        return line
    head, _, name = line.partition(" import ")
    return f"{head} import (\n    {name},\n)"


if __name__ == "__main__":
    write(importlib.import_module(sys.argv[1]).NAMES)
