# Written by `python -m accelerate.core.pyi_stub_writer accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.argument_parser import CustomHelpFormatter as CustomHelpFormatter
from accelerate.cli.argument_parser import clean_option as clean_option
from accelerate.cli.argument_parser import options_to_group as options_to_group
from accelerate.cli.launch import launch_command as launch_command
from accelerate.cli.launch import launch_command_parser as launch_command_parser
from accelerate.cli.launch import main as main
from accelerate.cli.v1_launcher_functions import deepspeed_launcher as deepspeed_launcher
from accelerate.cli.v1_launcher_functions import multi_gpu_launcher as multi_gpu_launcher
from accelerate.cli.v1_launcher_functions import sagemaker_launcher as sagemaker_launcher
from accelerate.cli.v1_launcher_functions import simple_launcher as simple_launcher
from accelerate.cli.v1_launcher_functions import tpu_launcher as tpu_launcher
from accelerate.cli.v1_launcher_functions import tpu_pod_launcher as tpu_pod_launcher
from typing import Any

def __getattr__(name: str) -> Any: ...
