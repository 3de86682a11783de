# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.launch.ray_job import launch as launch
from typing import Any

def __getattr__(name: str) -> Any: ...
