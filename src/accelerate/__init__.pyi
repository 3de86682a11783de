# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate import accelerator as accelerator
from accelerate import big_modeling as big_modeling
from accelerate import checkpointing as checkpointing
from accelerate import commands as commands
from accelerate import data_loader as data_loader
from accelerate import hooks as hooks
from accelerate import inference as inference
from accelerate import launchers as launchers
from accelerate import local_sgd as local_sgd
from accelerate import logging as logging
from accelerate import memory_utils as memory_utils
from accelerate import optimizer as optimizer
from accelerate import parallelism_config as parallelism_config
from accelerate import ray as ray
from accelerate import scheduler as scheduler
from accelerate import state as state
from accelerate import test_utils as test_utils
from accelerate import tracking as tracking
from accelerate import utils as utils
from accelerate.data.prepare import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate.data.skip_first_batches import skip_first_batches as skip_first_batches
from accelerate.facade.accelerator import Accelerator as Accelerator
from accelerate.facade.big_model_loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accelerate.facade.big_model_loading import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.facade.enums import DistributedType as DistributedType
from accelerate.facade.state import PartialState as PartialState
from accelerate.launch.notebook.launchers import debug_launcher as debug_launcher
from accelerate.launch.notebook.launchers import notebook_launcher as notebook_launcher
from accelerate.offload.device_maps import infer_auto_device_map as infer_auto_device_map
from accelerate.offload.dispatch import cpu_offload as cpu_offload
from accelerate.offload.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from accelerate.offload.dispatch import disk_offload as disk_offload
from accelerate.offload.dispatch import dispatch_model as dispatch_model
from accelerate.offload.empty_init import init_empty_weights as init_empty_weights
from accelerate.offload.empty_init import init_on_device as init_on_device
from accelerate.offload.pipeline.prepare_pippy import prepare_pippy as prepare_pippy
from accelerate.precision.autocast import AutocastKwargs as AutocastKwargs
from accelerate.precision.fp16 import GradScalerKwargs as GradScalerKwargs
from accelerate.strategy.ddp import DDPCommunicationHookType as DDPCommunicationHookType
from accelerate.strategy.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate.strategy.parallelism.config import ParallelismConfig as ParallelismConfig
from accelerate.strategy.sharding.plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from accelerate.utils.imports import is_rich_available as is_rich_available
from accelerate.watch.batch_size_search import find_executable_batch_size as find_executable_batch_size
from accelerate.watch.profile import ProfileKwargs as ProfileKwargs
from accelerate.world.rng import synchronize_rng_states as synchronize_rng_states
from accelerate.world.world import InitProcessGroupKwargs as InitProcessGroupKwargs

__version__: str
