# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.launch.notebook.launchers import debug_launcher as debug_launcher
from accelerate.launch.notebook.launchers import notebook_launcher as notebook_launcher
from accelerate.launch.notebook.launchers import test_launch as test_launch
from typing import Any

def __getattr__(name: str) -> Any: ...
