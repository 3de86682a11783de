# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.accelerator import Accelerator as Accelerator
from accelerate.facade.accelerator import torch as torch
from typing import Any

logger: Any

def __getattr__(name: str) -> Any: ...
