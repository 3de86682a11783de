"""The small helpers of core: trees, units, errors, the environment."""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest

from accelerate.core import environ, errors, tree, units

# ---------------------------------------------------------------- trees

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


class Batch(UserDict):  # type: ignore[type-arg]
    """A mapping with something beside its items, like the batches of tokenizers."""

    note = ""


class PlainMapping(MutableMapping):  # type: ignore[type-arg]
    """A mapping that keeps its items in an attribute, and says nothing of copies."""

    def __init__(self, items: Any) -> None:
        self.items_by_name = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self.items_by_name[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.items_by_name[name] = value

    def __delitem__(self, name: str) -> None:
        del self.items_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


def test_a_mapped_tree_keeps_its_containers() -> None:
    value = {"a": [1, (2, Pair(3, 4))], "b": Frozen(5, {"c": 6}), "d": OrderedDict(e=7)}
    mapped = tree.map_tree(lambda leaf: leaf and leaf * 10, value)
    assert mapped == {"a": [10, (20, Pair(30, 40))], "b": Frozen(50, {"c": 60}), "d": OrderedDict(e=70)}
    assert type(mapped["a"][1][1]) is Pair
    assert type(mapped["d"]) is OrderedDict
    assert value["b"].x == 5


def test_a_mapping_of_any_class_keeps_what_is_beside_its_items() -> None:
    batch, counts = Batch(a=1), defaultdict(list, a=1)
    batch.note = "kept"
    mapped = tree.map_tree(lambda leaf: leaf + 1, [batch, counts])
    assert (mapped[0]["a"], mapped[0].note, batch["a"]) == (2, "kept", 1)
    assert mapped[1]["unseen"] == []


def test_a_mapping_that_copies_its_attributes_alone_is_not_changed() -> None:
    batch = PlainMapping({"a": 1})
    batch.note = ["kept"]  # type: ignore[attr-defined]
    mapped = tree.map_tree(lambda leaf: leaf + 1, batch)
    assert (dict(mapped), mapped.note, dict(batch)) == ({"a": 2}, ["kept"], {"a": 1})


def test_leaves_are_named_like_python_names_them() -> None:
    value = {"a": [1, Pair(2, 3)], "b": Frozen(4)}
    assert dict(tree.iterate_leaves(value)) == {"['a'][0]": 1, "['a'][1].left": 2, "['a'][1].right": 3,
                                        "['b'].x": 4, "['b'].y": None}  # fmt: skip


def test_finding_and_rebuilding() -> None:
    value = [1, {"a": (2, "x")}]
    assert tree.find_leaf(lambda leaf: isinstance(leaf, str), value) == "x"
    assert tree.find_leaf(lambda leaf: leaf == 9, value) is None
    assert tree.replace_leaves(value, iter([7, 8, 9])) == [7, {"a": (8, 9)}]


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5e9),
        ("5GiB", 5 * 2**30),
        ("8Gb", 1e9),
        ("1.5kB", 1500),
        ("12", 12),
        ("1e3MB", 1e9),
        ("1.5E1 GIB", 15 * 2**30),
        (" 3 MiB ", 3 * 2**20),
        (7, 7),
    ],
)
def test_sizes(text: str | int, size: float) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["5 apples", "", "GB", "-3GB", "1e3", "1e999GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(errors.SettingError, match="is not a size"):
        units.parse_bytes(text)


def test_a_number_is_bytes() -> None:
    assert units.parse_bytes(5e9) == 5 * 10**9
    for wrong in (float("nan"), float("inf"), None):
        with pytest.raises(errors.SettingError, match="is not a size"):
            units.parse_bytes(wrong)  # type: ignore[arg-type]


def test_for_people() -> None:
    assert [units.show_bytes(n) for n in (10, 1536, 1610612736)] == ["10 bytes", "1.50 KB", "1.50 GB"]
    sizes = {1024: "1.0 KB", 1.5: "1.5 bytes", 1610612736: "1.5 GB", 10**18: "888.18 PB"}
    assert {size: units.convert_bytes(size) for size in sizes} == sizes
    assert [units.show_seconds(s) for s in (0.00042, 0.0421, 3.21, 75, 7260)] == [
        "420 us", "42 ms", "3.2 s", "1 min 15 s", "2 h 1 min",
    ]  # fmt: skip
    assert [units.show_count(n) for n in (12, 1500, 8030261248)] == ["12", "1.5K", "8.03B"]


# ---------------------------------------------------------------- errors


def every(kind: type[errors.AccelerateError]) -> list[type[errors.AccelerateError]]:
    return [kind, *(sub for child in kind.__subclasses__() for sub in every(child))]


def test_an_error_says_what_why_and_what_to_type() -> None:
    error = errors.LaunchError("it broke", why="it was old", fix="buy a new one")
    assert str(error) == "it broke\n  why: it was old\n  fix: buy a new one"
    assert str(errors.LaunchError("it broke")) == "it broke"


@pytest.mark.parametrize(
    "kind", [k for k in every(errors.AccelerateError) if k.__module__ == errors.__name__]
)
def test_errors_travel_between_processes(kind: type[errors.AccelerateError]) -> None:
    error = kind.__new__(kind)
    errors.AccelerateError.__init__(error, "what", why="why", fix="fix")
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), twin.what, twin.why, twin.fix) == (kind, "what", "why", "fix")


def test_errors_are_what_users_already_catch() -> None:
    assert issubclass(errors.SettingError, ValueError)
    assert issubclass(errors.MissingExtraError, ImportError)
    assert issubclass(errors.FeatureNotBuiltError, NotImplementedError)
    assert str(errors.MissingExtraError("rich", "the table")).endswith("fix: pip install rich")


def test_the_nearest_name() -> None:
    assert errors.nearest("DEBUGG", ["debug", "quiet"]) == "debug"
    assert errors.nearest("xyz", ["debug", "quiet"]) is None
    assert errors.nearest("merge", ["launch", "merge-weights"]) == "merge-weights"


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize(("text", "value"), [("1", True), ("YES", True), ("off", False), (" f ", False)])
def test_yes_and_no(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("TESTS_FLAG", text)
    assert environ.get_flag("TESTS_FLAG") is value


def test_neither_yes_nor_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_FLAG", "perhaps")
    with pytest.raises(errors.SettingError, match="TESTS_FLAG is 'perhaps'"):
        environ.get_flag("TESTS_FLAG")


def test_patching_puts_back_exactly_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_A", "1")
    monkeypatch.delenv("TESTS_B", raising=False)
    before = environ.snapshot()
    with environ.patch_environment({"TESTS_A": None, "TESTS_B": 2}):
        assert environ.get("TESTS_A") is None
        assert environ.get("TESTS_B") == "2"
    assert environ.snapshot() == before
    with contextlib.suppress(KeyError), environ.patch_environment({"TESTS_A": None}):
        raise KeyError
    assert environ.snapshot() == before
    with environ.patch_environment({"TESTS_C": 3}, clear=True):
        assert environ.snapshot() == {"TESTS_C": "3"}
    assert environ.snapshot() == before


def test_a_childs_environment_leaves_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_A", "1")
    child = environ.make_child_environment({"TESTS_A": None, "TESTS_B": 2})
    assert "TESTS_A" not in child
    assert child["TESTS_B"] == "2"
    assert environ.get("TESTS_A") == "1"
    assert environ.get("TESTS_B") is None
