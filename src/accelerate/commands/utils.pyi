# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.arguments import CustomArgumentGroup as CustomArgumentGroup
from accelerate.cli.arguments import CustomArgumentParser as CustomArgumentParser
from typing import Any

def __getattr__(name: str) -> Any: ...
