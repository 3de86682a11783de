"""Configuration files as they exist in the wild: old formats of 1.x, and what programs on top of it ship."""

from __future__ import annotations

import yaml

from accelerate.cli.wizard.config_editor import find_setting
from accelerate.core.errors import UnknownNameError
from accelerate.launch.config_files import upgrade_keys

_COMMON = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: 'bf16'
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
_ZERO = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: {init}
  zero3_save_16bit_model: {init}
  zero_stage: {stage}
"""
_FSDP_1 = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
"""
_FSDP_2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
"""

# Of the trainers on top of 1.x, by what they ask for.
TRAINERS = {
    "single": _COMMON.replace("num_processes: 8", "num_processes: 1")
    + "distributed_type: 'NO'\ngpu_ids: all\n",
    "several": _COMMON + "distributed_type: MULTI_GPU\ngpu_ids: all\n",
    "stage 1": _COMMON + _ZERO.format(init="false", stage=1),
    "stage 2": _COMMON + _ZERO.format(init="false", stage=2),
    "stage 3": _COMMON + _ZERO.format(init="true", stage=3),
    "sharded 1": _COMMON + _FSDP_1,
    "sharded 2": _COMMON + _FSDP_2,
}

# Of 1.x itself, from its first format on.
FORMATS = {
    "0.11": """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
fp16: false
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
num_machines: 1
num_processes: 1
use_cpu: false
""",
    "0.12": """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
downcast_bf16: 'no'
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: false
""",
    "mpi": """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
ipex_config: {}
machine_rank: '0'
main_process_ip: 127.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: 'no'
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: hosts
num_machines: 4
num_processes: 16
rdzv_backend: static
same_network: true
use_cpu: true
""".replace("ipex_config: {}\n", "").replace("'0'", "0"),
    "cloud": """
additional_args: null
base_job_name: accelerate-sagemaker-1
compute_environment: AMAZON_SAGEMAKER
debug: false
distributed_type: 'NO'
dynamo_config: {}
ec2_instance_type: ml.p3.2xlarge
enable_cpu_affinity: false
gpu_ids: all
iam_role_name: trainer
image_uri: null
mixed_precision: fp16
num_machines: 1
profile: default
py_version: py38
pytorch_version: 1.10.2
region: us-east-1
sagemaker_inputs_file: null
sagemaker_metrics_file: null
transformers_version: 4.17.0
use_cpu: false
""",
    "8 bits": """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
enable_cpu_affinity: false
fp8_config:
  amax_compute_algo: max
  amax_history_len: 1024
  backend: TE
  fp8_format: E4M3
  interval: 1
  margin: 0
  override_linear_precision: false
  use_autocast_during_eval: false
gpu_ids: all
main_training_function: main
mixed_precision: fp8
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
""",
    "latest": """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
use_cpu: false
tpu_name: test-tpu
tpu_zone: us-central1-a
commands: null
command_file: tests/commands.sh
""",
    "latest sharded": _COMMON + _FSDP_1,
    "launch": """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
""",
    "oldest": "distributed_type: NO\nfp16: true\n",
    "json": '{"distributed_type": "MULTI_CPU", "num_processes": 2, "dynamo_config": {"backend": "eager"}}',
}
WRONG = FORMATS["latest"] + "another_invalid_key: true\ninvalid_key: x\n"


def unknown_names(text: str) -> list[str]:
    """The keys of a file, in today's spelling, that ``accelerate config --set`` does not find."""
    keys = upgrade_keys(yaml.safe_load(text)).items()
    names = [
        [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key] for key, value in keys
    ]
    return [name for several in names for name in several if not _is_found(name)]


def _is_found(name: str) -> bool:
    try:
        return bool(find_setting(name))
    except UnknownNameError:
        return False
