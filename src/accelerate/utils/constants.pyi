# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.layout import MODEL_NAME as MODEL_NAME
from accelerate.checkpoint.layout import OPTIMIZER_NAME as OPTIMIZER_NAME
from accelerate.checkpoint.layout import RNG_STATE_NAME as RNG_STATE_NAME
from accelerate.checkpoint.layout import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accelerate.checkpoint.layout import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accelerate.checkpoint.layout import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accelerate.checkpoint.layout import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accelerate.checkpoint.layout import SAMPLER_NAME as SAMPLER_NAME
from accelerate.checkpoint.layout import SCALER_NAME as SCALER_NAME
from accelerate.checkpoint.layout import SCHEDULER_NAME as SCHEDULER_NAME
from accelerate.checkpoint.layout import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accelerate.checkpoint.layout import WEIGHTS_NAME as WEIGHTS_NAME
from accelerate.checkpoint.layout import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accelerate.core.packages import OPERATIONS as _source_of_STR_OPERATION_TO_FUNC
from accelerate.offload.hooks import CASTABLE_LAYERS as _source_of_SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from accelerate.watch.profile import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from typing import Any

BETA_CP_AVAILABLE_PYTORCH_VERSION: str
BETA_SP_AVAILABLE_DEEPSPEED_VERSION: str
BETA_TP_AVAILABLE_PYTORCH_VERSION: str
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION: str
CUDA_DISTRIBUTED_TYPES: list[str]
DEEPSPEED_MULTINODE_LAUNCHERS: list[str]
DTENSOR_PYTORCH_VERSION: str
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION: str
FSDP2_PYTORCH_VERSION: str
FSDP2_STATE_DICT_TYPE: list[str]
FSDP_AUTO_WRAP_POLICY: list[str]
FSDP_BACKWARD_PREFETCH: list[str]
FSDP_MODEL_NAME: str
FSDP_PYTORCH_VERSION: str
FSDP_SHARDING_STRATEGY: list[str]
FSDP_STATE_DICT_TYPE: list[str]
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: str
SAGEMAKER_PARALLEL_EC2_INSTANCES: list[str]
SAGEMAKER_PYTHON_VERSION: str
SAGEMAKER_PYTORCH_VERSION: str
SAGEMAKER_TRANSFORMERS_VERSION: str
STR_OPERATION_TO_FUNC = _source_of_STR_OPERATION_TO_FUNC
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = _source_of_SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
TORCH_DISTRIBUTED_OPERATION_TYPES: list[str]
TORCH_DYNAMO_MODES: list[str]
TORCH_LAUNCH_PARAMS: list[str]
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: str

def __getattr__(name: str) -> Any: ...
