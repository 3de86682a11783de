"""Plug-ins are files of a folder; those of other packages come through entry points."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate.core import registry
from accelerate.core.errors import UnknownNameError
from accelerate.core.registry import Registry

GROUP = "accelerate.tests_plugins"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of plug-ins, and a foreign one that is not registered yet."""
    package = tmp_path / "tests_plugins"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("")
    (package / "_inner.py").write_text("raise AssertionError('imported')")
    (package / "one.py").write_text("PLUGIN = 'the first'")
    (package / "two.py").write_text("PLUGIN = 'the second'")
    (package / "broken.py").write_text("raise OSError('no driver')")
    (tmp_path / "tests_foreign.py").write_text("PLUGIN = 'from elsewhere'")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    registry._external_groups.cache_clear()
    for name in [name for name in sys.modules if name.startswith("tests_plugins")]:
        del sys.modules[name]


def plugins() -> Registry[str]:
    return Registry("plug-in", "tests_plugins", GROUP)


def register(folder: Path) -> None:
    """Installs a distribution with an entry point."""
    info = folder / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[console_scripts]\nx = y:z\n\n[{GROUP}]\nthree = tests_foreign:PLUGIN\n"
    )
    registry._external_groups.cache_clear()


def test_a_file_is_a_plugin(folder: Path) -> None:
    registry = plugins()
    assert registry.names() == ("broken", "one", "two")
    assert registry.get("two") == "the second"
    assert "one" in registry
    assert "base" not in registry


def test_nothing_is_imported_before_it_is_asked_for(folder: Path) -> None:
    registry = plugins()
    registry.names()
    assert "tests_plugins.one" not in sys.modules
    assert registry.get("one") == "the first"
    assert "tests_plugins.two" not in sys.modules
    with pytest.raises(OSError, match="no driver"):
        registry.get("broken")


def test_an_unknown_name_suggests_the_nearest(folder: Path) -> None:
    with pytest.raises(UnknownNameError) as error:
        plugins().get("tow")
    assert (
        str(error.value)
        == "unknown plug-in 'tow'\n  why: known: broken, one, two\n  fix: did you mean 'two'?"
    )


def test_another_package_adds_one_through_an_entry_point(folder: Path) -> None:
    register(folder)
    registry = plugins()
    assert registry.names() == ("broken", "one", "two", "three")
    assert registry.get("three") == "from elsewhere"


def test_entry_points_cost_nothing_where_there_are_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a mention of the group makes it worth importing the machinery that reads entry points."""
    registry._external_groups.cache_clear()
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)  # importing it fails
    assert "three" not in plugins()


def test_a_folder_that_may_not_be_listed_has_no_entry_points(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home of mode 0711: Python imports from it what it knows by name. Root may list everything."""
    register(folder)
    list_folder, private = os.listdir, folder.with_name("private")

    def listdir(path: str = ".") -> list[str]:
        if path == str(private):
            raise PermissionError(13, "Permission denied", path)
        return list_folder(path)

    private.mkdir()
    (folder / "unreadable-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    monkeypatch.syspath_prepend(private)
    monkeypatch.setattr(os, "listdir", listdir)
    assert "three" in plugins()


def test_a_test_adds_one_for_a_while(folder: Path) -> None:
    registry = plugins()
    with registry.add("four", "for now"):
        assert registry.get("four") == "for now"
        assert list(registry.names())[-1] == "four"
    assert "four" not in registry
