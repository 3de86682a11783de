# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.layout import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accelerate.checkpoint.weight_files import id_tensor_storage as id_tensor_storage
from accelerate.checkpoint.weight_files import load_state_dict as load_state_dict
from accelerate.facade.big_model_loading import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.facade.module_queries import convert_file_size_to_int as convert_file_size_to_int
from accelerate.facade.module_queries import is_peft_model as is_peft_model
from accelerate.facade.v1_utilities import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.offload.device_maps import check_device_map as check_device_map
from accelerate.offload.device_maps import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accelerate.offload.device_maps import clean_device_map as clean_device_map
from accelerate.offload.device_maps import fallback_allocate as fallback_allocate
from accelerate.offload.device_maps import get_balanced_memory as get_balanced_memory
from accelerate.offload.device_maps import get_max_memory as get_max_memory
from accelerate.offload.device_maps import infer_auto_device_map as infer_auto_device_map
from accelerate.offload.module_sizes import _get_proper_dtype as _get_proper_dtype
from accelerate.offload.module_sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accelerate.offload.module_sizes import check_tied_parameters_in_config as check_tied_parameters_in_config
from accelerate.offload.module_sizes import compute_module_sizes as compute_module_sizes
from accelerate.offload.module_sizes import (
    compute_module_total_buffer_size as compute_module_total_buffer_size,
)
from accelerate.offload.module_sizes import dtype_byte_size as dtype_byte_size
from accelerate.offload.module_sizes import find_tied_parameters as find_tied_parameters
from accelerate.offload.module_sizes import get_max_layer_size as get_max_layer_size
from accelerate.offload.module_sizes import get_module_leaves as get_module_leaves
from accelerate.offload.module_sizes import get_module_size_with_ties as get_module_size_with_ties
from accelerate.offload.module_sizes import get_non_persistent_buffers as get_non_persistent_buffers
from accelerate.offload.module_sizes import named_module_tensors as named_module_tensors
from accelerate.offload.module_tensors import align_module_device as align_module_device
from accelerate.offload.module_tensors import check_device_same as check_device_same
from accelerate.offload.module_tensors import get_state_dict_from_offload as get_state_dict_from_offload
from accelerate.offload.module_tensors import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from accelerate.offload.module_tensors import has_offloaded_params as has_offloaded_params
from accelerate.offload.module_tensors import load_offloaded_weights as load_offloaded_weights
from accelerate.offload.module_tensors import retie_parameters as retie_parameters
from accelerate.offload.module_tensors import set_module_tensor_to_device as set_module_tensor_to_device
from accelerate.strategy.sharding.fsdp_utils import get_grad_scaler as get_grad_scaler
from typing import Any

def __getattr__(name: str) -> Any: ...
