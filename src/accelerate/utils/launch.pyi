# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.v1_launcher import env_var_path_add as env_var_path_add
from accelerate.cli.v1_launcher import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accelerate.cli.v1_launcher import (
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
)
from accelerate.cli.v1_launcher import prepare_multi_gpu_env as prepare_multi_gpu_env
from accelerate.cli.v1_launcher import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accelerate.cli.v1_launcher import prepare_tpu as prepare_tpu
from accelerate.cli.v1_launcher import setup_fp8_env as setup_fp8_env
from accelerate.launch.kinds.sagemaker import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from accelerate.launch.notebook.launchers import PrepareForLaunch as PrepareForLaunch
from typing import Any

def __getattr__(name: str) -> Any: ...
