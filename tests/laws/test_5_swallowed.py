"""Law 5: nothing is swallowed. An error that was not expected by name goes on.

A handler for anything (``except``, ``except Exception``, ``except BaseException``) must end by raising;
``suppress`` takes no such kind; a handler that does nothing at all names a narrow kind; no ``finally`` leaves
by ``return``, ``break`` or ``continue``, which drops the error on its way (PEP 765); and no ``__exit__``
answers True to everything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.laws.source import Function, Source, functions, obey, read, sources

LAW = "law 5, nothing is swallowed"
ANYTHING = {"Exception", "BaseException"}
NAMING = (ast.Tuple, ast.BinOp, ast.Name, ast.Attribute)
# torch, the C library and this package raise these for very different reasons: to pass over one in silence
# passes over all of them.
BROAD = ANYTHING | {"RuntimeError", "OSError", "IOError", "EnvironmentError", "AccelerateError", "Error"}

# Functions that keep an error and hand it on to where it is raised: "path:function" -> where that is.
KEPT = {
    "src/accelerate/check/checks.py:run_check": "the run shows it with its rank, and ends with code 1",
    "src/accelerate/checkpoint/rank_group.py:collective_section": "all ranks raise it after the block",
    "src/accelerate/checkpoint/async_save.py:_run": "wait raises it at the next call, on every rank",
    "src/accelerate/facade/accelerator.py:exit_to_resume": "said in a warning: what is saved is resumed",
    "src/accelerate/facade/tracker_set.py:log": "said once by name, counted, and said again at the end",
    "src/accelerate/offload/pipeline/inference_pipeline.py:forward": "raise_error raises it after the batch",
    "src/accelerate/watch/batch_size_search.py:__exit__": "give_up raises it once every rank has reported",
}


def kinds(node: ast.expr | None, named: dict[str, list[ast.expr]] | None = None) -> set[str]:
    """Last names of the exceptions, of ``(builtins.IOError, KeyError)`` IOError and KeyError; none is all.

    ``named`` are the values of names: ``except KINDS`` and ``suppress(*KINDS)`` have those of the tuple.
    """
    if node is None:
        return {"BaseException"}
    if isinstance(node, ast.Tuple):
        return {name for part in node.elts for name in kinds(part, named)}
    if isinstance(node, ast.Starred):
        return kinds(node.value, named)
    if isinstance(node, ast.BinOp):
        return kinds(node.left, named) | kinds(node.right, named)
    last = ast.unparse(node).rpartition(".")[2]
    others = {name: values for name, values in (named or {}).items() if name != last}
    return {last} | {name for value in (named or {}).get(last, ()) for name in kinds(value, others)}


def named_kinds(source: Source) -> dict[str, list[ast.expr]]:
    """The tuples and other names that names of a module or a class stand for."""
    named: dict[str, list[ast.expr]] = {}
    bodies = [source.tree.body, *(node.body for node in source.nodes if isinstance(node, ast.ClassDef))]
    for line in (line for body in bodies for line in body):
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, NAMING):
            for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
                named.setdefault(ast.unparse(target), []).append(line.value)
    return named


@cache
def all_named_kinds() -> dict[str, list[ast.expr]]:
    """Those of the whole package, which a file may import."""
    named: dict[str, list[ast.expr]] = {}
    for source in sources():
        for name, values in named_kinds(source).items():
            named.setdefault(name, []).extend(values)
    return named


def is_nothing(body: list[ast.stmt]) -> bool:
    """Whether the statements do nothing: pass, continue, ``...``, a comment in quotes."""
    quoted = [line for line in body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)]
    return all(isinstance(line, ast.Pass | ast.Continue) or line in quoted for line in body)


def always_raises(body: list[ast.stmt]) -> bool:
    """Whether no path through the statements ends without raising."""
    last = body[-1]
    if any(jumps(body)):
        return False
    if isinstance(last, ast.If):
        return bool(last.orelse) and always_raises(last.body) and always_raises(last.orelse)
    if isinstance(last, ast.With | ast.AsyncWith):
        return always_raises(last.body)
    if isinstance(last, ast.Try):
        return always_raises(last.finalbody) if last.finalbody else always_raises(last.body)
    return isinstance(last, ast.Raise)


def within(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what is below it, functions defined there left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield from within(child)


def jumps(body: list[ast.stmt], *, in_loop: bool = False) -> Iterator[ast.stmt]:
    """Statements that leave the block: return, and break or continue of a loop around it."""
    for line in body:
        if isinstance(line, ast.Return) or (isinstance(line, ast.Break | ast.Continue) and not in_loop):
            yield line
        elif not isinstance(line, Function | ast.ClassDef):
            loop = in_loop or isinstance(line, ast.For | ast.AsyncFor | ast.While)
            for name in ("body", "orelse", "finalbody"):
                yield from jumps(getattr(line, name, []), in_loop=loop)
            for part in [*getattr(line, "handlers", []), *getattr(line, "cases", [])]:
                yield from jumps(part.body, in_loop=loop)


def kept(source: Source) -> set[ast.AST]:
    """Handlers in functions that hand the error on."""
    keepers = (function for function in functions(source) if f"{source.where}:{function.name}" in KEPT)
    return {node for function in keepers for node in within_function(function)}


def within_function(function: Function) -> Iterator[ast.AST]:
    """What belongs to a function itself."""
    return (node for line in function.body for node in within(line))


def findings(source: Source) -> Iterator[str]:
    """Places where an error may get lost."""
    handed_on = kept(source)
    named = {**all_named_kinds(), **named_kinds(source)}
    for node in source.nodes:
        if node in handed_on:
            continue
        if isinstance(node, ast.ExceptHandler):
            caught = kinds(node.type, named) & BROAD
            shown = f"except {' '.join(sorted(caught))}"
            if caught & ANYTHING and not always_raises(node.body):
                yield source.at(node, f"{shown} does not end by raising")
            elif caught and is_nothing(node.body):
                yield source.at(node, f"{shown} does nothing")
        elif finalbody := getattr(node, "finalbody", None):
            for jump in jumps(finalbody):
                yield source.at(jump, f"{type(jump).__name__.lower()} in finally drops the error")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress":
            caught = {name for argument in node.args for name in kinds(argument, named)} & BROAD
            if caught:
                yield source.at(node, f"suppress({', '.join(sorted(caught))})")
    for function in functions(source):
        if function.name in ("__exit__", "__aexit__"):
            for node in within_function(function):
                if ast.unparse(node) == "return True" and node not in handed_on:
                    yield source.at(node, f"{function.name} answers True to every error")


def test_nothing_is_swallowed() -> None:
    obey(LAW, (finding for source in sources() for finding in findings(source)))


def test_every_function_that_keeps_an_error_exists() -> None:
    assert KEPT.keys() <= {f"{source.where}:{f.name}" for source in sources() for f in functions(source)}


TRY = "try:\n    f()\n"
BREAKS = [
    TRY + "except:\n    pass",
    TRY + "except Exception:\n    log()",
    TRY + "except builtins.Exception as error:\n    log(error)",
    TRY + "except (KeyError, BaseException):\n    if a:\n        raise",
    TRY + "except BaseException:\n    if a:\n        return 1\n    raise",
    TRY + "except Exception:\n    def g():\n        raise ValueError",
    "for x in y:\n    try:\n        f()\n    except Exception:\n        if x: continue\n        raise",
    TRY + "except RuntimeError:\n    pass",
    "KINDS = (Exception,)\n" + TRY + "except KINDS:\n    log()",
    "class A:\n    KINDS = (KeyError, *OTHERS)\nOTHERS = (OSError,)\n" + TRY + "except A.KINDS:\n    pass",
    "KINDS = (KeyError,) + (RuntimeError,)\nwith suppress(*KINDS):\n    f()",
    "Wide = RuntimeError\nwith suppress(Wide):\n    f()",
    TRY + "except (KeyError, OSError):\n    ...",
    "for x in y:\n    try:\n        f()\n    except OSError:\n        continue",
    "def g():\n    try:\n        f()\n    finally:\n        return 1",
    "for x in y:\n    try:\n        f()\n    finally:\n        if x:\n            break",
    "with suppress(Exception):\n    f()",
    "with contextlib.suppress(KeyError, RuntimeError):\n    f()",
    "class A:\n    def __exit__(self, *args):\n        return True",
]


@pytest.mark.parametrize("text", BREAKS)
def test_the_law_sees_what_swallows(text: str) -> None:
    assert len(list(findings(read(text)))) == 1


KEEPS = [
    TRY + "except BaseException:\n    clean()\n    raise",
    TRY + "except Exception as error:\n    raise ValueError('x') from error",
    TRY + "except Exception:\n    if a:\n        raise\n    else:\n        raise KeyError from None",
    TRY + "except Exception:\n    for x in y:\n        if x:\n            break\n    raise",
    TRY + "except OSError as error:\n    log(error)",
    "KINDS = (KeyError, ValueError)\nwith suppress(*KINDS):\n    f()",
    TRY + "except FileNotFoundError:\n    pass",
    TRY + "finally:\n    for x in y:\n        if x:\n            break",
    "with suppress(FileNotFoundError, ProcessLookupError):\n    f()",
    "class A:\n    def __exit__(self, kind, *rest):\n        return kind is KeyError",
]


@pytest.mark.parametrize("text", KEEPS)
def test_the_law_allows_what_is_handled(text: str) -> None:
    assert not list(findings(read(text)))
