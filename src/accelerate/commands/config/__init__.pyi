# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config import get_config_parser as get_config_parser
from accelerate.cli.config import main as main
from accelerate.commands.config import cluster as cluster
from accelerate.commands.config import config as config
from accelerate.commands.config import config_args as config_args
from accelerate.commands.config import config_utils as config_utils
from accelerate.commands.config import default as default
from accelerate.commands.config import sagemaker as sagemaker
from accelerate.commands.config import update as update
from typing import Any

def __getattr__(name: str) -> Any: ...
