# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import SubcommandHelpFormatter as SubcommandHelpFormatter
from typing import Any

DYNAMO_BACKENDS: list[str]

def __getattr__(name: str) -> Any: ...
