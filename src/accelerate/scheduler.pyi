# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.scheduler import AcceleratedScheduler as AcceleratedScheduler
from typing import Any

def __getattr__(name: str) -> Any: ...
