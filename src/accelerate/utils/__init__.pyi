# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.discovery import ProjectConfiguration as ProjectConfiguration
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
from accelerate.checkpoint.weight_files import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accelerate.checkpoint.weight_files import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from accelerate.checkpoint.weight_files import id_tensor_storage as id_tensor_storage
from accelerate.checkpoint.weight_files import load as load
from accelerate.checkpoint.weight_files import load_state_dict as load_state_dict
from accelerate.checkpoint.weight_files import merge_fsdp_weights as merge_fsdp_weights
from accelerate.checkpoint.weight_files import save as save
from accelerate.cli.config_classes import write_basic_config as write_basic_config
from accelerate.cli.v1_launcher import env_var_path_add as env_var_path_add
from accelerate.cli.v1_launcher import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accelerate.cli.v1_launcher import (
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
)
from accelerate.cli.v1_launcher import prepare_multi_gpu_env as prepare_multi_gpu_env
from accelerate.cli.v1_launcher import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accelerate.cli.v1_launcher import prepare_tpu as prepare_tpu
from accelerate.cli.v1_launcher import setup_fp8_env as setup_fp8_env
from accelerate.core.argument_checks import KwargsHandler as KwargsHandler
from accelerate.core.packages import OPERATIONS as _source_of_STR_OPERATION_TO_FUNC
from accelerate.core.packages import compare_versions as compare_versions
from accelerate.core.packages import is_torch_version as is_torch_version
from accelerate.core.units import convert_bytes as convert_bytes
from accelerate.core.value_types import BaseEnum as BaseEnum
from accelerate.core.value_types import CustomDtype as CustomDtype
from accelerate.core.value_types import EnumWithContains as EnumWithContains
from accelerate.data.prepare import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate.facade.big_model_loading import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.facade.compilation import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate.facade.compilation import compile_regions as _source_of_compile_regions_deepspeed
from accelerate.facade.compilation import compile_regions as _source_of_compile_regions_fsdp2
from accelerate.facade.compilation import compile_regions as compile_regions
from accelerate.facade.device_availability import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate.facade.device_availability import is_bf16_available as is_bf16_available
from accelerate.facade.device_availability import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from accelerate.facade.device_availability import is_cuda_available as is_cuda_available
from accelerate.facade.device_availability import is_fp16_available as is_fp16_available
from accelerate.facade.device_availability import is_habana_gaudi1 as is_habana_gaudi1
from accelerate.facade.device_availability import is_hpu_available as is_hpu_available
from accelerate.facade.device_availability import is_mps_available as is_mps_available
from accelerate.facade.device_availability import is_rocm_available as is_rocm_available
from accelerate.facade.device_availability import (
    is_torch_distributed_available as is_torch_distributed_available,
)
from accelerate.facade.device_availability import is_torch_xla_available as is_torch_xla_available
from accelerate.facade.device_availability import is_torch_xpu_tensor as is_torch_xpu_tensor
from accelerate.facade.device_availability import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from accelerate.facade.device_availability import is_xccl_available as is_xccl_available
from accelerate.facade.engine_wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accelerate.facade.engine_wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accelerate.facade.engine_wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accelerate.facade.engine_wrappers import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accelerate.facade.engine_wrappers import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accelerate.facade.engine_wrappers import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accelerate.facade.enums import ComputeEnvironment as ComputeEnvironment
from accelerate.facade.enums import DistributedType as DistributedType
from accelerate.facade.enums import FP8BackendType as FP8BackendType
from accelerate.facade.enums import LoggerType as LoggerType
from accelerate.facade.enums import PrecisionType as PrecisionType
from accelerate.facade.enums import RNGType as RNGType
from accelerate.facade.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate.facade.fsdp_checkpoint import get_model_state_dict as _source_of__get_model_state_dict
from accelerate.facade.fsdp_checkpoint import load_fsdp_model as load_fsdp_model
from accelerate.facade.fsdp_checkpoint import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate.facade.fsdp_checkpoint import prepare_sd_options as _source_of__prepare_sd_options
from accelerate.facade.fsdp_checkpoint import save_fsdp_model as save_fsdp_model
from accelerate.facade.fsdp_checkpoint import save_fsdp_optimizer as save_fsdp_optimizer
from accelerate.facade.fsdp_checkpoint import set_model_state_dict as _source_of__set_model_state_dict
from accelerate.facade.gradient_state import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.facade.launch_settings import DynamoBackend as DynamoBackend
from accelerate.facade.module_queries import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from accelerate.facade.module_queries import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from accelerate.facade.module_queries import convert_file_size_to_int as convert_file_size_to_int
from accelerate.facade.module_queries import extract_model_from_parallel as extract_model_from_parallel
from accelerate.facade.module_queries import get_model_tp_size as get_model_tp_size
from accelerate.facade.module_queries import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate.facade.module_queries import get_module_class_from_name as get_module_class_from_name
from accelerate.facade.module_queries import has_compiled_regions as has_compiled_regions
from accelerate.facade.module_queries import has_repeated_blocks as has_repeated_blocks
from accelerate.facade.module_queries import is_compiled_module as is_compiled_module
from accelerate.facade.module_queries import is_peft_model as is_peft_model
from accelerate.facade.module_queries import is_repeated_blocks as is_repeated_blocks
from accelerate.facade.module_queries import model_has_dtensor as model_has_dtensor
from accelerate.facade.quantized_loading import (
    get_quantized_model_device_map as get_quantized_model_device_map,
)
from accelerate.facade.quantized_loading import load_and_quantize_model as load_and_quantize_model
from accelerate.facade.v1_utilities import CPUInformation as CPUInformation
from accelerate.facade.v1_utilities import are_libraries_initialized as are_libraries_initialized
from accelerate.facade.v1_utilities import check_os_kernel as check_os_kernel
from accelerate.facade.v1_utilities import clear_environment as clear_environment
from accelerate.facade.v1_utilities import convert_dict_to_env_variables as convert_dict_to_env_variables
from accelerate.facade.v1_utilities import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate.facade.v1_utilities import get_current_device_type as get_current_device_type
from accelerate.facade.v1_utilities import get_driver_version as get_driver_version
from accelerate.facade.v1_utilities import get_gpu_info as get_gpu_info
from accelerate.facade.v1_utilities import get_int_from_env as get_int_from_env
from accelerate.facade.v1_utilities import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.facade.v1_utilities import get_pretty_name as get_pretty_name
from accelerate.facade.v1_utilities import has_p2p_infiniband as _source_of_check_cuda_p2p_ib_support
from accelerate.facade.v1_utilities import install_xla as install_xla
from accelerate.facade.v1_utilities import merge_dicts as merge_dicts
from accelerate.facade.v1_utilities import parse_choice_from_env as parse_choice_from_env
from accelerate.facade.v1_utilities import parse_flag_from_env as parse_flag_from_env
from accelerate.facade.v1_utilities import patch_environment as patch_environment
from accelerate.facade.v1_utilities import purge_accelerate_environment as purge_accelerate_environment
from accelerate.facade.v1_utilities import recursive_getattr as recursive_getattr
from accelerate.facade.v1_utilities import str_to_bool as str_to_bool
from accelerate.launch.kinds.sagemaker import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from accelerate.launch.notebook.launchers import PrepareForLaunch as PrepareForLaunch
from accelerate.offload.device_maps import check_device_map as check_device_map
from accelerate.offload.device_maps import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accelerate.offload.device_maps import clean_device_map as clean_device_map
from accelerate.offload.device_maps import fallback_allocate as fallback_allocate
from accelerate.offload.device_maps import get_balanced_memory as get_balanced_memory
from accelerate.offload.device_maps import get_max_memory as get_max_memory
from accelerate.offload.device_maps import infer_auto_device_map as infer_auto_device_map
from accelerate.offload.hooks import CASTABLE_LAYERS as _source_of_SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
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
from accelerate.offload.offload_folder import OffloadedWeightsLoader as OffloadedWeightsLoader
from accelerate.offload.offload_folder import PrefixedDataset as PrefixedDataset
from accelerate.offload.offload_folder import extract_submodules_state_dict as extract_submodules_state_dict
from accelerate.offload.offload_folder import load_offloaded_weight as load_offloaded_weight
from accelerate.offload.offload_folder import offload_state_dict as offload_state_dict
from accelerate.offload.offload_folder import offload_weight as offload_weight
from accelerate.offload.offload_folder import save_offload_index as save_offload_index
from accelerate.offload.quantization.base import get_keys_to_not_convert as get_keys_to_not_convert
from accelerate.offload.quantization.bitsandbytes import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.offload.quantization.bitsandbytes import get_parameter_device as get_parameter_device
from accelerate.offload.quantization.bitsandbytes import has_4bit_bnb_layers as has_4bit_bnb_layers
from accelerate.offload.quantization.bitsandbytes import (
    quantize_and_offload_8bit as quantize_and_offload_8bit,
)
from accelerate.offload.quantization.bitsandbytes import replace_with_bnb_layers as replace_with_bnb_layers
from accelerate.offload.quantization.torchao import TorchAOQuantizationConfig as TorchAOQuantizationConfig
from accelerate.precision.autocast import AutocastKwargs as AutocastKwargs
from accelerate.precision.float8.torchao import AORecipeKwargs as AORecipeKwargs
from accelerate.precision.float8.torchao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accelerate.precision.float8.torchao import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from accelerate.precision.float8.torchao import filter_linear_layers as filter_linear_layers
from accelerate.precision.float8.torchao import find_first_last_linear_layers as find_first_last_linear_layers
from accelerate.precision.float8.torchao import has_ao_layers as has_ao_layers
from accelerate.precision.float8.transformer_engine import TERecipeKwargs as TERecipeKwargs
from accelerate.precision.float8.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from accelerate.precision.float8.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from accelerate.precision.float8.transformer_engine import convert_model as convert_model
from accelerate.precision.float8.transformer_engine import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accelerate.precision.fp16 import GradScalerKwargs as GradScalerKwargs
from accelerate.precision.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accelerate.precision.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accelerate.strategy.ddp import DDPCommunicationHookType as DDPCommunicationHookType
from accelerate.strategy.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accelerate.strategy.deepspeed.config_tree import DummyOptim as DummyOptim
from accelerate.strategy.deepspeed.config_tree import DummyScheduler as DummyScheduler
from accelerate.strategy.deepspeed.config_tree import HfDeepSpeedConfig as HfDeepSpeedConfig
from accelerate.strategy.deepspeed.config_tree import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate.strategy.deepspeed.strategy import GatheredParameters as GatheredParameters
from accelerate.strategy.megatron.engine import MegatronEngine as MegatronEngine
from accelerate.strategy.megatron.engine_factory import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accelerate.strategy.megatron.parsers import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
)
from accelerate.strategy.megatron.parsers import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accelerate.strategy.megatron.parsers import parse_bert_config as parse_bert_config
from accelerate.strategy.megatron.parsers import parse_glm4_moe_config as parse_glm4_moe_config
from accelerate.strategy.megatron.parsers import parse_gpt2_config as parse_gpt2_config
from accelerate.strategy.megatron.parsers import parse_llama_config as parse_llama_config
from accelerate.strategy.megatron.parsers import parse_t5_config as parse_t5_config
from accelerate.strategy.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from accelerate.strategy.megatron.public_functions import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
)
from accelerate.strategy.megatron.public_functions import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accelerate.strategy.megatron.public_functions import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelerate.strategy.megatron.train_step import AbstractTrainStep as AbstractTrainStep
from accelerate.strategy.megatron.train_step import BertTrainStep as BertTrainStep
from accelerate.strategy.megatron.train_step import GPTTrainStep as GPTTrainStep
from accelerate.strategy.megatron.train_step import T5TrainStep as T5TrainStep
from accelerate.strategy.parallelism.config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accelerate.strategy.parallelism.config import ParallelismConfig as ParallelismConfig
from accelerate.strategy.parallelism.config import PipelineParallelConfig as PipelineParallelConfig
from accelerate.strategy.parallelism.config import TorchContextParallelConfig as TorchContextParallelConfig
from accelerate.strategy.parallelism.config import TorchTensorParallelConfig as TorchTensorParallelConfig
from accelerate.strategy.parallelism.config import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accelerate.strategy.sharding.fsdp_utils import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.strategy.sharding.fsdp_utils import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate.strategy.sharding.fsdp_utils import ensure_weights_retied as ensure_weights_retied
from accelerate.strategy.sharding.fsdp_utils import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate.strategy.sharding.fsdp_utils import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate.strategy.sharding.fsdp_utils import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate.strategy.sharding.fsdp_utils import (
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
)
from accelerate.strategy.sharding.fsdp_utils import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate.strategy.sharding.fsdp_utils import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategy.sharding.fsdp_utils import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate.strategy.sharding.fsdp_utils import get_grad_scaler as get_grad_scaler
from accelerate.strategy.sharding.fsdp_utils import get_parameters_from_modules as get_parameters_from_modules
from accelerate.strategy.sharding.plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from accelerate.utils import ao as ao
from accelerate.utils import bnb as bnb
from accelerate.utils import constants as constants
from accelerate.utils import dataclasses as dataclasses
from accelerate.utils import deepspeed as deepspeed
from accelerate.utils import environment as environment
from accelerate.utils import fsdp_utils as fsdp_utils
from accelerate.utils import imports as imports
from accelerate.utils import launch as launch
from accelerate.utils import megatron_lm as megatron_lm
from accelerate.utils import memory as memory
from accelerate.utils import modeling as modeling
from accelerate.utils import offload as offload
from accelerate.utils import operations as operations
from accelerate.utils import other as other
from accelerate.utils import random as random
from accelerate.utils import torch_xla as torch_xla
from accelerate.utils import transformer_engine as transformer_engine
from accelerate.utils import versions as versions
from accelerate.utils.constants import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
from accelerate.utils.constants import (
    BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION,
)
from accelerate.utils.constants import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
from accelerate.utils.constants import (
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)
from accelerate.utils.constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.utils.constants import DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION
from accelerate.utils.constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate.utils.constants import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from accelerate.utils.constants import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accelerate.utils.constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accelerate.utils.constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accelerate.utils.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accelerate.utils.constants import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
from accelerate.utils.constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate.utils.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES
from accelerate.utils.constants import SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION
from accelerate.utils.constants import SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION
from accelerate.utils.constants import SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION
from accelerate.utils.constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from accelerate.utils.constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
from accelerate.utils.constants import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from accelerate.utils.constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate.utils.fsdp_utils import logger as logger
from accelerate.utils.imports import USE_TORCH_XLA as USE_TORCH_XLA
from accelerate.utils.imports import deepspeed_required as deepspeed_required
from accelerate.utils.imports import is_4bit_bnb_available as is_4bit_bnb_available
from accelerate.utils.imports import is_8bit_bnb_available as is_8bit_bnb_available
from accelerate.utils.imports import is_aim_available as is_aim_available
from accelerate.utils.imports import is_amdsmi_available as is_amdsmi_available
from accelerate.utils.imports import is_bnb_available as is_bnb_available
from accelerate.utils.imports import is_boto3_available as is_boto3_available
from accelerate.utils.imports import is_clearml_available as is_clearml_available
from accelerate.utils.imports import is_comet_ml_available as is_comet_ml_available
from accelerate.utils.imports import is_datasets_available as is_datasets_available
from accelerate.utils.imports import is_deepspeed_available as is_deepspeed_available
from accelerate.utils.imports import is_dvclive_available as is_dvclive_available
from accelerate.utils.imports import is_fp8_available as is_fp8_available
from accelerate.utils.imports import is_import_timer_available as is_import_timer_available
from accelerate.utils.imports import is_lomo_available as is_lomo_available
from accelerate.utils.imports import is_matplotlib_available as is_matplotlib_available
from accelerate.utils.imports import is_megatron_lm_available as is_megatron_lm_available
from accelerate.utils.imports import is_mlflow_available as is_mlflow_available
from accelerate.utils.imports import is_mlu_available as is_mlu_available
from accelerate.utils.imports import is_msamp_available as is_msamp_available
from accelerate.utils.imports import is_musa_available as is_musa_available
from accelerate.utils.imports import is_neuron_available as is_neuron_available
from accelerate.utils.imports import is_npu_available as is_npu_available
from accelerate.utils.imports import is_numpy_available as is_numpy_available
from accelerate.utils.imports import is_pandas_available as is_pandas_available
from accelerate.utils.imports import is_peft_available as is_peft_available
from accelerate.utils.imports import is_pippy_available as is_pippy_available
from accelerate.utils.imports import is_pynvml_available as is_pynvml_available
from accelerate.utils.imports import is_pytest_available as is_pytest_available
from accelerate.utils.imports import is_rich_available as is_rich_available
from accelerate.utils.imports import is_sagemaker_available as is_sagemaker_available
from accelerate.utils.imports import is_schedulefree_available as is_schedulefree_available
from accelerate.utils.imports import is_sdaa_available as is_sdaa_available
from accelerate.utils.imports import is_swanlab_available as is_swanlab_available
from accelerate.utils.imports import is_tensorboard_available as is_tensorboard_available
from accelerate.utils.imports import is_timm_available as is_timm_available
from accelerate.utils.imports import is_torchao_available as is_torchao_available
from accelerate.utils.imports import is_torchdata_available as is_torchdata_available
from accelerate.utils.imports import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accelerate.utils.imports import is_torchvision_available as is_torchvision_available
from accelerate.utils.imports import is_tqdm_available as is_tqdm_available
from accelerate.utils.imports import is_trackio_available as is_trackio_available
from accelerate.utils.imports import is_transformer_engine_available as is_transformer_engine_available
from accelerate.utils.imports import is_transformers_available as is_transformers_available
from accelerate.utils.imports import is_triton_available as is_triton_available
from accelerate.utils.imports import is_wandb_available as is_wandb_available
from accelerate.utils.imports import is_weights_only_available as is_weights_only_available
from accelerate.utils.imports import is_xpu_available as is_xpu_available
from accelerate.utils.imports import torchao_required as torchao_required
from accelerate.watch.batch_size_search import clear_device_cache as clear_device_cache
from accelerate.watch.batch_size_search import find_executable_batch_size as find_executable_batch_size
from accelerate.watch.batch_size_search import release_memory as release_memory
from accelerate.watch.batch_size_search import should_reduce_batch_size as should_reduce_batch_size
from accelerate.watch.console import tqdm as tqdm
from accelerate.watch.profile import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accelerate.watch.profile import ProfileKwargs as ProfileKwargs
from accelerate.world.affinity import override_numa_affinity as override_numa_affinity
from accelerate.world.affinity import set_numa_affinity as set_numa_affinity
from accelerate.world.collective import DistributedOperationException as DistributedOperationException
from accelerate.world.collective import barrier as _source_of_wait_for_everyone
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
from accelerate.world.local_tensor_trees import TensorInformation as TensorInformation
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
from accelerate.world.network import get_free_port as get_free_port
from accelerate.world.network import is_port_in_use as is_port_in_use
from accelerate.world.preemption import PreemptionKwargs as PreemptionKwargs
from accelerate.world.rng import set_seed as set_seed
from accelerate.world.rng import synchronize_rng_state as synchronize_rng_state
from accelerate.world.rng import synchronize_rng_states as synchronize_rng_states
from accelerate.world.world import InitProcessGroupKwargs as InitProcessGroupKwargs

STR_OPERATION_TO_FUNC = _source_of_STR_OPERATION_TO_FUNC
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = _source_of_SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
_get_model_state_dict = _source_of__get_model_state_dict
_gpu_broadcast = _source_of__gpu_broadcast
_gpu_gather = _source_of__gpu_gather
_gpu_gather_object = _source_of__gpu_gather_object
_prepare_sd_options = _source_of__prepare_sd_options
_set_model_state_dict = _source_of__set_model_state_dict
check_cuda_p2p_ib_support = _source_of_check_cuda_p2p_ib_support
compile_regions_deepspeed = _source_of_compile_regions_deepspeed
compile_regions_fsdp2 = _source_of_compile_regions_fsdp2
wait_for_everyone = _source_of_wait_for_everyone
