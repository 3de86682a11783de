"""Choices that exist only where a library brings them, listed by that library in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from accelerate.core import environ


@cache
def start_listing(expression: str) -> subprocess.Popen[str]:
    """Start the process that evaluates an expression of torch; it runs while other questions are answered."""
    code = f"import torch; print('names', *({expression}))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ.make_child_environment({}),
    )


@cache
def list_names(expression: str) -> frozenset[str] | None:
    """Return the listed names in lower case; None where torch cannot be imported or does not know."""
    output, _ = start_listing(expression).communicate()
    lines = [line.split() for line in output.splitlines()]
    return next((frozenset(map(str.lower, words[1:])) for words in lines if words[:1] == ["names"]), None)
