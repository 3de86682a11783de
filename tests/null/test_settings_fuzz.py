"""Configuration files of the wild, and many that went wrong: a request, or an error with a place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.core.errors import AccelerateError, UnknownNameError
from tests.support.configs import FORMATS, TRAINERS, WRONG
from tests.support.launch_plans import file_keys, request_of_file
from tests.support.long_run import LONG_RUN

FILES = FORMATS | TRAINERS


# ---------------------------------------------------------------- as they are


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_wild_are_launch_requests(tmp_path: Path, name: str) -> None:
    """F5: every format of 1.x, and what programs on top of it ship, each key and value as it stands there."""
    path = tmp_path / ("job.json" if name == "json" else "job.yaml")
    path.write_text(FILES[name])
    request = request_of_file(path)
    values = yaml.safe_load(FILES[name])
    if "mixed_precision" in values:
        assert request.get("mixed_precision") == values["mixed_precision"]
    assert request.get("num_machines") == values.get("num_machines", 1)
    assert load_config_from_file(str(path)).to_dict()["distributed_type"] == (
        values["distributed_type"] or "NO"
    )


def test_a_file_with_keys_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(WRONG)
    with pytest.raises(UnknownNameError, match=r"unknown key 'another_invalid_key' in .*job\.yaml, line \d+"):
        request_of_file(path)
    with pytest.raises(ValueError, match="another_invalid_key"):
        load_config_from_file(str(path))


# ---------------------------------------------------------------- mutated

KEYS = file_keys()
WORDS = st.sampled_from(
    [*KEYS, "no", "NO", "yes", "null", "~", "all", "auto", "none", "", "fsdp_", ".inf", "<<"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**200), 10**400, float("nan"), float("inf"), 0.5, -1, 0])
    | st.floats()
    | WORDS
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.integers(), inner, max_size=3),
    max_leaves=6,
)
# Lines that YAML allows or not, put in anywhere.
LINES = st.sampled_from(
    ["? x", "- 1", "\tx: 1", "a: &a [*a]", "b: &b {<<: *b}", "<<: {num_processes: 2}", "<<: 3", "'': 1",
     "x: !!python/x y", "num_processes: 2", "num_processes: 12:30", "num_processes: 0x1F", "? [1]\n: 2",
     "debug: !!int abc", "debug: !!float x", "debug: !!timestamp 2001-99-99", "%YAML 9.9", "---", "...",
     "fsdp_config: &f\n  fsdp_version: 2\n  fsdp_version: 1", "fsdp_config: *f", "1: 2", "null: 3", "a: *g",
     "x: \"\\ud800\"", "x: \"\\x00\"", "[" * 200, "a: " + "{a: " * 120, "\ufeff", "\x07", "\x85",
     "num_processes: 1_000", "!!set {a}", "? {a: b}\n: c"]
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """(the file's name, its content): a valid file with a few things wrong."""
    text = draw(st.sampled_from(sorted(FILES.values())))
    way = draw(st.sampled_from(["values", "lines", "bytes", "cut"]))
    name = draw(st.sampled_from(["job.yaml", "job.yaml", "job.json"]))
    if way == "values":
        table = yaml.safe_load(text)
        for _ in range(draw(st.integers(1, 3))):
            _change(draw, table)
        text = _dumped(table, name)
    elif way == "lines":
        lines = text.splitlines()
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(lines)))
            lines.insert(at, draw(st.sampled_from(lines) | LINES))
        text = "\n".join(lines)
    content = text.encode("utf-8", errors="surrogatepass")
    if way == "bytes":
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(min_size=1, max_size=3)) + content[at:]
        if draw(st.booleans()):
            content = content.decode("utf-8", errors="replace").encode(
                draw(st.sampled_from(["utf-16", "utf-32"]))
            )
    elif way == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    return name, content


def _change(draw: st.DrawFn, table: dict[Any, Any]) -> None:
    """One key of a table, or of a table in it, gets another name or value, or a new one comes."""
    inner = [value for value in table.values() if isinstance(value, dict) and value]
    if inner and draw(st.booleans()):
        table = draw(st.sampled_from(inner))
    way = draw(st.sampled_from(["value", "name", "new"]))
    keys = list(table)
    if way == "new" or not keys:
        table[draw(WORDS | st.text(max_size=6) | st.integers() | st.none())] = draw(VALUES)
        return
    key = draw(st.sampled_from(keys))
    if way == "value":
        table[key] = draw(VALUES)
    else:
        name = str(key)
        at = draw(st.integers(0, len(name)))
        table[name[:at] + draw(st.sampled_from(["", "x", "_", " "])) + name[at + 1 :]] = table.pop(key)


def _dumped(table: dict[Any, Any], name: str) -> str:
    return json.dumps(table, default=str, skipkeys=True) if name.endswith("json") else yaml.safe_dump(table)


@settings(
    max_examples=2000 if LONG_RUN else 200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(mutated())
def test_wrong_files(case: tuple[str, bytes]) -> None:
    """F5: a request, or an error that names the file, and the line and key where there is one."""
    name, content = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        try:
            request_of_file(path)
        except AccelerateError as error:
            _names_its_place(error, path)


def _names_its_place(error: AccelerateError, path: Path) -> None:
    """Holds an error against the file: its name; its line unless it is about the whole file or JSON."""
    assert path.name in error.what, str(error)
    whole = ("cannot be read", "not a table of keys", "not valid", "is missing", "is given, but")
    if path.suffix == ".json" or any(words in error.what for words in whole):
        return
    assert f"{path}, line " in str(error), str(error)
