# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import CONFIG as _source_of_description
from accelerate.cli.config import config_command as config_command
from accelerate.cli.config import config_command_parser as config_command_parser
from accelerate.cli.config import main as main
from accelerate.cli.wizard.terminal import get_user_input as get_user_input
from typing import Any

description = _source_of_description

def __getattr__(name: str) -> Any: ...
