"""The guarantees of the fixtures: the test before it left nothing behind in this process."""

from __future__ import annotations

import os

import pytest

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState


def leave_everything_behind() -> None:
    os.environ["ACCELERATE_LEFT_BEHIND"] = "1"
    os.environ.pop("PATH")
    Accelerator(cpu=True, gradient_accumulation_steps=7)
    assert PartialState._shared_state


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_test_finds_nothing_of_the_one_before(turn: str) -> None:
    """Runs twice: the second run would see what the first has left."""
    assert "ACCELERATE_LEFT_BEHIND" not in os.environ
    assert "PATH" in os.environ
    assert not PartialState._shared_state
    assert not AcceleratorState._shared_state
    assert not GradientState._shared_state
    leave_everything_behind()
