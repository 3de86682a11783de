# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.watch.batch_size_search import clear_device_cache as clear_device_cache
from accelerate.watch.batch_size_search import find_executable_batch_size as find_executable_batch_size
from accelerate.watch.batch_size_search import release_memory as release_memory
from accelerate.watch.batch_size_search import should_reduce_batch_size as should_reduce_batch_size
from typing import Any

def __getattr__(name: str) -> Any: ...
