# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.offload.align_hook import AlignDevicesHook as AlignDevicesHook
from accelerate.offload.align_hook import attach_align_device_hook as attach_align_device_hook
from accelerate.offload.align_hook import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from accelerate.offload.align_hook import attach_execution_device_hook as attach_execution_device_hook
from accelerate.offload.dispatch import CpuOffload as CpuOffload
from accelerate.offload.dispatch import UserCpuOffloadHook as UserCpuOffloadHook
from accelerate.offload.hooks import LayerwiseCastingHook as LayerwiseCastingHook
from accelerate.offload.hooks import ModelHook as ModelHook
from accelerate.offload.hooks import SequentialHook as SequentialHook
from accelerate.offload.hooks import _accelerate_added_attributes as _accelerate_added_attributes
from accelerate.offload.hooks import add_hook_to_module as add_hook_to_module
from accelerate.offload.hooks import remove_hook_from_module as remove_hook_from_module
from accelerate.offload.hooks import remove_hook_from_submodules as remove_hook_from_submodules
from accelerate.offload.offloaded_tensor import _compiler_disable as _compiler_disable
from typing import Any

def __getattr__(name: str) -> Any: ...
