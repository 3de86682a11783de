# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.precision.float8.torchao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accelerate.precision.float8.torchao import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from accelerate.precision.float8.torchao import filter_linear_layers as filter_linear_layers
from accelerate.precision.float8.torchao import find_first_last_linear_layers as find_first_last_linear_layers
from accelerate.precision.float8.torchao import has_ao_layers as has_ao_layers
from typing import Any

def __getattr__(name: str) -> Any: ...
