# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.big_model_loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accelerate.offload.dispatch import cpu_offload as cpu_offload
from accelerate.offload.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from accelerate.offload.dispatch import disk_offload as disk_offload
from accelerate.offload.dispatch import dispatch_model as dispatch_model
from accelerate.offload.empty_init import init_empty_weights as init_empty_weights
from accelerate.offload.empty_init import init_on_device as init_on_device
from accelerate.offload.hooks import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from typing import Any

def __getattr__(name: str) -> Any: ...
