# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.strategy.parallelism.config import ParallelismConfig as ParallelismConfig
from typing import Any

def __getattr__(name: str) -> Any: ...
