# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.accelerator_state import load_accelerator_state as load_accelerator_state
from accelerate.checkpoint.accelerator_state import load_custom_state as load_custom_state
from accelerate.checkpoint.accelerator_state import load_model as load_model
from accelerate.checkpoint.accelerator_state import save_accelerator_state as save_accelerator_state
from accelerate.checkpoint.accelerator_state import save_custom_state as save_custom_state
from typing import Any

logger: Any

def __getattr__(name: str) -> Any: ...
