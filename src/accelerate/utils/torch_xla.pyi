# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from typing import Any

def install_xla(*args: Any, **kwargs: Any) -> Any: ...
def __getattr__(name: str) -> Any: ...
