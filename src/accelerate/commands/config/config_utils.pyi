# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import SubcommandHelpFormatter as SubcommandHelpFormatter
from typing import Any

DYNAMO_BACKENDS: list[str]

def __getattr__(name: str) -> Any: ...
