# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.wizard.terminal import get_sagemaker_input as get_sagemaker_input
from typing import Any

def __getattr__(name: str) -> Any: ...
