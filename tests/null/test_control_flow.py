"""Two lines that call the same collective: can one process come through both."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.world.call_site_control_flow import on_same_path

CERTAIN = {
    "one after the other": "def f():\n    A\n    B\n",
    "in the module": "A\nx = 1\nB\n",
    "under a condition on the data, then after it": "def f():\n    if loss is not None:\n        A\n    B\n",
    "in a loop": "for batch in loader:\n    A\n    B\n",
    "in a try block, then after it": "try:\n    A\nexcept ValueError:\n    pass\nB\n",
    "a loop, then its else": "for x in y:\n    A\nelse:\n    B\n",
    "in a method": "class C:\n    def f(self):\n        with x:\n            A\n        B\n",
}
UNCERTAIN = {
    "two branches": "if x:\n    A\nelse:\n    B\n",
    "cases": "match x:\n    case 1:\n        A\n    case _:\n        B\n",
    "a block and its handler": "try:\n    A\nexcept ValueError:\n    B\n",
    "two handlers": "try:\n    x\nexcept ValueError:\n    A\nexcept KeyError:\n    B\n",
    "a branch that leaves": "def f():\n    if x:\n        A\n        return\n    B\n",
    "a branch that breaks": "while True:\n    if x:\n        A\n        break\n    B\n",
    "under conditions on the rank": "if a.is_main_process:\n    A\nif not a.is_main_process:\n    B\n",
    "one of them under a condition on the rank": "if rank > 0:\n    A\nB\n",
    "two functions": "def f():\n    A\ndef g():\n    B\n",
    "a function and the function in it": "def f():\n    def g():\n        A\n    B\n",
    "one statement": "f(\n    A,\n    B,\n)\n",
    "no program": "%magic\nA\nB\n",
}


def certain(folder: Path, program: str) -> bool:
    file = folder / "program.py"
    file.write_text(program)
    lines = program.splitlines()
    numbers = {i for i, line in enumerate(lines, 1) if line.strip().rstrip(",") in ("A", "B")}
    assert len(numbers) == 2
    return on_same_path(str(file), frozenset(numbers))


@pytest.mark.parametrize("name", CERTAIN)
def test_lines_on_one_way(tmp_path: Path, name: str) -> None:
    assert certain(tmp_path, CERTAIN[name])


@pytest.mark.parametrize("name", UNCERTAIN)
def test_lines_that_may_be_meant_for_different_ranks(tmp_path: Path, name: str) -> None:
    assert not certain(tmp_path, UNCERTAIN[name])


def test_a_program_that_cannot_be_read_is_given_the_benefit() -> None:
    assert not on_same_path("<unknown>", frozenset({1, 2}))
    assert not on_same_path(__file__, frozenset({3}))
