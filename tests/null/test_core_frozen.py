"""``frozen_dataclass`` classes do what frozen dataclasses do; each case holds for both."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from accelerate.core.value_types import frozen_dataclass


@frozen_dataclass
class Ours:
    place: str
    count: int = 1
    table: dict[str, int] = field(default_factory=dict)
    note: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Theirs:
    place: str
    count: int = 1
    table: dict[str, int] = field(default_factory=dict)
    note: str = field(default="", kw_only=True)


@frozen_dataclass
class More(Ours):
    size: int = 2

    def __str__(self) -> str:
        return self.place


@pytest.fixture(params=[Ours, Theirs])
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_values_are_given_by_place_or_by_name(cls: Any) -> None:
    given = cls("here", count=3, note="x")
    assert dataclasses.asdict(given) == {"place": "here", "count": 3, "table": {}, "note": "x"}
    assert cls("a").table is not cls("a").table
    assert [item.name for item in dataclasses.fields(cls)] == ["place", "count", "table", "note"]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda cls: cls(), "place"),
        (lambda cls: cls("a", place="b"), "place"),
        (lambda cls: cls("a", 1, {}, "note"), "4|5|too many"),
        (lambda cls: cls("a", size=1), "size"),
    ],
)
def test_wrong_arguments_are_refused(cls: Any, make: Callable[[Any], Any], word: str) -> None:
    with pytest.raises(TypeError, match=word):
        make(cls)


def test_nothing_changes(cls: Any) -> None:
    value = cls("here")
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.place = "there"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del value.count
    there = dataclasses.replace(value, place="there")
    assert (value.place, there.place, there.count) == ("here", "there", 1)


def test_equal_values_are_equal(cls: Any) -> None:
    assert cls("a", 2) == cls("a", count=2) != cls("b", 2)
    assert cls("a") != ("a", 1, {}, "")
    assert hash(cls("a", table=())) == hash(cls("a", table=()))
    with pytest.raises(TypeError, match="unhashable"):
        hash(cls("a"))
    assert repr(cls("a")) == f"{cls.__name__}(place='a', count=1, table={{}}, note='')"


def test_copies_travel(cls: Any) -> None:
    value = cls("a", 2, {"x": 1})
    assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)


def test_a_subclass_adds_fields_and_is_another_class() -> None:
    more = More("a", 2, {}, 3, note="n")
    assert (more.size, more.note, str(more)) == (3, "n", "a")
    assert More("a") != Ours("a")
    assert dataclasses.replace(more, size=4) == More("a", 2, {}, 4, note="n")
