"""The source tree as the laws read it: parsed files, their rooms, and findings with file:line."""

from __future__ import annotations

import ast
import gc
import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "accelerate"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file; comments are gone, docstrings are still string constants."""
        return ast.parse(self.text, filename=self.where)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, in the order of ``ast.walk``."""
        return tuple(ast.walk(self.tree))

    @property
    def where(self) -> str:
        """Path from the root of the project, for errors."""
        return str(self.path.relative_to(ROOT))

    @property
    def inside(self) -> tuple[str, ...]:
        """Path inside the package, without suffix: ``("device", "cuda")``."""
        return self.path.relative_to(PACKAGE).with_suffix("").parts

    @property
    def module(self) -> str:
        """The module's dotted name."""
        parts = self.inside[:-1] if self.inside[-1] == "__init__" else self.inside
        return ".".join(("accelerate", *parts))

    @property
    def room(self) -> str:
        """The folder or file directly below the package: ``"device"``, ``"plan"``, ``"__init__"``."""
        return self.inside[0]

    def at(self, node: ast.AST | int, what: str) -> str:
        """One finding: ``file:line: what``."""
        return f"{self.where}:{node if isinstance(node, int) else getattr(node, 'lineno', 1)}: {what}"

    @cached_property
    def docstrings(self) -> set[int]:
        """Ids of the string constants that are docstrings, and of other strings that stand alone."""
        alone = (n.value for n in self.nodes if isinstance(n, ast.Expr))
        return {
            id(value) for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str)
        }


def read(text: str, name: str = "example/module.py") -> Source:
    """A source that is not a file, to test the laws themselves."""
    return Source(PACKAGE / name, text)


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the package, parsed: half a million nodes."""
    files = tuple(Source(path, path.read_text()) for path in sorted(PACKAGE.rglob("*.py")))
    with without_collector():
        for file in files:
            file.nodes  # noqa: B018 - parses it
    return files


@contextmanager
def without_collector() -> Generator[None]:
    """Let Python's collector walk nothing that is made here: with it, to parse takes three times as long."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def contract() -> dict[str, Any]:
    """The promised public interface (contract.json)."""
    return json.loads((Path(__file__).parent / "contract.json").read_text())


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, also by ``importlib`` with a name that is written out.

    A name may be a module or an object in one.
    """
    package = source.module.split(".") if source.inside[-1] == "__init__" else source.module.split(".")[:-1]
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *filter(None, [node.module])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            texts = [name.value for name in node.args[:1] if isinstance(name, ast.Constant)]
            names = [text for text in texts if isinstance(text, str)]
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in names)


def functions(source: Source) -> Iterator[Function]:
    """Every function of a file, nested ones too."""
    return (node for node in source.nodes if isinstance(node, Function))


def obey(law: str, findings: Iterable[str]) -> None:
    """Fails with the law and all places that break it.

    Raises:
        AssertionError: there is a finding.
    """
    __tracebackhide__ = True
    found = list(findings)
    assert not found, "\n".join([f"{law} ({len(found)} places)", *found])
