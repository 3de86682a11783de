"""How much is run: ``TESTS_ALL=1`` (``make test-all``) takes more examples and longer trainings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

everything = os.environ.get("TESTS_ALL") == "1"


def examples(default: int, *, in_all: int) -> Callable[[Any], Any]:
    """Hypothesis settings of a test: how many examples it takes by default, and in ``make test-all``."""
    from hypothesis import settings

    return settings(max_examples=in_all if everything else default, deadline=None)


def only_in_all(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` that only ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.skipif(not everything, reason="runs in `make test-all`"))
