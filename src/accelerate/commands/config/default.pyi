# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import DEFAULT as _source_of_description
from accelerate.cli.config import default_command_parser as default_command_parser
from accelerate.cli.config import default_config_command as default_config_command
from accelerate.cli.config_classes import write_basic_config as write_basic_config
from typing import Any

description = _source_of_description

def __getattr__(name: str) -> Any: ...
