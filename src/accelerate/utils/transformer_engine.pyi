# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.precision.float8.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accelerate.precision.float8.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from accelerate.precision.float8.transformer_engine import convert_model as convert_model
from accelerate.precision.float8.transformer_engine import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from typing import Any

def __getattr__(name: str) -> Any: ...
