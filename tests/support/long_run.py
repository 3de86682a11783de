"""The long run: ``TESTS_ALL=1`` (``make test-all``) takes more examples, longer trainings and more cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

LONG_RUN = os.environ.get("TESTS_ALL") == "1"


def hypothesis_settings(max_examples: int, *, in_long_run: int, shrink: bool = True) -> Callable[[Any], Any]:
    """Hypothesis settings without a deadline; the long run takes ``in_long_run`` examples, always new ones.

    The default run takes the same examples each time: it must not fail for what a change has not touched.
    Without ``shrink`` a failing example is shown as it was drawn, for examples that take ranks.
    """
    from hypothesis import Phase, settings

    phases = [phase for phase in settings().phases if shrink or phase not in (Phase.shrink, Phase.explain)]
    if LONG_RUN:
        return settings(max_examples=in_long_run, deadline=None, phases=phases)
    return settings(max_examples=max_examples, deadline=None, phases=phases, derandomize=True, database=None)


def long_run_param(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` that the default run skips."""
    return pytest.param(*values, marks=pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`"))


def select_cases(every: Iterable[tuple[Any, ...]], default: Collection[tuple[Any, ...]]) -> list[Any]:
    """Return cases for ``pytest.mark.parametrize``, of which the default run skips all but ``default``."""
    cases = list(every)
    assert not (unknown := [case for case in default if case not in cases]), unknown
    return [case if case in default else long_run_param(*case) for case in cases]
