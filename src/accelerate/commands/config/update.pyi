# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import UPDATE as _source_of_description
from accelerate.cli.config import update_command_parser as update_command_parser
from accelerate.cli.config import update_config as update_config
from accelerate.cli.config import update_config_command as update_config_command
from typing import Any

description = _source_of_description

def __getattr__(name: str) -> Any: ...
