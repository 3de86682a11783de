# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.test_utils import testing as testing
from accelerate.test_utils import training as training
from typing import Any

def __getattr__(name: str) -> Any: ...
