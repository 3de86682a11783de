# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.weight_files import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accelerate.checkpoint.weight_files import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from accelerate.checkpoint.weight_files import load as load
from accelerate.checkpoint.weight_files import save as save
from accelerate.core.units import convert_bytes as convert_bytes
from accelerate.facade.compilation import compile_regions as _source_of_compile_regions_deepspeed
from accelerate.facade.compilation import compile_regions as _source_of_compile_regions_fsdp2
from accelerate.facade.compilation import compile_regions as compile_regions
from accelerate.facade.module_queries import extract_model_from_parallel as extract_model_from_parallel
from accelerate.facade.module_queries import get_model_tp_size as get_model_tp_size
from accelerate.facade.module_queries import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate.facade.module_queries import has_compiled_regions as has_compiled_regions
from accelerate.facade.module_queries import has_repeated_blocks as has_repeated_blocks
from accelerate.facade.module_queries import is_compiled_module as is_compiled_module
from accelerate.facade.module_queries import is_repeated_blocks as is_repeated_blocks
from accelerate.facade.module_queries import model_has_dtensor as model_has_dtensor
from accelerate.facade.v1_utilities import check_os_kernel as check_os_kernel
from accelerate.facade.v1_utilities import get_pretty_name as get_pretty_name
from accelerate.facade.v1_utilities import merge_dicts as merge_dicts
from accelerate.facade.v1_utilities import recursive_getattr as recursive_getattr
from accelerate.world.collective import barrier as _source_of_wait_for_everyone
from accelerate.world.network import get_free_port as get_free_port
from accelerate.world.network import is_port_in_use as is_port_in_use
from typing import Any

compile_regions_deepspeed = _source_of_compile_regions_deepspeed
compile_regions_fsdp2 = _source_of_compile_regions_fsdp2
logger: Any
wait_for_everyone = _source_of_wait_for_everyone

def __getattr__(name: str) -> Any: ...
