"""Law 3: the environment is read in one file and written in one file, ``core/environ.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.laws.source import Source, obey, read, sources

LAW = "law 3, only core/environ.py touches the environment"
HOLDERS = {"os", "posix", "nt"}  # modules that hold it
HANDLES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
WAYS = HANDLES | {"__dict__"}


def holders(source: Source) -> set[str]:
    """Names under which the file knows the modules that hold the environment."""
    aliases = (alias for node in source.nodes if isinstance(node, ast.Import) for alias in node.names)
    known = {alias.asname or alias.name for alias in aliases if alias.name in HOLDERS}
    for node in source.nodes:  # system = os
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in known:
            known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return known


def findings(source: Source) -> Iterator[str]:
    """Every way to the environment that the file takes."""
    known = holders(source)

    def is_holder(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in known
        # os by way of another module: shutil.os, sys.modules["os"], import_module("os")
        if isinstance(node, ast.Attribute):
            return node.attr in HOLDERS
        key = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            key = node.args[0] if node.args else None
        return isinstance(key, ast.Constant) and key.value in HOLDERS

    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module in HOLDERS:
            for alias in node.names:
                if alias.name in HANDLES or alias.name == "*":
                    yield source.at(node, f"from {node.module} import {alias.name}")
        elif isinstance(node, ast.Attribute) and is_holder(node.value) and node.attr in WAYS:
            yield source.at(node, ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "vars"):
            # A name that is computed may be any; one that is written out is judged by what it says.
            written = [name.value for name in node.args[1:2] if isinstance(name, ast.Constant)]
            if node.args and is_holder(node.args[0]) and (not written or written[0] in HANDLES):
                yield source.at(node, ast.unparse(node))


def test_the_environment_is_touched_in_one_file() -> None:
    others = (source for source in sources() if source.inside != ("core", "environ"))
    obey(LAW, (finding for source in others for finding in findings(source)))


def test_that_file_is_still_the_one() -> None:
    (environ,) = [source for source in sources() if source.inside == ("core", "environ")]
    assert list(findings(environ))


BREAKS = [
    "import os\nx = os.environ['A']",
    "import os\nos.getenv('A')",
    "import os as system\nsystem.putenv('A', 'b')",
    "import os\nsystem = os\nsystem.unsetenv('A')",
    "from os import environ",
    "from os import path, getenv as g",
    "from os import *",
    "import os\ngetattr(os, 'environ')",
    "import os\ngetattr(os, name)",
    "import os\nvars(os)['environ']",
    "import os\nos.__dict__['environ']",
    "import shutil\nshutil.os.environ",
    "import sys\nsys.modules['os'].environ",
    "import importlib\nimportlib.import_module('os').environ",
    "import subprocess, os\nsubprocess.run([], env={**os.environ})",
    "def f():\n    import os\n    return os.environb",
]


@pytest.mark.parametrize("text", BREAKS)
def test_the_law_sees_every_way_to_the_environment(text: str) -> None:
    assert len(list(findings(read(text)))) == 1


KEEPS = [
    "import os\nos.path.join('a')\ngetattr(os, 'sched_getaffinity')",
    "from accelerate.core import environ\nenviron.get('A')",
    "world.environ\n# os.environ\n'os.environ'",
]


@pytest.mark.parametrize("text", KEEPS)
def test_the_law_allows_the_rest_of_os_and_our_own_reader(text: str) -> None:
    assert not list(findings(read(text)))
