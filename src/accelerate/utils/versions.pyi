# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.core.packages import compare_versions as compare_versions
from accelerate.core.packages import is_torch_version as is_torch_version
from typing import Any

def __getattr__(name: str) -> Any: ...
