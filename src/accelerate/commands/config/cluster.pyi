# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.wizard.terminal import get_cluster_input as get_cluster_input
from typing import Any

def __getattr__(name: str) -> Any: ...
