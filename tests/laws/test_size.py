"""A soft law: a file is read in a sitting, a function is seen on a screen.

Docstrings do not count, nor does a function's signature: a promised one has as many lines as it has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.laws.source import Function, Source, functions, obey, read, sources

LAW = "size, a file is read in a sitting and a function seen on a screen"
FILE_LINES = 450
FUNCTION_LINES = 60
# Exceptions, each with its reason: "path" or "path:function" -> why.
ALLOWED: dict[str, str] = {
    "src/accelerate/facade/accelerator.py": "each promised member of the public class, with its signature",
}


def documentation(node: ast.AST) -> int:
    """Lines of all docstrings in ``node``."""
    holders = (n for n in ast.walk(node) if isinstance(n, ast.Module | ast.ClassDef | Function))
    texts = (holder.body[0] for holder in holders if ast.get_docstring(holder) is not None)
    return sum((text.end_lineno or text.lineno) - text.lineno + 1 for text in texts)


def findings(source: Source) -> Iterator[str]:
    """What is too long."""
    lines = len(source.text.splitlines()) - documentation(source.tree)
    if lines > FILE_LINES and source.where not in ALLOWED:
        yield source.at(1, f"{lines} lines, more than {FILE_LINES}")
    for function in functions(source):
        lines = (function.end_lineno or 0) - function.body[0].lineno + 1
        if lines > FUNCTION_LINES:
            lines -= documentation(function)
        if lines > FUNCTION_LINES and f"{source.where}:{function.name}" not in ALLOWED:
            yield source.at(function, f"{function.name} has {lines} lines, more than {FUNCTION_LINES}")


def test_files_and_functions_keep_their_size() -> None:
    obey(LAW, (finding for source in sources() for finding in findings(source)))


def test_every_exception_is_still_needed() -> None:
    known = {source.where for source in sources()}
    named = {f"{source.where}:{f.name}" for source in sources() for f in functions(source)}
    assert ALLOWED.keys() <= known | named


def test_docstrings_do_not_count() -> None:
    body = "    x = 1\n" * FUNCTION_LINES
    doc = '    """' + "line\n" * 30 + '    """\n'
    assert not list(findings(read(f"def f():\n{doc}{body}")))
    assert len(list(findings(read(f"def f():\n{doc}{body}    x = 2\n")))) == 1
    assert len(list(findings(read("x = 1\n" * (FILE_LINES + 1))))) == 1
