# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.discovery import ProjectConfiguration as ProjectConfiguration
from accelerate.core.argument_checks import KwargsHandler as KwargsHandler
from accelerate.core.value_types import BaseEnum as BaseEnum
from accelerate.core.value_types import CustomDtype as CustomDtype
from accelerate.core.value_types import EnumWithContains as EnumWithContains
from accelerate.data.prepare import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate.facade.compilation import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate.facade.enums import ComputeEnvironment as ComputeEnvironment
from accelerate.facade.enums import DistributedType as DistributedType
from accelerate.facade.enums import FP8BackendType as FP8BackendType
from accelerate.facade.enums import LoggerType as LoggerType
from accelerate.facade.enums import PrecisionType as PrecisionType
from accelerate.facade.enums import RNGType as RNGType
from accelerate.facade.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate.facade.gradient_state import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.facade.launch_settings import DynamoBackend as DynamoBackend
from accelerate.facade.module_queries import get_module_class_from_name as get_module_class_from_name
from accelerate.offload.quantization.bitsandbytes import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.offload.quantization.torchao import TorchAOQuantizationConfig as TorchAOQuantizationConfig
from accelerate.precision.autocast import AutocastKwargs as AutocastKwargs
from accelerate.precision.float8.torchao import AORecipeKwargs as AORecipeKwargs
from accelerate.precision.float8.transformer_engine import TERecipeKwargs as TERecipeKwargs
from accelerate.precision.fp16 import GradScalerKwargs as GradScalerKwargs
from accelerate.precision.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accelerate.precision.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accelerate.strategy.ddp import DDPCommunicationHookType as DDPCommunicationHookType
from accelerate.strategy.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
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
from accelerate.strategy.parallelism.config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accelerate.strategy.parallelism.config import PipelineParallelConfig as PipelineParallelConfig
from accelerate.strategy.parallelism.config import TorchContextParallelConfig as TorchContextParallelConfig
from accelerate.strategy.parallelism.config import TorchTensorParallelConfig as TorchTensorParallelConfig
from accelerate.strategy.parallelism.config import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accelerate.strategy.sharding.plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from accelerate.watch.profile import ProfileKwargs as ProfileKwargs
from accelerate.world.local_tensor_trees import TensorInformation as TensorInformation
from accelerate.world.preemption import PreemptionKwargs as PreemptionKwargs
from accelerate.world.world import InitProcessGroupKwargs as InitProcessGroupKwargs
from typing import Any

def __getattr__(name: str) -> Any: ...
