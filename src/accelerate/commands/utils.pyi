# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.v1_launcher import CustomArgumentGroup as CustomArgumentGroup
from accelerate.cli.v1_launcher import CustomArgumentParser as CustomArgumentParser
from typing import Any

def __getattr__(name: str) -> Any: ...
