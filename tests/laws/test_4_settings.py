"""Law 4: a setting is declared once, and everything about it is derived from the declaration."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import click
import pytest

from accelerate.core.setting import Setting, declared_settings, setting
from tests.laws.source import Source, contract, obey, read, sources
from tests.laws.test_2_imports import FLOOR

LAW = "law 4, a setting is declared once"


def declares(source: Source) -> bool:
    """Whether the file imports ``setting``, by whatever name."""
    homes = ("accelerate.core.setting", "accelerate.core", "accelerate.launch.launch_request")
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module in homes:
            if any(alias.name.rpartition("_")[2] == "setting" for alias in node.names):
                return True
        elif isinstance(node, ast.Import) and any(alias.name in homes for alias in node.names):
            return True
    return False


@cache
def classes() -> tuple[type, ...]:
    """Every class of settings in the package."""
    found: dict[type, None] = {}
    for source in sources():
        if source.room != "core" and declares(source):
            values = vars(importlib.import_module(source.module)).values()
            own = (value for value in values if isinstance(value, type) and value.__module__ == source.module)
            found |= {cls: None for cls in own if holds_settings(cls)}
    return tuple(found)


def holds_settings(cls: Any) -> bool:
    """Whether ``cls`` is a dataclass with a field made by ``setting``."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return any(item.metadata.get("setting") for item in fields)


def own_settings(cls: type) -> Iterator[Setting]:
    """The settings that ``cls`` itself declares, inherited ones left out."""
    annotated = cls.__dict__.get("__annotations__", {})
    return (row for row in declared_settings(cls) if row.field in annotated)


def names_of(row: Setting) -> Iterator[tuple[str, str]]:
    """(kind, name) of everything by which a setting can be given."""
    yield from (("flag", spelling) for spelling in row.spellings)
    if row.variable:
        yield "variable", row.variable
    if row.in_file:
        yield "key", row.path


def repeated(types: Iterable[type]) -> Iterator[str]:
    """Flags, variables and keys that two declarations share."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cls in types:
        for row in own_settings(cls):
            for name in dict.fromkeys(names_of(row)):
                places[name].append(f"{cls.__module__}.{cls.__qualname__}.{row.name}")
    for (kind, name), declarations in places.items():
        if len(declarations) > 1:
            yield f"{kind} {name} is declared by {' and by '.join(declarations)}"


def test_flags_variables_and_keys_are_unique() -> None:
    assert len(classes()) > 2, "no settings were found: has the convention changed?"
    obey(LAW, repeated(classes()))


def test_every_setting_has_help_of_one_line() -> None:
    rows = ((cls, row) for cls in classes() for row in own_settings(cls))
    obey(
        LAW,
        (
            f"{cls.__module__}.{cls.__qualname__}.{row.name}: help is {row.help!r}"
            for cls, row in rows
            if not row.help.strip() or "\n" in row.help or row.help.rstrip().endswith(".")
        ),
    )


def test_every_default_is_a_value_of_its_setting() -> None:
    """A default that the setting itself would refuse could not be written down by a user."""
    for cls in classes():
        for row in own_settings(cls):
            if row.choices and row.default not in (None, dataclasses.MISSING):
                assert row.default in row.choices, f"{cls.__qualname__}.{row.name}"


def spelled(flag: str) -> tuple[str, ...]:
    """A long flag with underscores and with dashes; a short one as it is."""
    both = (f"--{flag[2:].replace('-', '_')}", f"--{flag[2:].replace('_', '-')}")
    return both if flag.startswith("--") else (flag,)


def parsed(*arguments: str) -> dict[str, Any]:
    """What ``accelerate launch ARGUMENTS script.py`` understands, by parameter."""
    from accelerate.cli.launch import PLUGIN

    return PLUGIN.make_context("launch", [*arguments, "script.py"]).params


def test_every_flag_is_accepted_in_both_spellings() -> None:
    """``--a_b`` and ``--a-b`` fill the same setting."""
    found = []
    for row in (row for cls in classes() for row in own_settings(cls)):
        for spelling in (spelling for flag in row.flags for spelling in spelled(flag)):
            try:
                value = parsed(spelling, *([] if row.switch else ["1"])).get(row.name)
            except click.UsageError as error:
                found.append(f"{spelling}: {error.message}")
                continue
            if value not in (True, "1"):
                found.append(f"{spelling} fills {row.name} with {value!r}")
    obey(LAW, found)


def is_known(flag: str) -> bool:
    """Whether the launcher knows a flag; one that wants a value is known."""
    try:
        parsed(flag)
    except click.NoSuchOption:
        return False
    except click.UsageError:
        return True
    return True


def test_every_promised_flag_of_the_launcher_is_known() -> None:
    """A flag of the public interface does what it says or is refused in words; it is never unknown."""
    flags = (spelling for flag in contract()["flags"]["launch"] for spelling in spelled(flag))
    obey("the launcher knows every promised flag", (flag for flag in flags if not is_known(flag)))


def makers(source: Source) -> Iterator[str]:
    """Calls that make a flag by hand."""
    for call in (node for node in source.nodes if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name.rpartition(".")[2] == "add_argument" or name in ("click.option", "click.Option"):
            yield source.at(call, f"{name} declares a flag beside the settings")


def test_no_flag_is_made_by_hand_below_the_command_line() -> None:
    """What a component can be told is a setting next to it; the command line makes the flags from those."""
    below = (source for source in sources() if source.room in FLOOR and source.room != "cli")
    obey(LAW, (finding for source in below for finding in makers(source)))


def test_the_law_sees_what_is_declared_twice() -> None:
    @dataclasses.dataclass(frozen=True)
    class One:
        speed: int = setting(1, help="how fast")
        size: int = setting(1, help="how big", flags=("--other-way",))

    @dataclasses.dataclass(frozen=True)
    class Two(One):
        other_way: int = setting(2, help="once more", variable="ACCELERATE_SPEED")

    found = list(repeated([One, Two]))
    assert [line.partition(" is ")[0] for line in found] == ["variable ACCELERATE_SPEED", "flag --other-way"]


@pytest.mark.parametrize(
    "text", ["from accelerate.core.setting import setting as s", "from accelerate.core import setting"]
)
def test_a_file_that_declares_settings_is_found(text: str) -> None:
    assert declares(read(text))
    assert not declares(read("from accelerate.core.setting import load_settings"))
