# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.state import AcceleratorState as AcceleratorState
from accelerate.facade.state import GradientState as GradientState
from accelerate.facade.state import PartialState as PartialState
from accelerate.facade.state import ThreadLocalSharedDict as ThreadLocalSharedDict
from accelerate.facade.state import do_nothing as do_nothing
from accelerate.facade.state import is_initialized as is_initialized
from typing import Any

def __getattr__(name: str) -> Any: ...
