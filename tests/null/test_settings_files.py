"""Configuration files: which one is used, what may stand in it, and where an error points."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from accelerate.core.errors import SettingError, UnknownNameError
from tests.support import launch_plans
from tests.support.command import run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``config(text)`` reads a launch whose ``--config_file`` holds ``text``."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def reads(text: str, name: str = "job.yaml", **flags: Any) -> Any:
        return launch_plans.request_of_file(write(tmp_path / name, text), **flags)

    return reads


# ---------------------------------------------------------------- which file


def test_the_named_file_wins_over_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: a file that nobody named is used only from its place, and known to be unnamed."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert launch_plans.config_file(None) is None
    default = write(tmp_path / "home/accelerate/default_config.yaml", "num_processes: 3")
    found = launch_plans.config_file(None)
    assert found is not None
    assert (found.path, found.is_explicit, found.values["num_processes"]) == (default, False, 3)
    assert launch_plans.config_file(None, use_default=False) is None
    found = launch_plans.config_file(str(write(tmp_path / "mine.yaml", "num_processes: 1")))
    assert found is not None
    assert (found.is_explicit, found.values["num_processes"]) == (True, 1)


@pytest.mark.parametrize("text", ["services:\n  web: {}\n", "a: [1\n", "num_processes: 2\nuse_cpu: true\n"])
def test_a_file_here_that_nobody_named_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Repositories have an ``accelerate.yaml`` for one of several ways to train, and 1.x never reads it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    here = write(tmp_path / "accelerate.yaml", text)
    line = "accelerate.yaml lies here and is not used: --config_file accelerate.yaml uses it"
    request = launch_plans.request()
    assert (request.file, request.get("use_cpu"), request.notes) == (None, False, (line,))
    write(tmp_path / "home/accelerate/default_config.yaml", "num_processes: 3")
    assert launch_plans.request().get("num_processes") == 3
    assert launch_plans.request(use_cpu=True).notes == (line,)
    for name in (here, write(tmp_path / "mine.yaml", "num_processes: 1")):
        monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(name))
        if "num_processes" not in name.read_text():
            with pytest.raises(SettingError):
                launch_plans.request()
        else:
            request = launch_plans.request()
            assert (request.file is not None, request.notes) == (True, ())


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"HF_HOME": "/a"}, "/a/accelerate"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/huggingface/accelerate"),
        ({"HOME": "/c"}, "/c/.cache/huggingface/accelerate"),
    ],
)
def test_the_default_file_lies_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], folder: str
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert str(launch_plans.default_file()) == f"{folder}/default_config.yaml"


@pytest.mark.parametrize(("home", "code"), [("/" + "x" * 300, 2), ("~no-such-user/hf", 0)])
def test_a_home_that_cannot_be_looked_into_holds_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: str, code: int
) -> None:
    """As one whose permissions forbid it; ``config`` says that it cannot write there."""
    monkeypatch.setenv("HF_HOME", home)
    monkeypatch.chdir(tmp_path)
    assert launch_plans.request().file is None
    assert run(["config", "--set", "debug=true"]) == code
    assert ("cannot be written" in capsys.readouterr().err) == (code == 2)


def test_a_user_without_a_home_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``docker run --user 12345``: the user is in no table, and HOME is not set."""
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    monkeypatch.chdir(tmp_path)
    assert launch_plans.request(mpirun_hostfile="~/hosts", log_dir="~/logs").file is None
    with pytest.raises(FileNotFoundError, match=r"there is no configuration file ~/mine\.yaml"):
        launch_plans.config_file("~/mine.yaml")


def test_cpu_on_the_command_line_leaves_the_default_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(launch_plans.default_file(), "mixed_precision: bf16")
    assert launch_plans.request().get("mixed_precision") == "bf16"
    assert launch_plans.request(use_cpu=True).get("mixed_precision") is None


def test_a_missing_file_suggests_a_similar_one(config: Any, tmp_path: Path) -> None:
    write(tmp_path / "job.yaml", "")
    with pytest.raises(FileNotFoundError, match=r"did you mean .*job\.yaml") as error:
        launch_plans.config_file(str(tmp_path / "jbo.yaml"))
    assert isinstance(error.value, SettingError)


# ---------------------------------------------------------------- what is wrong with it


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("num_processes: 2\nmixed_precison: bf16\n", 2, "unknown key 'mixed_precison'"),
        ("\n\ndynamo_config:\n  dynamo_backnd: x\n", 4, "unknown key of dynamo_config 'dynamo_backnd'"),
        ("fsdp_config:\n  version: 2\n  fsdp_reshard_after_forwrd: 1\n", 3, "'fsdp_reshard_after_forwrd'"),
        ("fsdp_config:\n  fsdp_cpu_offload: true\n", 2, "'fsdp_cpu_offload'"),
        ("deepspeed_config: {mixed_precision: bf16}\n", 1, "unknown key of deepspeed_config"),
        ("num_processes: '8x'\n", 1, "num_processes is the text '8x'"),
        ("main_process_port: '70000'\n", 1, "main_process_port is 70000"),
        ("debug: false\nmain_process_port: high\n", 2, "main_process_port is the text 'high'"),
        ("dynamo_config:\n  dynamo_mode: fast\n", 2, "unknown value 'fast' of dynamo_mode"),
        ("dynamo_config: inductor\n", 1, "dynamo_config is 'inductor', but it is a table"),
        ("a: [1\n", 2, "this is not valid YAML"),
        ("a:\n\t- 1\n", 2, "this is not valid YAML"),
    ],
)
def test_an_error_names_file_line_and_key(config: Any, text: str, line: int, what: str) -> None:
    """F5: a typo or a wrong type at any depth."""
    with pytest.raises(SettingError) as error:
        config(text)
    assert what in error.value.what
    assert f"job.yaml, line {line}" in error.value.what


def test_a_typo_suggests_the_key_that_was_meant(config: Any) -> None:
    with pytest.raises(UnknownNameError) as error:
        config("fsdp_config:\n  fsdp_reshard_after_forwrd: true\n")
    assert error.value.near == "fsdp_reshard_after_forward"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("fsdp_config: {cpu_offload: true}", "did you mean 'fsdp_offload_params'?"),
        ("fsdp_config: {fsdp_mixed_precision: bf16}", "write mixed_precision at the top level"),
        ("fsdp_config: {zero_stage: 2}", "write zero_stage below deepspeed_config"),
        ("deepspeed_config: {num_processes: 2}", "write num_processes at the top level"),
        ("zero_stage: 2", "write zero_stage below deepspeed_config"),
        ("use_fsdp: true", "leave it out, and write distributed_type: FSDP"),
        ("multi_gpu: true", "leave it out, and write distributed_type: MULTI_GPU"),
        ("module: true", "leave it out, and add --module to the command"),
        ("cpu: true", "did you mean 'use_cpu'?"),
        ("master_addr: a", "did you mean 'main_process_ip'?"),
    ],
)
def test_an_option_in_another_place_is_told_where_it_belongs(config: Any, text: str, fix: str) -> None:
    with pytest.raises(SettingError) as error:
        config(text)
    assert error.value.fix == fix


@pytest.mark.parametrize("text", ["- 1\n", "just text", "12"])
def test_a_file_that_is_no_table(config: Any, text: str) -> None:
    with pytest.raises(SettingError, match="is not a table of keys"):
        config(text)


def test_a_json_file(config: Any) -> None:
    assert config('{"num_processes": 4, "dynamo_config": {}}', "job.json").get("num_processes") == 4
    with pytest.raises(SettingError, match="line 1: this is not valid JSON"):
        config("{", "job.json")


OLD_FILES = {
    "debug: true\nnum_processes: 2\ndebug: false\n": "line 3: the key 'debug' stands twice: line 1 has no",
    '{"num_processes": 1, "num_processes": 2}': "the key 'num_processes' stands twice: the first has",
    "distributed_type: FSDP\nfsdp_config: {version: 1,\n  version: 2}\n": (
        "line 3: the key 'version' stands twice"
    ),
    "distributed_type: 'NO'\nnum_processes: 8\n": "line 2: num_processes is 8, which has no effect",
    "distributed_type: 'NO'\ndeepspeed_config:\n  zero_stage: 2\n": "line 2: deepspeed_config has no effect",
    "num_processes: 2\nipex_config:\n  ipex: true\n": "line 2: ipex_config has no effect: torch has",
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  overlap_comm: true\n": (
        "line 3: overlap_comm has no effect: it is a key of DeepSpeed's own configuration"
    ),
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_checkpointing: true\n": (
        "line 3: gradient_checkpointing has no effect: DeepSpeed has no such option; the script turns it on"
    ),
    "deepspeed_config: {offload_param_pin_memory: 1, fp32_reduce_scatter: 1}\n": (
        "line 1: offload_param_pin_memory has no effect: it is a key of DeepSpeed's own configuration",
        "line 1: fp32_reduce_scatter has no effect: deepspeed_config has no such option",
    ),
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  offload_optimizer: {device: cpu}\n"
    "  offload_param: {device: cpu, pin_memory: true}\n  offload_param_device: none\n": (
        "line 3: offload_optimizer is a table of DeepSpeed's .*: read as offload_optimizer_device: cpu",
        "line 4: offload_param has no effect: deepspeed_config.offload_param_device is the key for the same",
        "line 4: offload_param_pin_memory has no effect: it is a key of DeepSpeed's own configuration",
    ),
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_limit_all_gathers: true\n  xla: false\n": (
        "line 3: fsdp_limit_all_gathers has no effect: only the script's code can give it",
        "line 4: xla has no effect: fsdp_config has no such option, and in Accelerate 1.x nothing reads it",
    ),
    "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_learning_rate_decay_iters: 9}\n": (
        "line 2: megatron_lm_learning_rate_decay_iters has no effect: megatron_lm_config has no such option"
    ),
    "num_processes: 2\nfp16: true\nmixed_precision: bf16\n": "line 2: fp16 has no effect: mixed_precision is",
    "num_processes: 2\ndynamo_backend: EAGER\ndynamo_config:\n  backend: INDUCTOR\n": (
        "line 2: dynamo_backend has no effect: dynamo_config.backend is the key"
    ),
    "distributed_type: FSDP\nmegatron_lm_config:\n  tp_degree: 2\nfsdp_config: {version: 2}\n": (
        "line 2: megatron_lm_config has no effect: .* line 1: distributed_type is FSDP"
    ),
}


@pytest.mark.parametrize("text", OLD_FILES)
def test_what_has_no_effect_in_an_old_file_is_told(config: Any, tmp_path: Path, text: str) -> None:
    """Such files started under 1.x: a launch says the line, ``config update`` mends it."""
    name = "job.json" if text.startswith("{") else "job.yaml"
    request = config(text, name)
    told = OLD_FILES[text]
    for words, problem in zip((told,) if isinstance(told, str) else told, request.file.problems, strict=True):
        assert name in problem
        assert re.search(words, problem)
    assert request.get("num_processes") in (2, None)
    assert (
        not {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "MEGATRON_LM_TP_DEGREE"} & request.script_variables().keys()
    )
    assert run(["config", "update", "--config_file", name]) == 0
    assert launch_plans.request_of_file(tmp_path / name).file.problems == ()
    assert (tmp_path / f"{name}.bak").read_text() == text


def test_an_offload_table_of_deepspeeds_json_says_the_options(config: Any) -> None:
    """Pages about Ulysses write it so; a key of today beside it wins, and a slip stays an error."""
    start = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  "
    request = config(
        f"{start}offload_optimizer: {{device: nvme, nvme_path: /drive}}\n"
        "  offload_param: {device: cpu}\n  offload_param_device: none\n"
    )
    names = ("offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device")
    assert [request.get(name) for name in names] == ["nvme", "/drive", "none"]
    assert "line 3" in request.origin("offload_optimizer_device").where
    with pytest.raises(SettingError, match="unknown key of deepspeed_config 'offload_param'"):
        config(f"{start}offload_optimizer: {{device: cpu}}\n  offload_param: cpu\n")


def test_strict_mode_refuses_an_old_file(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "job.yaml", "distributed_type: 'NO'\nnum_processes: 8\n")
    write(tmp_path / "train.py", "")
    words = ["launch", "--dry_run", "--config_file", str(tmp_path / "job.yaml"), str(tmp_path / "train.py")]
    assert run(words) == 0
    assert "job.yaml, line 2: num_processes is 8, which has no effect" in capsys.readouterr().err
    assert run([*words[:1], "--strict", *words[1:]]) == 2
    told = capsys.readouterr().err
    assert "line 2: num_processes is 8, which has no effect" in told
    assert "fix: accelerate config update --config_file" in told


def test_a_file_that_cannot_be_read(config: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        launch_plans.config_file(str(tmp_path))
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match=r"bad\.yaml cannot be read"):
        launch_plans.config_file(str(tmp_path / "bad.yaml"))


def test_an_empty_file_says_nothing(config: Any) -> None:
    assert not any(loaded.is_given(name) for loaded in config("# later\n").loaded.values()
                   for name in loaded.origins if name != "config_file")  # fmt: skip


# ---------------------------------------------------------------- what files of 1.x hold

# What the public package writes for several devices of one machine, and what its clients ship.
WRITTEN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
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
deepspeed_config: {}
fsdp_config: {}
dynamo_config:
  dynamo_backend: INDUCTOR
  mode: default
"""


def test_a_file_of_the_public_package_is_read_as_it_is(config: Any) -> None:
    request = config(WRITTEN)
    assert (request.get("num_processes"), request.get("gpu_ids")) == (8, "all")
    assert request.script_variables() == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
    }


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("fp16: true", "mixed_precision", "fp16"),
        ("fp16: false", "mixed_precision", "no"),
        ("fp16: false\nmixed_precision: bf16", "mixed_precision", "bf16"),
        ("dynamo_backend: 'NO'\ndynamo_config: {}", "dynamo_backend", "NO"),
        ("dynamo_backend: INDUCTOR\ndynamo_config: {mode: max-autotune}", "dynamo_backend", "INDUCTOR"),
        ("dynamo_backend: INDUCTOR\ndynamo_config: {mode: max-autotune}", "dynamo_mode", "max-autotune"),
        ("dynamo_backend: INDUCTOR\ndynamo_config: {dynamo_backend: EAGER}", "dynamo_backend", "EAGER"),
        ("mixed_precision: no", "mixed_precision", "no"),
        ("dynamo_backend: 'NO'", "dynamo_backend", "NO"),
        ("dynamo_config: {backend: eager}", "dynamo_backend", "EAGER"),
        ("num_processes: -1", "num_processes", None),
        ("downcast_bf16: 'auto'", "downcast_bf16", False),
        ("tee: 3", "tee", "3"),
        ("use_cpu: 1", "use_cpu", True),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: 0}",
            "fsdp_offload_params",
            False,
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: 1}",
            "fsdp_reshard_after_forward",
            True,
        ),
        ("num_processes: ''\nmain_process_ip: ''", "num_processes", None),
        ("mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: ''}", "mpirun_hostfile", None),
        ("deepspeed_config: {deepspeed_hostfile: ''}", "deepspeed_hostfile", None),
        ("mpirun_config: {mpirun_ccl: '1'}", "num_processes", None),
        ("gpu_ids: 0", "gpu_ids", 0),
        ("machine_rank: '0'", "machine_rank", 0),
        ("num_processes: '2'", "num_processes", 2),
        ("num_machines: '2'\nmain_process_ip: a", "num_machines", 2),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_POST}",
            "fsdp_backward_prefetch",
            "BACKWARD_POST",
        ),
        (
            "fp8_config: {override_linear_precision: '(false, true, false)'}",
            "fp8_override_linear_precision",
            (False, True, False),
        ),
    ],
)
def test_old_formats(config: Any, text: str, name: str, value: Any) -> None:
    assert config(text).get(name) == value


def test_json_text_in_a_yaml_file_is_fine(config: Any) -> None:
    """The public package writes its default file so."""
    assert config(json.dumps({"num_processes": 2, "use_cpu": True}, indent=2)).get("use_cpu") is True
