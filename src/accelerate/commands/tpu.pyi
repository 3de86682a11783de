# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.tpu_config import main as main
from accelerate.cli.tpu_config import tpu_command_launcher as tpu_command_launcher
from accelerate.cli.tpu_config import tpu_command_parser as tpu_command_parser
from typing import Any

def __getattr__(name: str) -> Any: ...
