"""Settings of DeepSpeed, Megatron-LM and fp8: flags, keys and the variables that a script is handed."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.core.errors import DeviceError, MissingExtraError, SettingError, UnknownNameError
from accelerate.state import PartialState
from tests.laws.source import contract
from tests.support import launch_plans
from tests.support.registries import REGISTRIES, SETTINGS_OF, declared_variables

# flag, value as typed, variable, what it holds. Section 5 and 2.2 to 2.5 of the contract.
DEEPSPEED = [
    ("zero_stage", "3", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
    ("offload_optimizer_device", "nvme", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme"),
    ("offload_param_device", "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu"),
    ("offload_optimizer_nvme_path", "/a", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/a"),
    ("offload_param_nvme_path", "/b", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/b"),
    ("gradient_accumulation_steps", "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
    ("gradient_clipping", "1.0", "ACCELERATE_GRADIENT_CLIPPING", "1.0"),
    ("zero3_init_flag", "True", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "true"),
    ("zero3_save_16bit_model", "True", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true"),
    ("deepspeed_moe_layer_cls_names", "A,B", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "A,B"),
]
MEGATRON = [
    (f"megatron_lm_{name}", typed, f"MEGATRON_LM_{name.upper()}", typed.lower())
    for name, typed in {
        "tp_degree": "2",
        "use_custom_fsdp": "True",
        "no_load_optim": "True",
        "eod_mask_loss": "True",
        "overlap_cpu_optimizer_d2h_h2d": "True",
        "no_save_optim": "True",
        "optimizer_cpu_offload": "True",
        "use_precision_aware_optimizer": "False",
        "decoder_last_pipeline_num_layers": "3",
        "pp_degree": "2",
        "num_micro_batches": "4",
        "sequence_parallelism": "true",
        "recompute_activations": "true",
        "use_distributed_optimizer": "true",
        "gradient_clipping": "0.5",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": "2",
        "attention_backend": "true",
        "expert_model_parallel_size": "2",
        "context_parallel_size": "2",
        "attention_dropout": "0.1",
        "hidden_dropout": "0.2",
        "attention_softmax_in_fp32": "true",
        "expert_tensor_parallel_size": "2",
        "calculate_per_token_loss": "true",
        "use_rotary_position_embeddings": "true",
    }.items()
]
PARALLELISM = [
    (f"parallelism_config_{name}", typed, f"PARALLELISM_CONFIG_{name.upper()}", typed.lower())
    for name, typed in {
        "dp_replicate_size": "2",
        "dp_shard_size": "3",
        "tp_size": "4",
        "cp_size": "5",
        "cp_backend": "torch",
        "cp_comm_strategy": "alltoall",
        "sp_size": "6",
        "sp_backend": "deepspeed",
        "sp_seq_length": "128",
        "sp_seq_length_is_variable": "true",
        "sp_attn_implementation": "sdpa",
    }.items()
]
FP8 = [
    ("fp8_backend", "te", "ACCELERATE_FP8_BACKEND", "TE"),
    ("fp8_use_autocast_during_eval", True, "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "true"),
    ("fp8_margin", "2", "ACCELERATE_FP8_MARGIN", "2"),
    ("fp8_interval", "3", "ACCELERATE_FP8_INTERVAL", "3"),
    ("fp8_format", "E4M3", "ACCELERATE_FP8_FORMAT", "E4M3"),
    ("fp8_amax_history_len", "16", "ACCELERATE_FP8_AMAX_HISTORY_LEN", "16"),
    ("fp8_amax_compute_algo", "max", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "max"),
    ("fp8_opt_level", "O1", "ACCELERATE_FP8_OPT_LEVEL", "O1"),
    (
        "fp8_enable_fsdp_float8_all_gather",
        "false",
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
        "false",
    ),
    ("fp8_pad_inner_dim", "false", "ACCELERATE_FP8_PAD_INNER_DIM", "false"),
    ("fp8_recipe_name", "rowwise", "ACCELERATE_FP8_RECIPE_NAME", "rowwise"),
]
ENGINES: dict[str, tuple[str, str, list[Any]]] = {
    "use_deepspeed": ("deepspeed_config", "DEEPSPEED", DEEPSPEED),
    "use_megatron_lm": ("megatron_lm_config", "MEGATRON_LM", MEGATRON),
    "use_parallelism_config": ("parallelism_config", "", PARALLELISM),
    "": ("fp8_config", "", FP8),
}
# What Accelerate 1.15.0 told a script that prints its environment, with the flags above that it has and
# exports: accelerate launch --use_deepspeed (with DeepSpeed 0.19.8) | --use_megatron_lm | --use_fsdp
# --use_parallelism_config | --mixed_precision fp8 (with MS-AMP said to be there), --num_processes 1.
PUBLIC: dict[str, dict[str, str]] = {
    "use_deepspeed": {
        "ACCELERATE_CONFIG_DS_FIELDS": "",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_USE_DEEPSPEED": "true",
    },
    "use_megatron_lm": {
        "ACCELERATE_USE_MEGATRON_LM": "true",
        "MEGATRON_LM_ATTENTION_BACKEND": "true",
        "MEGATRON_LM_ATTENTION_DROPOUT": "0.1",
        "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32": "true",
        "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": "true",
        "MEGATRON_LM_CONTEXT_PARALLEL_SIZE": "2",
        "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": "3",
        "MEGATRON_LM_EOD_MASK_LOSS": "True",
        "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": "2",
        "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE": "2",
        "MEGATRON_LM_GRADIENT_CLIPPING": "0.5",
        "MEGATRON_LM_HIDDEN_DROPOUT": "0.2",
        "MEGATRON_LM_NO_LOAD_OPTIM": "True",
        "MEGATRON_LM_NO_SAVE_OPTIM": "True",
        "MEGATRON_LM_NUM_MICRO_BATCHES": "4",
        "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD": "True",
        "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D": "True",
        "MEGATRON_LM_PP_DEGREE": "2",
        "MEGATRON_LM_RECOMPUTE_ACTIVATIONS": "true",
        "MEGATRON_LM_RECOMPUTE_GRANULARITY": "full",
        "MEGATRON_LM_RECOMPUTE_METHOD": "uniform",
        "MEGATRON_LM_RECOMPUTE_NUM_LAYERS": "2",
        "MEGATRON_LM_SEQUENCE_PARALLELISM": "true",
        "MEGATRON_LM_TP_DEGREE": "2",
        "MEGATRON_LM_USE_CUSTOM_FSDP": "True",
        "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": "true",
        # It takes --megatron_lm_use_precision_aware_optimizer False for true.
        "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS": "true",
    },
    "use_parallelism_config": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_BACKEND": "torch",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
        "PARALLELISM_CONFIG_CP_SIZE": "5",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "128",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "True",
        "PARALLELISM_CONFIG_SP_SIZE": "6",
        "PARALLELISM_CONFIG_TP_SIZE": "4",
    },
    # Of booleans it writes 0 and 1, or True; of --fp8_backend te, which its own reader then refuses, te.
    "": {
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "0",
        "ACCELERATE_FP8_FORMAT": "E4M3",
        "ACCELERATE_FP8_INTERVAL": "3",
        "ACCELERATE_FP8_MARGIN": "2",
        "ACCELERATE_FP8_OPT_LEVEL": "O1",
        "ACCELERATE_FP8_PAD_INNER_DIM": "0",
        "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "True",
    },
}


@pytest.fixture
def asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``asks(file=..., **flags)`` is a checked request for a script that exists."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def request(file: str = "", **flags: Any) -> Any:
        if file:
            (tmp_path / "job.yaml").write_text(file)
            flags["config_file"] = "job.yaml"
        found = launch_plans.request(**flags)
        launch_plans.check(found)
        return found

    return request


def handed(request: Any) -> dict[str, str]:
    told = request.script_variables()
    told.pop("PYTHONPATH", None)
    return told


def plain(text: str) -> str:
    """A value as its readers understand it."""
    return {"0": "false", "1": "true"}.get(text, text.lower() if text in ("True", "False") else text)


# ---------------------------------------------------------------- flags, keys, variables


@pytest.mark.parametrize("switch", ENGINES)
def test_every_flag_reaches_the_script_in_its_variable(asks: Any, switch: str) -> None:
    _, _, rows = ENGINES[switch]
    flags = {name: value for name, value, _, _ in rows}
    told = handed(asks(**flags, **({switch: True} if switch else {})))
    expected = {variable: text for _, _, variable, text in rows}
    extra = {f"ACCELERATE_{switch.upper()}": "true"} if switch else {}
    extra |= {"ACCELERATE_CONFIG_DS_FIELDS": ""} if switch == "use_deepspeed" else {}
    assert told == expected | extra


@pytest.mark.parametrize("switch", ENGINES)
def test_the_public_package_tells_the_same(asks: Any, switch: str) -> None:
    """Compared with its recorded words: whoever reads the variables finds what was there before."""
    flags = {name: value for name, value, _, _ in ENGINES[switch][2]}
    told = handed(asks(**flags, **({switch: True} if switch else {})))
    theirs = PUBLIC[switch]
    yes_or_no = {variable for _, _, variable, text in ENGINES[switch][2] if text in ("true", "false")}
    assert {name: told[name] for name in theirs} == {
        name: plain(text) if name in yes_or_no else text for name, text in theirs.items()
    }


@pytest.mark.parametrize("switch", ENGINES)
@pytest.mark.parametrize("prefixed", [True, False])
def test_every_key_of_a_section_does_what_its_flag_does(asks: Any, switch: str, prefixed: bool) -> None:
    section, kind, rows = ENGINES[switch]
    prefix = {"deepspeed_config": "", "fp8_config": "fp8_"}.get(section, section.removesuffix("config"))
    prefix = "parallelism_config_" if section == "parallelism_config" else prefix
    lines = [f"distributed_type: {kind}"] if kind else []
    lines.append(f"{section}:")
    for name, value, _, _ in rows:
        key = name if prefixed or not prefix else name.removeprefix(prefix)
        lines.append(f"  {key}: {str(value).lower() if str(value) in ('True', 'False') else value}")
    told = handed(asks("\n".join(lines)))
    for _, _, variable, text in rows:
        assert told[variable] == text
    if switch:
        assert told[f"ACCELERATE_{switch.upper()}"] == "true"


def test_every_promised_flag_of_these_groups_is_there() -> None:
    """And nothing of them is promised for later any more."""
    starts = (
        "--deepspeed",
        "--zero",
        "--offload",
        "--gradient",
        "--megatron",
        "--parallelism",
        "--fp8",
        "--use_",
    )
    promised = {
        flag
        for flag in contract()["flags"]["launch"]
        if flag.replace("-", "_").startswith(tuple(start.replace("-", "_") for start in starts))
    }
    params = REGISTRIES["COMMANDS"].get("launch").params
    known = {flag for param in params for flag in param.opts if not getattr(param, "hidden", False)}
    assert len(promised) > 60
    assert promised - known == set()


def test_settings_belong_to_a_strategy_or_a_precision_of_their_name() -> None:
    assert set(SETTINGS_OF["STRATEGIES"].names()) <= set(REGISTRIES["STRATEGIES"].names())
    assert set(SETTINGS_OF["PRECISIONS"].names()) <= set(REGISTRIES["PRECISIONS"].names())


def test_what_nobody_gave_is_not_handed_on(asks: Any) -> None:
    """A default of the launcher would look like a wish of the user."""
    for switch in ("use_megatron_lm", "use_parallelism_config"):
        assert handed(asks(**{switch: True})) == {f"ACCELERATE_{switch.upper()}": "true"}
    assert handed(asks()) == {}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "true"),
        ({"fsdp_version": "1"}, "true"),
        ({"fsdp_cpu_ram_efficient_loading": "false"}, "false"),
        ({"fsdp_sync_module_states": "false"}, None),
    ],
)
def test_a_job_of_fsdp_reads_weights_on_rank_0_only(
    asks: Any, flags: dict[str, str], expected: str | None
) -> None:
    """transformers takes a missing variable for false, and 1.x always sets it."""
    assert handed(asks(use_fsdp=True, **flags)).get("FSDP_CPU_RAM_EFFICIENT_LOADING") == expected
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in handed(asks())


def test_a_flag_wins_over_a_variable_also_with_the_default(
    asks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: the script would find the variable of the launcher's environment otherwise."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    told = handed(asks(gradient_accumulation_steps="1"))
    assert told == {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}


def test_a_section_asks_for_degrees_of_parallelism(asks: Any) -> None:
    told = handed(asks("parallelism_config:\n  tp_size: 2\n"))
    assert told == {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    assert handed(asks("parallelism_config: {}\n")) == {}


# ---------------------------------------------------------------- old and odd files


def test_keys_that_the_old_wizard_wrote(asks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.34 and later wrote names that nothing read."""
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: name == "transformer_engine")
    text = (
        "fp8_config:\n  amax_compute_algorithm: max\n  amax_history_length: 20\n  backend: TE\n"
        "  fp8_format: E4M3\n  interval: 1\n  margin: 0\n  override_linear_precision: false\n"
        "  use_autocast_during_eval: false\n  optimization_level: O1\n"
    )
    told = handed(asks(f"mixed_precision: fp8\n{text}"))
    assert told["ACCELERATE_FP8_AMAX_COMPUTE_ALGO"] == "max"
    assert told["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "20"
    assert told["ACCELERATE_FP8_OPT_LEVEL"] == "O1"
    assert told["ACCELERATE_FP8_BACKEND"] == "TE"
    assert told["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert {told[f"ACCELERATE_FP8_OVERRIDE_{part}"] for part in ("FPROP", "DGRAD", "WGRAD")} == {"false"}


def test_one_setting_for_three_variables(asks: Any) -> None:
    told = handed(asks(fp8_override_linear_precision="true,false,true"))
    parts = [told[f"ACCELERATE_FP8_OVERRIDE_{part}"] for part in ("FPROP", "DGRAD", "WGRAD")]
    assert parts == ["true", "false", "true"]
    with pytest.raises(SettingError, match=r"--fp8_override_linear_precision has 2 values, but 3 are needed"):
        asks(fp8_override_linear_precision="true,false")


def test_an_old_key_beside_todays_is_said_with_both_places(asks: Any) -> None:
    with pytest.raises(SettingError, match="twice") as error:
        asks("fp8_config:\n  amax_history_length: 20\n  fp8_amax_history_len: 10\n")
    assert "line 2" in error.value.why
    assert "line 3" in error.value.why


def test_steps_of_accumulation_stand_in_the_section_of_deepspeed(asks: Any) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n"
    request = asks(text)
    assert request.get("gradient_accumulation_steps") == 4
    assert "line 3" in request.origin("gradient_accumulation_steps").where
    with pytest.raises(SettingError, match="gradient_accumulation_steps twice"):
        asks(f"{text}gradient_accumulation_steps: 2\n")


@pytest.mark.parametrize("more", ["\n  zero_stage: 2", ""])
def test_steps_of_accumulation_of_a_leftover_section_do_nothing(asks: Any, more: str) -> None:
    text = f"distributed_type: MULTI_CPU\ndeepspeed_config:\n  gradient_accumulation_steps: 4{more}\n"
    request = asks(text)
    assert request.origin("gradient_accumulation_steps").source == "default"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in request.script_variables()
    (problem,) = request.file.problems
    assert re.search("line [23]: deepspeed_config.* has no effect", problem)
    assert asks(f"{text}gradient_accumulation_steps: 2\n").get("gradient_accumulation_steps") == 2
    assert asks(text, use_deepspeed=True).get("gradient_accumulation_steps") == 4


def test_a_variable_asks_for_the_section_of_deepspeed(asks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    request = asks("deepspeed_config:\n  gradient_accumulation_steps: 4\n")
    assert (request.get("gradient_accumulation_steps"), request.file.problems) == (4, ())


def test_steps_of_accumulation_may_be_left_to_deepspeed(asks: Any) -> None:
    """Files that libraries ship: a script finds nothing, which its reader takes for "auto"."""
    text = (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: auto, zero_stage: 1}\n"
    )
    told = handed(asks(text))
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in told
    assert told["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "1"


def test_a_misspelt_key_of_deepspeed_is_found(asks: Any) -> None:
    """F5."""
    with pytest.raises(UnknownNameError, match=r"'zero_stge'.*line 2") as error:
        asks("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stge: 2}\n")
    assert error.value.near == "zero_stage"


def test_keys_of_its_own_configuration_are_said_to_have_no_effect(asks: Any) -> None:
    """Files that libraries ship have them in the section; 1.x ignores them without a word."""
    keys = ("seq_parallel_communication_data_type: bf16", "overlap_comm: true", "steps_per_print: 9")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    request = asks(text + "".join(f"  {key}\n" for key in keys))
    assert handed(request)["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert len(request.file.problems) == len(keys)
    for line, (key, problem) in enumerate(zip(keys, request.file.problems, strict=True), 4):
        assert f"job.yaml, line {line}: {key.partition(':')[0]} has no effect" in problem
        assert "deepspeed_config_file: ds.json" in problem
    (problem,) = asks("distributed_type: DEEPSPEED\ndeepspeed_config: {overlap_com: true}\n").file.problems
    assert "line 2: overlap_com has no effect" in problem
    with pytest.raises(UnknownNameError, match=r"'zero_stag'.*line 2"):
        asks("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stag: 2}\n")


# ---------------------------------------------------------------- DeepSpeed's own file


def test_fields_that_a_file_gave_are_named(asks: Any) -> None:
    """The fields of the configuration file, as in 1.15, flags left out."""
    file = (
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 1\n"
        "  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: true\n"
        "  zero3_save_16bit_model: true\n  zero_stage: 3\n"
    )
    told = handed(asks(file, zero_stage="2", gradient_clipping="1.0"))
    theirs = (
        "deepspeed_multinode_launcher,gradient_accumulation_steps,offload_optimizer_device,"
        "offload_param_device,zero3_init_flag,zero3_save_16bit_model,zero_stage,mixed_precision"
    )
    assert set(told["ACCELERATE_CONFIG_DS_FIELDS"].split(",")) == set(theirs.split(","))
    assert told["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"


def test_modules_beside_the_launch_are_found(
    asks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert asks(use_deepspeed=True).script_variables()["PYTHONPATH"] == str(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert asks(use_deepspeed=True).script_variables()["PYTHONPATH"] == f"/elsewhere:{tmp_path}"
    assert "PYTHONPATH" not in asks().script_variables()


OWN_FILE = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "8",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}


@pytest.fixture
def own_file(asks: Any, tmp_path: Path) -> Any:
    """``own_file(**flags)`` is a request with DeepSpeed's own file."""
    (tmp_path / "ds.json").write_text(json.dumps(OWN_FILE))

    def request(**flags: Any) -> Any:
        return asks(use_deepspeed=True, deepspeed_config_file="ds.json", **flags)

    return request


@pytest.mark.parametrize(
    ("flags", "there"),
    [
        ({"zero_stage": "3"}, "zero_optimization.stage: 2"),
        ({"offload_optimizer_device": "none"}, 'zero_optimization.offload_optimizer.device: "cpu"'),
        ({"offload_param_device": "cpu"}, 'zero_optimization.offload_param.device: "none"'),
        ({"gradient_accumulation_steps": "1"}, 'gradient_accumulation_steps: "8"'),
        (
            {"zero3_save_16bit_model": "false"},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save: true",
        ),
        ({"mixed_precision": "fp16"}, "fp16.enabled: false"),
        ({"mixed_precision": "no"}, "bf16.enabled: true"),
    ],
)
def test_a_flag_that_contradicts_the_deepspeed_config_file_names_both_places(
    own_file: Any, flags: dict[str, str], there: str
) -> None:
    """One number has one owner: the two would train differently, and nobody would know which won."""
    with pytest.raises(SettingError) as error:
        own_file(**flags)
    (name,) = flags
    assert f"--{name} is " in error.value.what
    assert f"--deepspeed_config_file (ds.json) says {there}" in error.value.what
    assert error.value.fix


def test_a_flag_that_agrees_with_the_deepspeed_config_file_is_fine(own_file: Any) -> None:
    """A number that is text there is the same number, and "auto" leaves it to us."""
    request = own_file(
        zero_stage="2",
        offload_optimizer_device="cpu",
        gradient_accumulation_steps="8",
        gradient_clipping="0.5",
        mixed_precision="bf16",
        offload_optimizer_nvme_path="none",
    )
    assert handed(request)["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds.json"
    assert handed(request)["ACCELERATE_GRADIENT_CLIPPING"] == "0.5"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("{", "not valid JSON: line 1"),
        ("[1]", "not a table of keys"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_the_deepspeed_config_file_is_read_before_anything_starts(
    asks: Any, tmp_path: Path, content: Any, words: str
) -> None:
    if content is not None:
        (tmp_path / "ds.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match=f"--deepspeed_config_file is 'ds.json'.*{words}"):
        asks(use_deepspeed=True, deepspeed_config_file="ds.json")


def test_the_deepspeed_config_file_may_be_the_text_itself(asks: Any) -> None:
    """In base 64, as transformers takes it."""
    text = base64.urlsafe_b64encode(json.dumps(OWN_FILE).encode()).decode()
    asks(use_deepspeed=True, deepspeed_config_file=text)
    with pytest.raises(SettingError, match="--zero_stage is 3"):
        asks(use_deepspeed=True, deepspeed_config_file=text, zero_stage="3")
    with pytest.raises(SettingError, match="no such file"):
        asks(use_deepspeed=True, deepspeed_config_file="ey.json")


# ---------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"use_deepspeed": True, "zero_stage": "4"}, "unknown value '4' of zero_stage"),
        ({"use_deepspeed": True, "offload_param_device": "gpu"}, "'gpu' of offload_param_device"),
        (
            {"use_deepspeed": True, "gradient_clipping": "much"},
            "is a number (0 or more) or 'auto'",
        ),
        ({"use_deepspeed": True, "zero3_init_flag": "maybe"}, "zero3_init_flag is true or false"),
        ({"use_deepspeed": True, "deepspeed_multinode_launcher": "ssh"}, "'ssh' of deepspeed_multinode"),
        ({"use_deepspeed": True, "offload_param_device": "nvme"}, "nothing says in which folder"),
        (
            {"use_megatron_lm": True, "megatron_lm_tp_degree": "two"},
            "megatron_lm_tp_degree is a whole number",
        ),
        ({"use_megatron_lm": True, "megatron_lm_recompute_granularity": "some"}, "'some' of megatron_lm_re"),
        ({"use_parallelism_config": True, "parallelism_config_cp_comm_strategy": "ring"}, "'ring'"),
        ({"use_fsdp": True, "fsdp_sharding_strategy": "FUL_SHARD"}, "'FUL_SHARD' of fsdp_sharding_strategy"),
        ({"use_fsdp": True, "fsdp_backward_prefetch": "4"}, "'4' of fsdp_backward_prefetch"),
        (
            {"file": "distributed_type: FSDP\nfsdp_config:\n  fsdp_state_dict_type: FULL\n"},
            "'FULL' of fsdp_state_dict_type (",
        ),
        ({"fp8_backend": "tea"}, "unknown value 'tea' of fp8_backend"),
        ({"fp8_margin": "1.5"}, "fp8_margin is a whole number"),
        ({"zero_stage": "2"}, "--zero_stage is given, but --use_deepspeed is not"),
        ({"megatron_lm_pp_degree": "2"}, "--megatron_lm_pp_degree is given, but --use_megatron_lm is not"),
        ({"parallelism_config_tp_size": "2"}, "but --use_parallelism_config is not"),
        ({"use_deepspeed": True, "use_fsdp": True}, "do not go together"),
        ({"use_deepspeed": True, "use_megatron_lm": True}, "do not go together"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(asks: Any, flags: Any, words: str) -> None:
    """F15: an option that nobody asked DeepSpeed for is an error too."""
    with pytest.raises(SettingError) as error:
        asks(**flags)
    assert words in error.value.what


@pytest.mark.parametrize(
    ("name", "said", "value"),
    [
        ("fsdp_sharding_strategy", "2", "SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy", "_hybrid_shard_zero2", "HYBRID_SHARD_ZERO2"),
        ("fsdp_backward_prefetch", "backward_post", "BACKWARD_POST"),
        ("fsdp_state_dict_type", "3", "SHARDED_STATE_DICT"),
    ],
)
def test_names_may_be_said_by_their_numbers(asks: Any, name: str, said: str, value: str) -> None:
    """Old files give a number; the script gets the name."""
    request = asks(use_fsdp=True, **{name: said})
    assert request.get(name) == value
    assert request.script_variables()[name.upper()] == value


def test_every_declared_variable_is_a_promised_one() -> None:
    """The names are those that scripts and libraries look for."""
    own = {"ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "FSDP_REPLICATE_SIZE", "PARALLELISM_CONFIG_PP_SIZE"}
    own |= {"ACCELERATE_FP8_RECIPE_NAME", "ACCELERATE_FP8_SCALING"}
    variables = declared_variables()
    promised = set(contract()["variables"]) | set(contract()["identifiers"])
    assert {name for name in variables - own if name not in promised} <= {
        f"MEGATRON_LM_{name}" for name in ("ATTENTION_DROPOUT",)
    }


# ---------------------------------------------------------------- in the script


def test_a_script_never_trains_in_another_way_than_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3, F15: what, why, what to do. A script that calls DeepSpeed itself has ranks and devices."""
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert PartialState(cpu=True).num_processes == 1
    with pytest.raises((DeviceError, MissingExtraError)) as error:
        Accelerator(cpu=True)
    assert "--use_megatron_lm" in error.value.fix or "pip install megatron-core" in error.value.fix
