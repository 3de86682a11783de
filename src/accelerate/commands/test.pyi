# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.test import main as main
from accelerate.cli.test import test_command as test_command
from accelerate.cli.test import test_command_parser as test_command_parser
from typing import Any

def __getattr__(name: str) -> Any: ...
