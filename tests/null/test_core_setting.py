"""Settings: one declaration, six sources, and an error for everything that does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import pytest

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.setting import SOURCES, SettingOrigin, declared_settings, load_settings, setting


@dataclass(frozen=True)
class TopLevelSettings:
    __topic__ = "Speed"

    speed: int = setting(1, help="how fast", flags=("-s",))
    kind: str | None = setting(None, help="which", choices=("no", "fp16", "bf16"))
    careful: bool = setting(False, help="whether to check", flag="--safe", variable="TESTS_SAFE")
    later: bool | None = setting(None, help="whether, or leave it open")
    spelled: bool = setting(False, switch=False, help="takes a word")
    count: int | Literal["auto"] | None = setting(None, help="how many")
    ratio: float = setting(0.5, help="how much")
    sizes: tuple[int, ...] = setting((), help="which sizes")
    hidden: int = setting(0, flag=None, variable=None, help="only in files")
    typed: int = setting(0, in_file=False, help="never in files")


@dataclass(frozen=True)
class EngineSettings:
    __section__ = "engine_config"
    __prefix__ = "engine_"

    engine_version: int = setting(1, help="which")
    engine_reshard: bool = setting(True, help="whether")


@dataclass(frozen=True)
class RequiredSettings:
    name: str = setting(help="who")


# ---------------------------------------------------------------- who wins

GIVEN: dict[str, dict[str, Any]] = {
    "code": {"code": {"{name}": 40}},
    "flag": {"flags": {"{name}": "30"}},
    "environment": {"env": {"ACCELERATE_{NAME}": "20"}},
    "scheduler": {"scheduler": {"{name}": SettingOrigin("scheduler", "JOB_SPEED", "15")}},
    "file": {"file": {"{name}": 10}},
}
WINS = {"code": 40, "flag": 30, "environment": 20, "scheduler": 15, "file": 10}


def load_arguments(sources: tuple[str, ...], name: str) -> dict[str, Any]:
    """Arguments of ``load_settings`` for these sources, each with a value of its own, in this order."""
    arguments: dict[str, Any] = {}
    for source in sources:
        for argument, table in GIVEN[source].items():
            filled = {key.format(name=name, NAME=name.upper()): value for key, value in table.items()}
            arguments[argument] = filled
    return {"env": {}, **arguments}


@pytest.mark.parametrize(("cls", "name"), [(TopLevelSettings, "speed"), (EngineSettings, "engine_version")])
@pytest.mark.parametrize("order", list(permutations(GIVEN)))
def test_the_documented_source_wins_in_any_order(cls: type, name: str, order: tuple[str, ...]) -> None:
    """F4: all 120 orders of five sources, of a top-level and of a nested key; every source is remembered."""
    loaded = load_settings(cls, **load_arguments(order, name))
    assert getattr(loaded.value, name) == 40
    assert [(o.source, o.value) for o in loaded.origins[name]] == [*WINS.items(), ("default", 1)]


@pytest.mark.parametrize("missing", range(1, 6))
def test_the_next_source_wins_where_one_says_nothing(missing: int) -> None:
    """F4: code > flag > environment > scheduler > file > default."""
    left = SOURCES[missing:-1]
    loaded = load_settings(TopLevelSettings, **load_arguments(left, "speed"))
    assert loaded.value.speed == WINS.get(left[0], 1) if left else loaded.value.speed == 1
    assert loaded.origin("speed").source == (left[0] if left else "default")
    assert loaded.is_given("speed") == bool(left)


def test_none_says_nothing_and_an_empty_variable_is_unset() -> None:
    loaded = load_settings(
        TopLevelSettings, code={"speed": None}, flags={"speed": None}, env={"ACCELERATE_SPEED": ""}
    )
    assert loaded.origin("speed").source == "default"


def test_an_origin_names_its_place_in_the_users_words() -> None:
    loaded = load_settings(
        TopLevelSettings,
        code={"later": True},
        flags={"careful": True},
        env={"ACCELERATE_SPEED": "3"},
        file={"ratio": 2, "kind": "bf16"},
        file_name="job.yaml",
        lines={"ratio": 7},
    )
    assert loaded.origin("later").where == "the argument later"
    assert loaded.origin("careful").where == "--safe"
    assert loaded.origin("speed").where == "the environment variable ACCELERATE_SPEED"
    assert loaded.origin("ratio").where == "job.yaml, line 7: ratio"
    assert loaded.origin("kind").where == "job.yaml: kind"
    speed, hidden = loaded.origin("speed"), loaded.origin("hidden")
    assert (speed.value, speed.where) == (3, "the environment variable ACCELERATE_SPEED")
    assert (hidden.value, hidden.source) == (0, "default")


# ---------------------------------------------------------------- what is derived


def test_everything_is_derived_from_the_declaration() -> None:
    rows = {row.name: row for row in declared_settings(TopLevelSettings)}
    assert rows["speed"].flags == ("--speed", "-s")
    assert rows["careful"].flags == ("--safe",)
    assert rows["careful"].variable == "TESTS_SAFE"
    assert rows["hidden"].flags == ()
    assert rows["hidden"].variable is None
    assert rows["kind"].topic == "Speed"
    assert [rows[name].switch for name in ("careful", "later", "spelled", "speed")] == [
        True,
        True,
        False,
        False,
    ]
    (version, _) = declared_settings(EngineSettings)
    assert version.spellings == ("--engine_version", "--engine-version")
    assert (version.path, version.prefix) == ("engine_config.engine_version", "engine_")


def test_a_setting_without_default_must_be_given() -> None:
    assert load_settings(RequiredSettings, code={"name": "Ada"}, env={}).value.name == "Ada"
    with pytest.raises(SettingError, match="name is needed") as error:
        load_settings(RequiredSettings, env={})
    assert error.value.fix == "add --name ..."


# ---------------------------------------------------------------- what does not fit


def test_a_typo_in_a_key_is_an_error_with_a_suggestion_at_any_depth() -> None:
    """F5."""
    with pytest.raises(UnknownNameError) as top:
        load_settings(TopLevelSettings, env={}, file={"spede": 1}, file_name="job.yaml", lines={"spede": 3})
    assert str(top.value).startswith("unknown key 'spede' in job.yaml, line 3")
    assert top.value.near == "speed"
    with pytest.raises(UnknownNameError) as nested:
        load_settings(EngineSettings, env={}, file={"engine_reshrd": True}, file_name="job.yaml")
    assert str(nested.value).startswith("unknown key of engine_config 'engine_reshrd' in job.yaml")
    assert nested.value.near == "engine_reshard"


def test_a_key_that_only_flags_have_is_unknown_in_files() -> None:
    with pytest.raises(UnknownNameError, match="unknown key 'typed'"):
        load_settings(TopLevelSettings, env={}, file={"typed": 1})


def test_a_section_may_omit_its_prefix_but_not_say_a_thing_twice() -> None:
    assert load_settings(EngineSettings, env={}, file={"version": 2}).value.engine_version == 2
    with pytest.raises(SettingError, match="gives engine_version twice"):
        load_settings(EngineSettings, env={}, file={"version": 2, "engine_version": 3})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("speed", "8 ", "write speed: 8 without quotes"),
        ("speed", "8.0", "give a whole number"),
        ("speed", 1.5, "give a whole number"),
        ("speed", True, "give a whole number"),
        ("speed", [1], "give a whole number"),
        ("careful", 2, "give true or false"),
        ("careful", "perhaps", "give true or false"),
        ("count", "many", "give a whole number or 'auto'"),
        ("sizes", ["a"], "give a list (a whole number each)"),
        ("sizes", "1,2", "give a list (a whole number each)"),
        ("ratio", "1_0", "write ratio: 10.0 without quotes"),
        ("ratio", "inf", "write ratio: inf without quotes"),
    ],
)
def test_a_wrong_type_in_a_file_is_an_error_that_says_what_fits(name: str, value: Any, fix: str) -> None:
    """F5: of texts only those that are plain numbers count as numbers."""
    with pytest.raises(SettingError) as error:
        load_settings(TopLevelSettings, env={}, file={name: value}, file_name="job.yaml", lines={name: 2})
    assert error.value.what.startswith(f"job.yaml, line 2: {name} is ")
    assert error.value.fix == fix


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("count", "auto", "auto"),
        ("count", 8, 8),
        ("count", "8", 8),  # between quotes, as files in use have it
        ("speed", "-8", -8),
        ("ratio", "5e-1", 0.5),
        ("ratio", 2, 2.0),
        ("careful", "yes", True),
        ("careful", "no", False),
        ("kind", False, "no"),  # a bare `no` in YAML
        ("kind", "BF16", "bf16"),
        ("sizes", [1, 2], (1, 2)),
        ("later", False, False),
    ],
)
def test_what_fits_a_file(name: str, value: Any, result: Any) -> None:
    value = getattr(load_settings(TopLevelSettings, env={}, file={name: value}).value, name)
    assert (value, type(value)) == (result, type(result))


@pytest.mark.parametrize(
    ("name", "text", "result"),
    [
        ("speed", "8", 8),
        ("count", "auto", "auto"),
        ("count", "8", 8),
        ("ratio", "1e-3", 1e-3),
        ("sizes", "1, 2", (1, 2)),
        ("later", "off", False),
        ("spelled", "true", True),
    ],
)
def test_flags_and_variables_are_text(name: str, text: str, result: Any) -> None:
    (row,) = [row for row in declared_settings(TopLevelSettings) if row.name == name]
    assert getattr(load_settings(TopLevelSettings, env={}, flags={name: text}).value, name) == result
    assert getattr(load_settings(TopLevelSettings, env={str(row.variable): text}).value, name) == result


def test_an_unknown_value_suggests_the_nearest_and_names_its_place() -> None:
    with pytest.raises(UnknownNameError) as error:
        load_settings(TopLevelSettings, env={"ACCELERATE_KIND": "bf61"})
    assert error.value.what == "unknown value 'bf61' of kind (the environment variable ACCELERATE_KIND)"
    assert error.value.fix == "did you mean 'bf16'?"


def test_a_wrong_value_is_an_error_even_where_another_source_wins() -> None:
    with pytest.raises(SettingError, match="ACCELERATE_SPEED"):
        load_settings(TopLevelSettings, code={"speed": 1}, env={"ACCELERATE_SPEED": "fast"})
