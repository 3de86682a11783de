"""Launches of scripts that read what was said of engines: by files as libraries ship them, and by flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelerate.utils import is_deepspeed_available
from tests.support.command import launch
from tests.support.long_run import LONG_RUN

# What a rank finds in its environment; torch, which would take seconds to import, adds nothing to it.
TELL = """
import json, os
rank, size = (int(os.environ.get(name, other)) for name, other in (("RANK", 0), ("WORLD_SIZE", 1)))
starts = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "PYTHONPATH")
told = {name: value for name, value in os.environ.items() if name.startswith(starts)}
line = {"rank": rank, "of": size, "told": told}
print(json.dumps(line) + "\\n", end="", flush=True)
"""
TRAIN = """
from accelerate import Accelerator
accelerator = Accelerator()
stage = accelerator.deepspeed_plugin.zero_stage
print(f"TYPE {accelerator.distributed_type.value} {stage}\\n", end="", flush=True)
"""
COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": "false",
    "downcast_bf16": "'no'",
    "enable_cpu_affinity": "false",
    "machine_rank": "0",
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": "1",
    "num_processes": "8",
    "rdzv_backend": "static",
    "same_network": "true",
    "tpu_env": "[]",
    "tpu_use_cluster": "false",
    "tpu_use_sudo": "false",
    "use_cpu": "false",
}
ZERO = "deepspeed_multinode_launcher: standard, gradient_accumulation_steps: 1, "
# The seven kinds of files that trl ships: their keys and values, and what a script then finds.
FILES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "single": ({"distributed_type": "'NO'", "gpu_ids": "all", "num_processes": "1"}, {}),
    "multi": ({"distributed_type": "MULTI_GPU", "gpu_ids": "all"}, {}),
    "zero1": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": "{deepspeed_multinode_launcher: standard, gradient_accumulation_steps: auto, "
            "zero3_init_flag: false, zero_stage: 1}",
        },
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        },
    ),
    "zero2": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": f"{{{ZERO}offload_optimizer_device: none, offload_param_device: none, "
            "zero3_init_flag: false, zero_stage: 2}",
        },
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        },
    ),
    "zero3": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": f"{{{ZERO}offload_optimizer_device: none, offload_param_device: none, "
            "zero3_init_flag: true, zero3_save_16bit_model: true, zero_stage: 3}",
        },
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        },
    ),
    "fsdp1": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": "{fsdp_activation_checkpointing: false, fsdp_backward_prefetch: BACKWARD_PRE, "
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_cpu_ram_efficient_loading: true, "
            "fsdp_forward_prefetch: true, fsdp_offload_params: false, "
            "fsdp_reshard_after_forward: FULL_SHARD, fsdp_state_dict_type: FULL_STATE_DICT, "
            "fsdp_sync_module_states: true, fsdp_use_orig_params: true, fsdp_version: 1}",
        },
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "1",
            "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD",
            "FSDP_FORWARD_PREFETCH": "true",
            "FSDP_OFFLOAD_PARAMS": "false",
        },
    ),
    "fsdp2": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": "{fsdp_activation_checkpointing: false, fsdp_version: 2, "
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_cpu_ram_efficient_loading: true, "
            "fsdp_offload_params: false, fsdp_reshard_after_forward: true, "
            "fsdp_state_dict_type: FULL_STATE_DICT}",
        },
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        },
    ),
}
SWITCHES = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"}


@pytest.mark.parametrize("name", FILES)
def test_files_that_a_library_ships_launch_as_they_are(name: str, tmp_path: Path) -> None:
    """F15: each tells its engine, and only that; the number of processes and the CPU come from flags."""
    keys, expected = FILES[name]
    file = tmp_path / f"{name}.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**COMMON, **keys}.items()))
    size = 1 if name == "single" else 2
    result = launch("--config_file", str(file), "--cpu", "-n", str(size), script_text=TELL)
    assert result.returncode == 0, result.output
    ranks = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == list(range(size))
    for rank in ranks:
        assert rank["of"] == size
        assert rank["told"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert {key: rank["told"].get(key) for key in expected} == expected
        assert SWITCHES & rank["told"].keys() == SWITCHES & expected.keys()


@pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed")
@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_two_ranks_train_by_the_engine_that_was_asked_for() -> None:
    """F3, F15: a launch for an engine never ends in plain data parallel training."""
    result = launch("--cpu", "-n", "2", "--use_deepspeed", "--zero_stage", "1", script_text=TRAIN)
    assert result.returncode == 0, result.output
    assert result.stdout.count("TYPE DEEPSPEED 1") == 2, result.output
