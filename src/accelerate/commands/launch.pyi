# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.launch import main as main
from accelerate.cli.v1_launcher import CustomHelpFormatter as CustomHelpFormatter
from accelerate.cli.v1_launcher import _validate_launch_command as _validate_launch_command
from accelerate.cli.v1_launcher import clean_option as clean_option
from accelerate.cli.v1_launcher import deepspeed_launcher as deepspeed_launcher
from accelerate.cli.v1_launcher import launch_command as launch_command
from accelerate.cli.v1_launcher import launch_command_parser as launch_command_parser
from accelerate.cli.v1_launcher import multi_gpu_launcher as multi_gpu_launcher
from accelerate.cli.v1_launcher import options_to_group as options_to_group
from accelerate.cli.v1_launcher import sagemaker_launcher as sagemaker_launcher
from accelerate.cli.v1_launcher import simple_launcher as simple_launcher
from accelerate.cli.v1_launcher import tpu_launcher as tpu_launcher
from accelerate.cli.v1_launcher import tpu_pod_launcher as tpu_pod_launcher
from typing import Any

def __getattr__(name: str) -> Any: ...
