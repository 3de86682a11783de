# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.to_fsdp2 import ARGUMENT_KEY_MAPPING as ARGUMENT_KEY_MAPPING
from accelerate.cli.to_fsdp2 import ARGUMENT_VALUE_MAPPING as ARGUMENT_VALUE_MAPPING
from accelerate.cli.to_fsdp2 import ConversionStatus as ConversionStatus
from accelerate.cli.to_fsdp2 import convert_config_to_fsdp2 as convert_config_to_fsdp2
from accelerate.cli.to_fsdp2 import load_config as load_config
from accelerate.cli.to_fsdp2 import to_fsdp2_command as to_fsdp2_command
from accelerate.cli.to_fsdp2 import to_fsdp2_command_parser as to_fsdp2_command_parser
from typing import Any

def __getattr__(name: str) -> Any: ...
