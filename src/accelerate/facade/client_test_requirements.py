"""The decorators ``require_<what>`` for tests of other projects, which skip a test where it cannot run.

Each takes a test function or a ``unittest.TestCase`` class, asks when it is applied, and marks it by
``unittest.skipUnless``. ``names.py`` says for which packages and devices there are some.
"""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate import device as devices
from accelerate.core import environ, packages
from accelerate.facade.client_test_utils import get_backend

Decorator = Callable[[Any], Any]


def _make_decorator(condition: Callable[[], Any], need: str) -> Decorator:
    """Return a decorator that skips a test unless ``condition()``; ``need`` completes "test requires ..."."""

    def require(test_case: Any) -> Any:
        return unittest.skipUnless(condition(), f"test requires {need}")(test_case)

    require.__doc__ = f"Skip a test unless there is {need}."
    return require


def package_decorator(check: str, package: str) -> Decorator:
    """Return a decorator that skips a test unless the function ``check``, ``"module:name"``, returns True."""
    module, _, name = check.partition(":")
    return _make_decorator(
        lambda: getattr(importlib.import_module(module), name)(), package.replace("_", "-")
    )


def device_decorator(types: str, how_many: str) -> Decorator:
    """Return a decorator that skips a test unless there are devices.

    Args:
        types: their types, ``"cuda"``, ``"cuda_or_xpu"``.
        how_many: ``"single_"``, ``"multi_"``, ``"non_"``; empty for one or more.
    """
    need, is_enough = {
        "": ("", lambda count: count > 0),
        "single_": ("exactly one ", lambda count: count == 1),
        "multi_": ("several ", lambda count: count > 1),
        "non_": ("no ", lambda count: count == 0),
    }[how_many]
    each = types.split("_or_")
    return _make_decorator(lambda: is_enough(max(map(_count, each))), f"{need}{' or '.join(each)}")


def _count(type: str) -> int:
    device = devices.get(type)
    return device.count() if device.is_available() else 0


def _count_accelerators() -> int:
    return 0 if devices.detect().type == "cpu" else get_backend()[1]


require_cpu = _make_decorator(lambda: _count_accelerators() == 0, "a CPU alone")
require_non_cpu = _make_decorator(lambda: _count_accelerators() > 0, "an accelerator")
require_single_device = _make_decorator(lambda: _count_accelerators() == 1, "exactly one accelerator")
require_multi_device = _make_decorator(lambda: _count_accelerators() > 1, "several accelerators")
require_huggingface_suite = _make_decorator(
    lambda: all(map(packages.is_installed, ("transformers", "datasets"))), "transformers and datasets"
)
_TRACKERS = ("wandb", "tensorboard", "trackio", "swanlab", "matplotlib")
require_trackers = _make_decorator(
    lambda: any(map(packages.is_installed, _TRACKERS)), f"one of {', '.join(_TRACKERS)}"
)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test unless torch is at least of ``version``; ``@require_torch_min_version(version="2.8")``."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    new_enough = version is None or packages.is_torch_version(">=", version)
    return unittest.skipUnless(new_enough, f"test requires torch {version} or newer")(test_case)


require_fsdp2 = partial(require_torch_min_version, version="2.6")
require_tp = partial(require_torch_min_version, version="2.3")

slow = _make_decorator(lambda: environ.get_flag("RUN_SLOW"), "RUN_SLOW=1: it is slow")


def skip(test_case: Any) -> Any:
    """Skip a test always."""
    return unittest.skip("test is skipped")(test_case)


def run_first(test_case: Any) -> Any:
    """Let a test run before all others, where the plugin pytest-order is installed."""
    import pytest

    return pytest.mark.order(1)(test_case)
