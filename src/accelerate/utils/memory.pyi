# Written by `python -m accelerate.core.stubs accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.watch.retry import clear_device_cache as clear_device_cache
from accelerate.watch.retry import find_executable_batch_size as find_executable_batch_size
from accelerate.watch.retry import release_memory as release_memory
from accelerate.watch.retry import should_reduce_batch_size as should_reduce_batch_size
from typing import Any

def __getattr__(name: str) -> Any: ...
