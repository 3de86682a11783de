# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.outer.local_training import DiLoCo as DiLoCo
from accelerate.outer.local_training import LocalSGD as LocalSGD
from typing import Any

def __getattr__(name: str) -> Any: ...
