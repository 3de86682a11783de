# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.merge_weights import description as description
from accelerate.cli.merge_weights import main as main
from accelerate.cli.merge_weights import merge_command as merge_command
from accelerate.cli.merge_weights import merge_command_parser as merge_command_parser
from typing import Any

def __getattr__(name: str) -> Any: ...
