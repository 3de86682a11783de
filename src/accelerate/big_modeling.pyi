# Written by `python -m accelerate.core.stubs accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.offload.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from accelerate.offload.dispatch import cpu_offload as cpu_offload
from accelerate.offload.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from accelerate.offload.dispatch import disk_offload as disk_offload
from accelerate.offload.dispatch import dispatch_model as dispatch_model
from typing import Any

def init_empty_weights(*args: Any, **kwargs: Any) -> Any: ...
def init_on_device(*args: Any, **kwargs: Any) -> Any: ...
def load_checkpoint_and_dispatch(*args: Any, **kwargs: Any) -> Any: ...
def __getattr__(name: str) -> Any: ...
