# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.watch.console import MultiProcessAdapter as MultiProcessAdapter
from accelerate.watch.console import get_logger as get_logger
from typing import Any

def __getattr__(name: str) -> Any: ...
