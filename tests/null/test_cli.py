"""The command line, run inside the test: help, suggestions, refusals, and what is shown of them."""

from __future__ import annotations

import argparse
import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from accelerate.cli import env, main, options
from accelerate.cli.main import COMMANDS, run
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.core.errors import LaunchError, SettingError, UnknownNameError
from tests.support.devices import machine

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``cli("launch", ...)`` runs the command line in an empty folder and returns code, out and err."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def command(*args: str) -> SimpleNamespace:
        code = run(args)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return command


# ---------------------------------------------------------------- help


def test_without_a_command_there_is_help_and_exit_code_1(cli: Run) -> None:
    result = cli()
    assert result.code == 1
    for name in COMMANDS.names():
        shown = name.replace("_", "-")
        assert re.search(rf"^  {shown} +\w", result.out, re.MULTILINE), name


@pytest.mark.parametrize("columns", ["80", "110"])
def test_help_all_tells_every_flag_with_its_variable_and_key(
    cli: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """No name is broken, so each can be searched for and copied."""
    monkeypatch.setenv("COLUMNS", columns)
    text = " ".join(cli("launch", "--help-all").out.split()).replace(
        "- ", "-"
    )  # micro-batches, over two lines
    for row in options.launch_settings():
        if row.flags:
            assert row.flags[0] in text
            assert row.help.replace("- ", "-") in text
            assert not row.variable or row.variable in text
            assert not row.in_file or f"{row.path}:" in text


def test_help_all_is_grouped_by_topic(cli: Run) -> None:
    text = cli("launch", "--help-all").out
    topics = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert topics == [*dict.fromkeys(row.topic for row in options.launch_settings() if row.flags), "Other"]


@pytest.mark.parametrize("command", ["launch", "test", "env"])
def test_help_of_flags_of_a_launch_fits_on_a_screen(
    cli: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Common flags of ``launch`` alone, and the names of all topics, on lines of 80 characters."""
    monkeypatch.setenv("COLUMNS", "80")
    text = cli(command, "--help").out
    lines, words = text.splitlines(), " ".join(text.split())
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert not [row.topic for row in options.launch_settings() if row.flags and row.topic not in words]
    shown = set(re.findall(r"^  (?:-\w, )?(--\w+)", text, re.MULTILINE)) - {"--explain"}
    assert ({"--num_processes", "--cpu", "--mixed_precision", "--config_file"} <= shown) == (
        command == "launch"
    )
    assert command == "launch" or not shown


@pytest.mark.parametrize(
    "typed",
    [
        ["--use_fsdp", "--help"],
        ["--use-fsdp", "--help"],
        ["--fsdp_version=2", "--help"],
        ["--help", "sharding"],
    ],
)
def test_a_topic_is_shown_by_its_name_or_after_one_of_its_flags(cli: Run, typed: list[str]) -> None:
    rows = [row for row in options.launch_settings() if row.flags]
    text = cli("launch", *typed).out
    flags = {row.flags[0] for row in rows if row.topic == "Sharding"}
    assert {"--use_fsdp", "--fsdp_version"} < flags
    assert flags == {row.flags[0] for row in rows if f"\n  {row.flags[0]} " in text}
    assert "--fsdp_version" in cli("env", *typed).out


def test_help_finds_flags_with_a_word(cli: Run) -> None:
    text = cli("launch", "--help", "hostfile").out
    assert "--mpirun_hostfile" in text
    assert "--num_processes" not in text


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version(cli: Run, word: str) -> None:
    result = cli(word)
    assert (result.code, result.out) == (0, "accelerate, version 2.0.0\n")


@pytest.mark.parametrize(
    "words", [[], ["config", "update"], ["checkpoint", "verify"], *([name] for name in COMMANDS.names())]
)
def test_h_is_help(cli: Run, words: list[str]) -> None:
    typed = [word.replace("_", "-") for word in words]
    short = cli(*typed, "-h")
    assert (short.code, short.out) == (0, cli(*typed, "--help").out)
    assert short.out.startswith("Usage: ")


def test_h_takes_a_topic_and_leaves_the_scripts_alone(cli: Run, tmp_path: Path) -> None:
    assert cli("launch", "-h", "hostfile").out == cli("launch", "--help", "hostfile").out
    (tmp_path / "train.py").write_text("")
    assert "train.py -h" in cli("launch", "--dry-run", "--cpu", "train.py", "-h").out


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["lunch"], ["unknown command 'lunch'", "did you mean 'launch'?"]),
        (["checkpoint", "verfy"], ["unknown command 'verfy'", "did you mean 'verify'?"]),
        (["config", "updte"], ["unknown command 'updte'", "did you mean 'update'?"]),
        (["--bogus"], ["unknown flag '--bogus'"]),
        (
            ["launch", "--num_procesess", "2", "x.py"],
            ["'--num_procesess'", "did you mean '--num_processes'?"],
        ),
        (["launch", "--num-procesess", "2", "x.py"], ["did you mean '--num-processes'?"]),
        (["launch", "--zero_stag", "2", "x.py"], ["did you mean '--zero_stage'?"]),
        (["launch", "--help", "trainig"], ["unknown topic 'trainig'", "did you mean 'Training'?"]),
        (["launch", "--num_processes"], ["'--num_processes' requires an argument"]),
        (["launch", "--cpu=yes", "x.py"], ["'--cpu' does not take a value"]),
        (["launch", "-n", "two", "x.py"], ["--num_processes is the text 'two'", "a whole number"]),
        (["launch", "--mixed_precision", "bf61", "x.py"], ["'bf61'", "did you mean 'bf16'?"]),
        (["launch", "--mixed_precision", "half", "x.py"], ["'half'", "did you mean 'fp16'?"]),
        (["launch"], ["there is nothing to launch", "accelerate launch [flags] train.py"]),
        (["launch", "no.py"], ["there is no script no.py"]),
        (["launch", "--config_file", "no.yaml", "x.py"], ["there is no configuration file no.yaml"]),
        (["env", "-n", "2"], ["--num_processes means something only with --explain"]),
        (["estimate_memory"], ["Missing argument 'MODEL'", "accelerate estimate_memory --help lists"]),
    ],
)
def test_a_mistake_is_told_in_the_users_words(cli: Run, args: list[str], words: list[str]) -> None:
    result = cli(*args)
    assert result.code == 2
    assert [word for word in words if word not in result.err] == []
    assert result.err.startswith("accelerate")
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_wrong_variable_is_told_by_its_name(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.py").touch()
    monkeypatch.setenv("ACCELERATE_NUM_PROCESSES", "many")
    result = cli("launch", "x.py")
    assert result.code == 2
    assert "the environment variable ACCELERATE_NUM_PROCESSES is the text 'many'" in result.err


@pytest.mark.parametrize("name", ["config", "estimate_memory", "launch", "merge_weights"])
def test_the_other_console_scripts_are_commands(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["accelerate-x", "--help"])
    assert getattr(main, name)() == 0
    assert f"accelerate {name.replace('_', '-')}" in capsys.readouterr().out


def test_a_new_command_is_one_file(cli: Run) -> None:
    """Here it is registered for the length of the test, as another package would do it."""

    @click.command(short_help="Says hello.")
    def hello() -> None:
        click.echo("hello")

    with COMMANDS.add("say_hello", hello):
        assert cli("say-hello").out == "hello\n"
        assert "say-hello" in cli("--help").out
        assert "did you mean 'say-hello'?" in cli("sayhello").err


def test_the_list_of_commands_imports_none_of_them() -> None:
    """What a command says of itself is read from the first line of its file: a list is shown at once."""
    code = (
        "import sys; from accelerate.cli import main; code = main.run(['--help']); "
        "print(sorted(n for n in sys.modules if n.startswith('accelerate.cli.'))); "
        "print(tuple(main.COMMANDS.names()))"
    )
    *shown, loaded, files = subprocess.run(
        [sys.executable, "-c", code], check=True, text=True, capture_output=True
    ).stdout.splitlines()
    assert ast.literal_eval(loaded) == ["accelerate.cli.main"]
    for name in ast.literal_eval(files):
        line = next(line for line in shown if line.split()[:1] == [name.replace("_", "-")])
        assert len(line.split()) > 3


# ---------------------------------------------------------------- env


def test_env_tells_what_a_report_needs(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        env, "_ASK_TORCH", 'print(\'{"version": "9.9", "type": "cpu", "count": 0, "names": []}\')'
    )
    monkeypatch.setenv("ACCELERATE_TESTS", "1")
    (tmp_path / "accelerate.yaml").write_text("num_processes: 2")  # nobody named it
    told = dict(re.findall(r"^- `(.+?)`: (.*)$", cli("env").out, re.MULTILINE))
    assert told["accelerate version"] == "2.0.0"
    assert told["PyTorch version"] == "9.9"
    gpus = machine(tmp_path / "gpus", ["dev/nvidia0", "dev/nvidia1"], build={})
    monkeypatch.setattr(env, "DeviceProbeHost", lambda: gpus)
    assert "- `devices of this machine`: 2 cuda\n" in cli("env").out, "also beside a torch for CPUs"
    assert told["configuration file"].startswith("none (looked for ")
    (tmp_path / "job.yaml").write_text("num_processes: 2")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", "job.yaml")
    assert "- `configuration file`: job.yaml\n" in cli("env").out
    assert "ACCELERATE_TESTS=1" in told["ACCELERATE_* variables"]
    assert {"platform", "Python", "numpy version", "system RAM", "accelerate bash location"} <= told.keys()


def test_env_survives_a_torch_that_cannot_be_imported(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_ASK_TORCH", "raise ImportError('libcudart.so is missing')")
    result = cli("env")
    assert result.code == 0
    assert "cannot be imported: ImportError: libcudart.so is missing" in result.out


def test_explain_shows_every_source_of_every_setting(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: the value, where it comes from, and all that it overrides."""
    (tmp_path / "job.yaml").write_text("debug: true\nmixed_precision: fp16\ndynamo_config: {mode: default}")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    lines = cli(
        *("env", "--explain", "--config_file", "job.yaml", "--mixed_precision", "no", "-n", "2"),
        *("train.py", "--lr", "1"),
    ).out.splitlines()
    cells = [re.split(r"\s{2,}", line) for line in lines]
    table = {name: rest for name, *rest in cells}
    assert set(table) == {"setting", *(row.name for row in options.launch_settings())}
    assert table["mixed_precision"] == [
        "no",
        "--mixed_precision",
        "bf16 (the environment variable ACCELERATE_MIXED_PRECISION); "
        "fp16 (job.yaml, line 2: mixed_precision); None (default)",
    ]
    assert table["dynamo_mode"][:2] == ["default", "job.yaml, line 3: dynamo_config.dynamo_mode"]
    assert table["num_machines"] == ["1", "default", "-"]
    assert not [line for line in lines if "\t" in line]
    starts = {line.index(row[1], len(row[0])) for line, row in zip(lines, cells, strict=True)}
    assert len(starts) == 1, "the columns are aligned"


def test_values_on_a_terminal_are_no_markup(
    cli: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    result = cli("env", "--explain", "--gpu_ids", "[bold]0[/]", "--log_dir", "a[/]")
    assert result.code == 0, result.err
    assert "[bold]0[/]" in result.out
    assert "a[/]" in result.out


def test_explain_keeps_secrets(cli: Run) -> None:
    out = cli("env", "--explain", "--aws_secret_access_key", "hidden-word").out
    assert "hidden-word" not in out
    assert re.search(r"^aws_secret_access_key +\*\*\* +--aws_secret_access_key ", out, re.MULTILINE)


# ---------------------------------------------------------------- as functions


def test_the_parser_of_other_launchers_gives_flags_and_an_untouched_script() -> None:
    """F9, by way of the functions that other command lines use."""
    args = [
        "--cpu",
        "--num-processes",
        "2",
        "--mixed_precision=bf16",
        "train.py",
        "--cpu",
        "--",
        "a b",
        "-m",
        '"',
    ]
    namespace = launch_command_parser().parse_args(args)
    assert (namespace.cpu, namespace.num_processes, namespace.mixed_precision) == (True, 2, "bf16")
    assert namespace.training_script == "train.py"
    assert namespace.training_script_args == ["--cpu", "--", "a b", "-m", '"']
    assert namespace.multi_gpu is False
    assert launch_command_parser().parse_args(["-m", "package.train", "-n", "3"]).training_script_args == [
        "-n",
        "3",
    ]
    assert launch_command_parser().parse_args(["--", "--odd.py"]).training_script == "--odd.py"


@pytest.mark.parametrize(
    ("typed", "script_args"),
    [
        (["train.py", "--", "--lr", "1"], ["--lr", "1"]),
        (["-m", "train", "--", "--", "x"], ["--", "x"]),
        (["train.py", "x", "--", "--lr"], ["x", "--", "--lr"]),
        (["--", "train.py", "--", "--lr"], ["--", "--lr"]),
        (["train.py", "--"], []),
    ],
)
def test_a_double_dash_right_behind_the_script_is_not_the_scripts(
    typed: list[str], script_args: list[str], cli: Run
) -> None:
    assert launch_command_parser().parse_args(["--cpu", *typed]).training_script_args == script_args
    Path("train.py").touch()
    result = cli("launch", "--cpu", "--dry-run", *typed)
    script = "train" if "-m" in typed else "train.py"
    assert ["script", script, *script_args] in [line.split() for line in result.out.splitlines()]


def test_the_parser_gives_the_types_and_defaults_of_1_x() -> None:
    """Programs read its namespace: numbers are numbers, switches are False, and a wrong number stays text."""
    defaults = launch_command_parser().parse_args(["x.py"])
    assert (defaults.max_restarts, defaults.monitor_interval, defaults.fsdp_min_num_params) == (0, 0.1, 10**8)
    assert (defaults.fsdp_version, defaults.fsdp_offload_params, defaults.tee) == ("1", "false", "0")
    assert (defaults.use_fsdp, defaults.tpu, defaults.quiet, defaults.num_processes) == (
        False,
        False,
        None,
        None,
    )
    words = (
        "--gradient_clipping 0.5 --fsdp_version 2 --zero_stage 3 --num_machines 1:4 --main_process_port 29"
    )
    words += " --megatron_lm_eod_mask_loss true --fsdp_transformer_layer_cls_to_wrap A -n x"
    words += " --fsdp_transformer_layer_cls_to_wrap B x.py"
    typed = launch_command_parser().parse_args(words.split())
    assert (typed.gradient_clipping, typed.fsdp_version, typed.zero_stage) == (0.5, "2", 3)
    assert (typed.num_machines, typed.main_process_port, typed.num_processes) == ("1:4", 29, "x")
    assert typed.megatron_lm_eod_mask_loss is True
    assert typed.fsdp_transformer_layer_cls_to_wrap == "A,B"
    with pytest.raises(SettingError, match="--num_processes"):
        launch_command(typed)


def test_the_actions_of_the_parser_are_those_of_1_x() -> None:
    """fms-hf-tuning learns from their names which flags have a value, and which may be repeated."""
    switches = (
        "cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation "
        "enable_cpu_affinity fp8_use_autocast_during_eval module multi_gpu no_python quiet same_network tpu "
        "tpu_use_cluster tpu_use_sudo use_deepspeed use_fsdp use_megatron_lm use_parallelism_config"
    )
    actions = {flag: action for action in launch_command_parser()._actions for flag in action.option_strings}
    contract = json.loads(Path("tests/laws/contract.json").read_text())["flags"]["launch"]
    for flag in set(contract) - {"--no_tpu_cluster"}:
        name = "_AppendAction" if flag in ("--env", "--vm") else "_StoreAction"
        expected = "_StoreTrueAction" if actions[flag].dest in switches.split() else name
        assert type(actions[flag]).__name__ == expected, flag


def test_the_parser_can_be_a_command_of_another_parser() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    launch_command_parser(commands)
    env.env_command_parser(commands)
    commands.add_parser("other")
    namespace = parser.parse_args(["launch", "-n", "2", "train.py", "-x"])
    assert (namespace.num_processes, namespace.training_script_args) == (2, ["-x"])
    assert callable(namespace.func)
    assert parser.parse_args(["env"]).func is env.env_command


def test_the_parser_refuses_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        launch_command_parser().parse_args(["--num_proc", "2", "train.py"])
    assert leaving.value.code == 2
    assert "--num_proc" in capsys.readouterr().err


def test_the_function_raises_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"there is no script no\.py"):
        launch_command(launch_command_parser().parse_args(["no.py"]))
    with pytest.raises(SettingError, match="--cpu and --multi_gpu"):
        launch_command(launch_command_parser().parse_args(["--cpu", "--multi_gpu", "no.py"]))
    with pytest.raises(UnknownNameError, match="bf61"):
        launch_command(launch_command_parser().parse_args(["--mixed_precision", "bf61", "no.py"]))


@pytest.mark.parametrize(
    ("module", "usage"),
    [
        ("accelerate_cli", "accelerate [OPTIONS]"), ("config.config", "accelerate config"),
        ("env", "accelerate env"), ("estimate", "accelerate estimate-memory"),
        ("launch", "accelerate launch"), ("merge", "accelerate merge-weights"), ("test", "accelerate test"),
        ("to_fsdp2", "accelerate to-fsdp2"), ("tpu", "accelerate tpu-config"),
    ],
)  # fmt: skip
def test_a_module_of_a_command_runs_it(
    module: str, usage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m accelerate.commands.launch`` stands in configurations of debuggers for 1.x."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, f"accelerate.commands.{module}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"accelerate.commands.{module}", run_name="__main__")
    assert ended.value.code == 0
    assert f"Usage: {usage}" in capsys.readouterr().out
