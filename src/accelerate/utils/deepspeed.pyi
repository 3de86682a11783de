# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.engine_wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accelerate.facade.engine_wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accelerate.facade.engine_wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accelerate.facade.engine_wrappers import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accelerate.strategy.deepspeed.config_tree import DummyOptim as DummyOptim
from accelerate.strategy.deepspeed.config_tree import DummyScheduler as DummyScheduler
from accelerate.strategy.deepspeed.config_tree import HfDeepSpeedConfig as HfDeepSpeedConfig
from accelerate.strategy.deepspeed.config_tree import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from typing import Any

def __getattr__(name: str) -> Any: ...
