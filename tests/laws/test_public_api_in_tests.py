"""Tests talk to the public API where they can: a rename or a merge of rooms does not touch them all.

A test file may import a room where it tests a unit of it. Helpers of ``tests/support`` with a purpose of
their own (a fake world, the plan of a launch) may, too.
"""

from __future__ import annotations

import ast
from pathlib import Path

from accelerate.names import NAMES
from tests.laws.source import without_collector
from tests.support.environment import ROOT
from tests.support.mutations import MUTATIONS, check_table

AT_MOST = 78
# The tree of errors is public, although no table lists it.
PUBLIC = {"accelerate", "accelerate.core.errors", "accelerate.names", *NAMES.sources}


def private_rooms(path: Path) -> set[str]:
    """Modules of the package that a file imports and that are not public."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
    return {name for name in modules if name.partition(".")[0] == "accelerate" and name not in PUBLIC}


def test_few_test_files_import_private_rooms() -> None:
    with without_collector():
        importing = {
            str(path.relative_to(ROOT)): private_rooms(path) for path in (ROOT / "tests").rglob("test_*.py")
        }
    importing = {path: rooms for path, rooms in importing.items() if rooms}
    assert len(importing) <= AT_MOST, importing


def test_an_import_inside_a_function_counts(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text(
        "from accelerate import Accelerator\nfrom accelerate.utils import gather\n"
        "def f():\n    from accelerate.world.world import current\n    import accelerate.core.tree\n"
    )
    assert private_rooms(file) == {"accelerate.world.world", "accelerate.core.tree"}


def test_the_mutations_fit_the_source() -> None:
    """``make test-mutations`` is not run often: what a change has left behind would show late."""
    check_table(MUTATIONS)
