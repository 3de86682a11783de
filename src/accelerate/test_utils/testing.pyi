# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.client_test_utils import execute_subprocess_async as execute_subprocess_async
from accelerate.facade.client_test_utils import get_torch_dist_unique_port as get_torch_dist_unique_port
from accelerate.facade.client_test_utils import path_in_accelerate_package as path_in_accelerate_package
from typing import Any

def __getattr__(name: str) -> Any: ...
