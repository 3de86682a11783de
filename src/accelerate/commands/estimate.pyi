# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.estimate_memory import add_timm_hub_prefix as add_timm_hub_prefix
from accelerate.cli.estimate_memory import check_has_model as check_has_model
from accelerate.cli.estimate_memory import create_ascii_table as create_ascii_table
from accelerate.cli.estimate_memory import create_empty_model as create_empty_model
from accelerate.cli.estimate_memory import estimate_command as estimate_command
from accelerate.cli.estimate_memory import estimate_command_parser as estimate_command_parser
from accelerate.cli.estimate_memory import estimate_training_usage as estimate_training_usage
from accelerate.cli.estimate_memory import gather_data as gather_data
from accelerate.cli.estimate_memory import main as main
from accelerate.cli.estimate_memory import verify_on_hub as verify_on_hub
from typing import Any

def __getattr__(name: str) -> Any: ...
