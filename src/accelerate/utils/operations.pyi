# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.device_availability import is_torch_xpu_tensor as is_torch_xpu_tensor
from accelerate.facade.module_queries import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from accelerate.facade.module_queries import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from accelerate.strategy.deepspeed.strategy import GatheredParameters as GatheredParameters
from accelerate.world.collective import DistributedOperationException as DistributedOperationException
from accelerate.world.collective import broadcast as broadcast
from accelerate.world.collective import broadcast_from as _source_of__gpu_broadcast
from accelerate.world.collective import broadcast_object_list as broadcast_object_list
from accelerate.world.collective import chained_operation as chained_operation
from accelerate.world.collective import copy_tensor_to_devices as copy_tensor_to_devices
from accelerate.world.collective import gather as _source_of__gpu_gather
from accelerate.world.collective import gather as gather
from accelerate.world.collective import gather_object as _source_of__gpu_gather_object
from accelerate.world.collective import gather_object as gather_object
from accelerate.world.collective import gather_tensor_shape as gather_tensor_shape
from accelerate.world.collective import pad_across_processes as pad_across_processes
from accelerate.world.collective import reduce as reduce
from accelerate.world.collective import verify_operation as verify_operation
from accelerate.world.local_tensor_trees import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accelerate.world.local_tensor_trees import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accelerate.world.local_tensor_trees import concatenate as concatenate
from accelerate.world.local_tensor_trees import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accelerate.world.local_tensor_trees import convert_to_fp32 as convert_to_fp32
from accelerate.world.local_tensor_trees import find_batch_size as find_batch_size
from accelerate.world.local_tensor_trees import find_device as find_device
from accelerate.world.local_tensor_trees import get_data_structure as get_data_structure
from accelerate.world.local_tensor_trees import get_shape as get_shape
from accelerate.world.local_tensor_trees import honor_type as honor_type
from accelerate.world.local_tensor_trees import ignorant_find_batch_size as ignorant_find_batch_size
from accelerate.world.local_tensor_trees import initialize_tensors as initialize_tensors
from accelerate.world.local_tensor_trees import is_namedtuple as is_namedtuple
from accelerate.world.local_tensor_trees import is_tensor_information as is_tensor_information
from accelerate.world.local_tensor_trees import is_torch_tensor as is_torch_tensor
from accelerate.world.local_tensor_trees import listify as listify
from accelerate.world.local_tensor_trees import pad_input_tensors as pad_input_tensors
from accelerate.world.local_tensor_trees import recursively_apply as recursively_apply
from accelerate.world.local_tensor_trees import send_to_device as send_to_device
from accelerate.world.local_tensor_trees import slice_tensors as slice_tensors
from typing import Any

_gpu_broadcast = _source_of__gpu_broadcast
_gpu_gather = _source_of__gpu_gather
_gpu_gather_object = _source_of__gpu_gather_object

def __getattr__(name: str) -> Any: ...
