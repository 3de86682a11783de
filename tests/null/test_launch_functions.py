"""The launcher as functions of other programs: namespaces of any make, commands and environments of plans."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate.cli import v1_launcher
from accelerate.commands import launch
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.core.errors import LaunchError, RankError, SettingError

# As the parser of 1.x leaves them when only a script is typed.
UNTYPED: dict[str, Any] = {
    "config_file": None,
    "quiet": False,
    "cpu": False,
    "multi_gpu": False,
    "tpu": False,
    "mixed_precision": None,
    "num_processes": None,
    "num_machines": None,
    "machine_rank": None,
    "num_cpu_threads_per_process": None,
    "enable_cpu_affinity": False,
    "dynamo_backend": None,
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "use_deepspeed": False,
    "use_fsdp": False,
    "use_parallelism_config": False,
    "use_megatron_lm": False,
    "gpu_ids": None,
    "same_network": False,
    "main_process_port": None,
    "tee": "0",
    "log_dir": None,
    "role": "default",
    "rdzv_backend": "static",
    "rdzv_conf": "",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "module": False,
    "no_python": False,
    "fsdp_version": "1",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100000000,
    "megatron_lm_tp_degree": 1,
    "megatron_lm_gradient_clipping": 1.0,
    "fp8_override_linear_precision": (False, False, False),
    "fp8_enable_fsdp_float8_all_gather": "true",
    "parallelism_config_tp_size": 1,
    "parallelism_config_sp_seq_length_is_variable": True,
    "debug": False,
    "training_script": "train.py",
    "training_script_args": [],
    "func": launch_command,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os, sys\nopen('ran' + os.environ.get('RANK', ''), 'w').write(' '.join(sys.argv[1:]))"
    )


def by_hand(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**UNTYPED | changed)


def parsed(*args: str) -> argparse.Namespace:
    return launch_command_parser().parse_args([*args, "train.py", "--lr", "1"])


# ---------------------------------------------------------------- namespaces


def test_defaults_of_a_namespace_made_by_hand_ask_for_nothing() -> None:
    assert v1_launcher.typed_flags(by_hand()) == {}
    assert v1_launcher.typed_flags(by_hand(num_processes=2, mixed_precision="no", cpu=True)) == {
        "num_processes": 2,
        "mixed_precision": "no",
        "use_cpu": True,
    }
    assert v1_launcher.typed_flags(argparse.Namespace(use_cpu=True)) == {"use_cpu": True}


def test_numbers_of_a_namespace_made_by_hand_are_compared_as_numbers() -> None:
    """HydraXcel's defaults of 1.x are those of a dataclass: 1e8, and what 1.x only writes."""
    defaults: dict[str, Any] = {
        "fsdp_min_num_params": 1e8,
        "megatron_lm_gradient_clipping": 1,
        "max_restarts": 0.0,
        "fp8_pad_inner_dim": 1,
        "fp8_override_linear_precision": [False, False, False],
        "vm": [],
        "nproc_per_node": 1,
    }
    assert v1_launcher.typed_flags(by_hand(**defaults)) == {}
    changed = by_hand(**defaults, num_processes=8, main_process_port=29500.0, cpu=True)
    request = v1_launcher.read_namespace(changed)
    assert (request.local_processes.value, request.settings.main_process_port) == (8, 29500)
    env = launch.prepare_multi_gpu_env(by_hand(cpu=True, use_fsdp=True, fsdp_min_num_params=2e7))
    assert env["FSDP_MIN_NUM_PARAMS"] == "20000000"


def test_what_was_typed_counts_although_it_is_the_default() -> None:
    """In 1.x, too, ``nondefault`` says which these are."""
    namespace = parsed("--role", "default", "--cpu", "-n", "2")
    assert namespace.nondefault - {"training_script", "training_script_args"} == {
        "role",
        "cpu",
        "num_processes",
    }
    flags = v1_launcher.typed_flags(namespace)
    assert flags == {"role": "default", "use_cpu": True, "num_processes": 2}
    assert v1_launcher.typed_flags(by_hand(fsdp_version="1", nondefault={"fsdp_version"})) == {
        "fsdp_version": "1"
    }


def test_launching_a_namespace_made_by_hand_runs_the_script_and_returns(tmp_path: Path) -> None:
    """The script runs in processes of its own; this one goes on."""
    launch_command(by_hand(cpu=True, num_processes=2, training_script_args=["a b", "--", "-x"]))
    assert (tmp_path / "ran0").read_text() == (tmp_path / "ran1").read_text() == "a b -- -x"


def test_a_rank_that_fails_is_an_error_of_the_function(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    for function in (
        launch_command,
        launch.simple_launcher,
        launch.multi_gpu_launcher,
    ):
        with pytest.raises(RankError) as error:
            function(by_hand(cpu=True))
        assert error.value.code == 7
        # Programs of 1.x catch it so, and read the exit code.
        assert isinstance(error.value, subprocess.CalledProcessError)
        assert error.value.returncode == 7
        assert error.value.cmd[:2] == [sys.executable, "train.py"]
        assert str(error.value).startswith("the script failed (exit code 7)")
        again = pickle.loads(pickle.dumps(error.value))
        assert (again.returncode, again.cmd, str(again)) == (7, error.value.cmd, str(error.value))
    with pytest.raises(LaunchError, match="there is no script"):
        launch.simple_launcher(by_hand(training_script="no.py"))


def test_a_dry_run_as_a_function_prints_and_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_command(parsed("--cpu", "--dry-run"))
    assert "A dry run: nothing is started" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_the_simple_launcher_starts_one_process(tmp_path: Path) -> None:
    launch.simple_launcher(by_hand(cpu=True, num_processes=4))
    assert [path.name for path in tmp_path.glob("ran*")] == ["ran"]
    launch.multi_gpu_launcher(by_hand(cpu=True, num_processes=2))
    assert len(list(tmp_path.glob("ran*"))) == 3


# ---------------------------------------------------------------- commands and environments


def test_the_command_and_environment_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TESTS", "here")
    command, env = launch.prepare_simple_launcher_cmd_env(parsed("--cpu", "--mixed_precision", "bf16"))
    assert command == [sys.executable, "train.py", "--lr", "1"]
    assert (env["ACCELERATE_USE_CPU"], env["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")
    assert env["ACCELERATE_TESTS"] == "here"
    assert "ACCELERATE_USE_CPU" not in os.environ
    assert launch.prepare_simple_launcher_cmd_env(parsed("-m"))[0][1:3] == ["-m", "train.py"]
    assert launch.prepare_simple_launcher_cmd_env(parsed("--no_python"))[0] == [
        "train.py",
        "--lr",
        "1",
    ]


def test_the_environment_of_several_processes() -> None:
    args = parsed("--cpu", "-n", "3", "--main_process_port", "0")
    env = launch.prepare_multi_gpu_env(args)
    assert args.nproc_per_node == "3"
    assert env["ACCELERATE_USE_CPU"] == "true"
    assert "OMP_NUM_THREADS" in env
    # Rank and address are the starter's to say.
    assert not {"RANK", "MASTER_PORT"} & (env.keys() - os.environ.keys())


def test_a_plan_of_several_commands_is_one_command_of_torchrun() -> None:
    plan = v1_launcher._plan_with(parsed("--cpu", "-n", "2"))
    command, env = v1_launcher._single_command(plan)
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert command == [*starter, "train.py", "--lr", "1"]
    assert "RANK" not in env.keys() - os.environ.keys()
    program = v1_launcher._plan_with(parsed("--cpu", "-n", "2", "--no_python"))
    assert v1_launcher._single_command(program)[0] == [
        *starter,
        "--no-python",
        "train.py",
        "--lr",
        "1",
    ]


def test_what_is_asked_wrongly_is_an_error_of_the_function() -> None:
    with pytest.raises(SettingError, match="'bf61'"):
        launch.prepare_multi_gpu_env(parsed("--mixed_precision", "bf61"))
    with pytest.raises(SettingError, match="--num_processes is 1 on 2 machines"):
        launch_command(by_hand(cpu=True, num_processes=1, num_machines=2, main_process_ip="node-a"))


def test_a_validated_namespace_has_what_the_file_and_defaults_say(tmp_path: Path) -> None:
    """Ray's AccelerateTrainer validates a namespace, and then asks for the environment of its processes."""
    file = tmp_path / "two.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nuse_cpu: true\n"
        "num_machines: 1\nnum_processes: 2\ndebug: false\nfsdp_config: {fsdp_version: 2}\n"
    )
    namespace = launch_command_parser().parse_args(["--config_file", str(file), "s.py", "--x"])
    args, config, is_of_file = launch._validate_launch_command(namespace)
    assert args is namespace
    assert (args.num_processes, args.num_machines, args.mixed_precision) == (2, 1, "bf16")
    assert (args.use_fsdp, args.fsdp_version, args.use_cpu, args.multi_gpu) == (True, 2, True, False)
    assert config is not None
    assert config.to_dict()["fsdp_config"] == {"fsdp_version": 2}
    assert is_of_file
    environment = launch.prepare_multi_gpu_env(args)
    assert (environment["ACCELERATE_USE_FSDP"], args.nproc_per_node) == ("true", "2")

    namespace = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "fp16", "s.py"])
    args, config, is_of_file = launch._validate_launch_command(namespace)
    assert (args.num_processes, args.mixed_precision, args.dynamo_backend) == (1, "fp16", "no")
    assert (config, is_of_file) == (None, False)


@pytest.mark.parametrize("local_rank", [None, "1", "-1"])
def test_the_environment_of_one_process_among_others(
    local_rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's AccelerateTrainer: a namespace of one process, as many machines as there are processes."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items() if local_rank else ():
        monkeypatch.setenv(name, str(value))
    args = by_hand(
        use_cpu=True,
        num_processes=1,
        num_machines=2,
        machine_rank=1,
        num_cpu_threads_per_process=1.0,
        main_process_ip="node-a",
        main_process_port=29511,
    )
    before = dict(os.environ)
    assert launch._validate_launch_command(args)[0].num_machines == 2
    env = launch.prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, env["OMP_NUM_THREADS"], env["ACCELERATE_USE_CPU"]) == ("1", "1", "true")
    for function in (launch.prepare_simple_launcher_cmd_env, launch.prepare_deepspeed_cmd_env):
        command, env = function(args)
        assert command == [sys.executable, "train.py"]
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node-a", "29511")
        assert {name: env.get(name) for name in place} == {name: before.get(name) for name in place}
    assert dict(os.environ) == before


def test_a_path_is_added_and_the_variable_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PATH", "a")
    assert launch.env_var_path_add("SOME_PATH", "b") == f"a{os.pathsep}b"
    assert os.environ["SOME_PATH"] == "a"
    monkeypatch.delenv("SOME_PATH")
    assert launch.env_var_path_add("SOME_PATH", "b") == "b"


# ---------------------------------------------------------------- argparse with our customs


def make() -> launch.CustomArgumentParser:
    made = launch.CustomArgumentParser("x")
    made.add_argument("--one_thing", "-o", type=int, default=3)
    made.add_argument("script")
    group = made.add_argument_group("Group")
    group.add_argument("--other-thing", action="store_true")
    return made


def test_both_spellings_and_what_was_typed() -> None:
    for spelling in ("--one_thing", "--one-thing", "-o"):
        namespace = make().parse_args([spelling, "4", "s.py"])
        assert (namespace.one_thing, namespace.nondefault) == (4, {"one_thing", "script"})
    for spelling in ("--other_thing", "--other-thing"):
        namespace = make().parse_args(["s.py", spelling])
        assert (namespace.other_thing, namespace.nondefault) == (True, {"other_thing", "script"})


def test_options_are_cleaned() -> None:
    cleaned = [launch.clean_option(word) for word in ("--num-processes", "--a_b", "-n", "x")]
    assert cleaned == ["num_processes", "a_b", None, None]


@pytest.mark.parametrize(("typed", "shown"), [([], False), (["--use_fsdp"], True), (["--use-fsdp"], True)])
def test_the_formatter_leaves_out_groups_that_nobody_asks_for(
    typed: list[str], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *typed])
    made: Callable[..., Any] = launch.CustomArgumentParser
    parser = made("x", formatter_class=launch.CustomHelpFormatter)
    parser.add_argument_group(launch.options_to_group["use_fsdp"]).add_argument("--inner_flag")
    parser.add_argument_group("Others").add_argument("--outer_flag")
    text = parser.format_help().partition("options:")[2]
    assert ("--inner_flag" in text, "--outer_flag" in text) == (shown, True)
