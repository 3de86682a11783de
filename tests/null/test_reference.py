"""The reference of the documentation: which names it has, and that each can be read there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from accelerate import Accelerator
from tests.support.environment import ROOT

PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/reference").glob("*.md"))
}
OBJECTS = [name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]


def resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_each_name_stands_on_one_page_and_each_page_in_the_menu() -> None:
    assert len(OBJECTS) > 120
    assert len(set(OBJECTS)) == len(OBJECTS)
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PAGES if f": reference/{page}" not in menu]


def test_the_names_of_the_package_itself_are_all_there() -> None:
    import accelerate

    stubs = (ROOT / "src/accelerate/__init__.pyi").read_text(encoding="utf-8")
    names = set(re.findall(r"^from accelerate\.[\w.]+ import \w+ as (\w+)$", stubs, re.MULTILINE))
    public = {
        name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(accelerate, name))
    }
    assert len(public) > 25
    assert not public - {name.rpartition(".")[2] for name in OBJECTS}


def _sections() -> dict[str, list[str]]:
    text = (Path(__file__).parent / "reference_sections.txt").read_text(encoding="utf-8")
    joined = re.sub(r"\n    ", " ", text.partition("\n")[2])
    return {line.partition(": ")[0]: line.partition(": ")[2].split() for line in joined.splitlines()}


def test_every_section_of_the_public_reference_is_here() -> None:
    """Fourteen have names; the fifteenth is the command line, whose page is made of its help."""
    assert "\n## accelerate launch\n" in (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    sections = _sections()
    assert len(sections) == 14
    assert sum(len(names) for names in sections.values()) > 140
    here = {name.rpartition(".")[2] for name in OBJECTS}
    in_tables = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", PAGES["utilities.md"]))
    missing = {
        section: [n for n in names if n not in here | in_tables] for section, names in sections.items()
    }
    assert not any(missing.values()), missing


@pytest.mark.parametrize("name", OBJECTS)
def test_a_name_of_the_reference_has_a_docstring(name: str) -> None:
    thing = resolve(name)
    assert inspect.getdoc(thing), name


def test_every_argument_of_the_accelerator_is_documented() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(Accelerator) or "", re.MULTILINE)
    assert set(inspect.signature(Accelerator).parameters) <= set(documented)
