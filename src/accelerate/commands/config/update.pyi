# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import UPDATE as description
from accelerate.cli.config import update_command_parser as update_command_parser
from accelerate.cli.config import update_config as update_config
from accelerate.cli.config import update_config_command as update_config_command
from typing import Any

def __getattr__(name: str) -> Any: ...
