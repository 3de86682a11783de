# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.env import env_command as env_command
from accelerate.cli.env import env_command_parser as env_command_parser
from accelerate.cli.env import main as main
from typing import Any

def __getattr__(name: str) -> Any: ...
