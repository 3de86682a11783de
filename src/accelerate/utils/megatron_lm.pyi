# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.engine_wrappers import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accelerate.facade.engine_wrappers import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accelerate.strategy.megatron.engine import MegatronEngine as MegatronEngine
from accelerate.strategy.megatron.engine_factory import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accelerate.strategy.megatron.public_functions import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
)
from accelerate.strategy.megatron.public_functions import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accelerate.strategy.megatron.public_functions import finish_mpu_init as finish_mpu_init
from accelerate.strategy.megatron.public_functions import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelerate.strategy.megatron.public_functions import initialize as initialize
from accelerate.strategy.megatron.public_functions import model_provider_func as model_provider_func
from accelerate.strategy.megatron.public_functions import prepare_data_loader as prepare_data_loader
from accelerate.strategy.megatron.public_functions import (
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from accelerate.strategy.megatron.public_functions import prepare_optimizer as prepare_optimizer
from accelerate.strategy.megatron.public_functions import prepare_scheduler as prepare_scheduler
from accelerate.strategy.megatron.train_step import AbstractTrainStep as AbstractTrainStep
from accelerate.strategy.megatron.train_step import BertTrainStep as BertTrainStep
from accelerate.strategy.megatron.train_step import GPTTrainStep as GPTTrainStep
from accelerate.strategy.megatron.train_step import T5TrainStep as T5TrainStep
from typing import Any

def __getattr__(name: str) -> Any: ...
