# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.watch.console import tqdm as tqdm
from typing import Any

def __getattr__(name: str) -> Any: ...
