"""The long run: ``TESTS_ALL=1`` (``make test-all``) takes more examples, longer trainings and more cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

LONG_RUN = os.environ.get("TESTS_ALL") == "1"


def hypothesis_settings(max_examples: int, *, in_long_run: int) -> Callable[[Any], Any]:
    """Hypothesis settings without a deadline; the long run takes ``in_long_run`` examples."""
    from hypothesis import settings

    return settings(max_examples=in_long_run if LONG_RUN else max_examples, deadline=None)


def long_run_param(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` that the default run skips."""
    return pytest.param(*values, marks=pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`"))
