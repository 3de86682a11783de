"""Prints the shell command that gives a shell's Python processes the device."""

from __future__ import annotations

import shlex

from tests.support.sim import environment

for name, value in environment().items():
    print(f"export {name}={shlex.quote(value)}")
