# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accelerate.facade.optimizer import move_to_device as move_to_device
from accelerate.facade.optimizer import patch_optimizer_step as patch_optimizer_step
from typing import Any

def __getattr__(name: str) -> Any: ...
