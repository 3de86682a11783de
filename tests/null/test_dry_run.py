"""The plan that ``--dry_run`` prints, and options without effect: warned about, or refused under --strict."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from accelerate.cli.main import run
from accelerate.core.setting import setting
from accelerate.launch import dry_run
from accelerate.launch.base import LaunchKind, PlannedCommand, display_value
from accelerate.launch.kinds import KINDS
from tests.laws.test_8_no_torch import command as without_torch

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``cli(...)`` runs ``accelerate launch --cpu ...`` in a folder with a script, which does not run."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    monkeypatch.setattr("accelerate.launch.kinds.local.replace_process", lambda *given: None)

    def command(*args: str) -> SimpleNamespace:
        code = run(["launch", "--cpu", *args])
        captured = capfd.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return command


def sections(text: str) -> dict[str, list[list[str]]]:
    """Title -> rows, each cut at two blanks."""
    found: dict[str, list[list[str]]] = {}
    for block in text.strip().split("\n\n"):
        title, *rows = block.splitlines()
        found[title.rstrip(":")] = [re.split(r"  +", row.strip()) for row in rows]
    return found


def starting(parts: dict[str, list[list[str]]], word: str) -> list[list[str]]:
    return next(rows for title, rows in parts.items() if title.startswith(word))


def table(rows: list[list[str]]) -> dict[str, str]:
    return {row[0]: row[1] for row in rows}


def test_the_plan_says_what_would_be_started(cli: Run) -> None:
    result = cli("--dry-run", "-n", "8", "--mixed_precision", "bf16", "train.py", "--lr", "a b", "--")
    assert (result.code, result.err) == (0, "")
    parts = sections(result.out)
    assert table(starting(parts, "A dry run: nothing is started")) == {
        "launch": "this machine",
        "machines": "1",
        "processes": "8",
        "devices": "8 x cpu",
        "strategy": "data parallel",
        "precision": "bf16 (--mixed_precision)",
        "settings": "from no file",
        "script": "train.py --lr 'a b' --",
    }
    ((who, program),) = parts["Commands"]
    assert who == "rank 0 to rank 7"
    assert program.endswith("train.py --lr 'a b' --")
    told = table(starting(parts, "Environment of all"))
    assert told["WORLD_SIZE"] == "8"
    assert told["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert told["MASTER_PORT"] == "a free port"
    own = table(starting(parts, "Environment of each"))
    assert own == {"RANK": "0 to 7", "LOCAL_RANK": "0 to 7", "ROLE_RANK": "0 to 7"}


def test_nothing_is_started_reserved_or_written(cli: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", lambda *given, **options: pytest.fail("a process was started"))
        patch.setattr("socket.socket", lambda *given, **options: pytest.fail("a port was asked for"))
        result = cli("--dry_run", "-n", "2", "--log_dir", "logs", "--tee", "3", "train.py")
    assert result.code == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_every_option_that_was_asked_has_value_origin_effect_and_what_it_overrides(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: the four sources of one setting, in the order in which they win."""
    (tmp_path / "my.yaml").write_text("mixed_precision: fp16\ndebug: true\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    out = cli("--dry_run", "--config_file", "my.yaml", "--mixed_precision", "no", "-n", "2", "train.py").out
    rows = {row[0]: row[1:] for row in sections(out)["What was asked"]}
    assert rows.pop("option") == ["value", "from", "what it does", "instead of"]
    assert set(rows) == {"num_processes", "config_file", "mixed_precision", "use_cpu", "debug"}
    assert rows["mixed_precision"][:2] == ["no", "--mixed_precision"]
    assert rows["mixed_precision"][2].endswith("the script is told ACCELERATE_MIXED_PRECISION=no")
    assert rows["mixed_precision"][3] == (
        "bf16 (the environment variable ACCELERATE_MIXED_PRECISION); fp16 (my.yaml, line 1: mixed_precision)"
    )
    assert rows["debug"][:2] == ["true", "my.yaml, line 2: debug"]
    assert rows["num_processes"] == ["2", "--num_processes", "2 processes"]
    out = cli("--dry_run", "-n", "2", "train.py").out
    assert sections(out)["What was asked"][0] == ["option", "value", "from", "what it does"]


def test_a_file_here_that_nobody_named_is_one_line(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text("services:\n  web: {}\n")
    line = "accelerate.yaml lies here and is not used: --config_file accelerate.yaml uses it"
    result = cli("train.py")
    assert (result.code, result.err) == (0, f"accelerate launch: {line}\n")
    assert cli("-q", "train.py").err == ""
    named = cli("--config_file", "accelerate.yaml", "train.py")
    assert (named.code, "unknown key 'services'" in named.err) == (2, True)


@pytest.mark.parametrize("flags", [["-n", "2"], ["-n", "1"], ["-n", "2", "--max_restarts", "1"]])
def test_one_machine_meets_at_its_own_address(cli: Run, flags: list[str], tmp_path: Path) -> None:
    """An address of another network would have the ranks wait for somebody who listens there."""
    result = cli("--dry-run", *flags, "--main_process_ip", "10.255.0.5", "train.py")
    assert "10.255.0.5" not in re.sub(r"(?s)(Options|Without effect).*", "", result.out)
    assert any(row[0] == "--main_process_ip" for row in sections(result.out)["Without effect"])
    facts = sections(result.out)["A dry run: nothing is started"]
    assert (["restarts", "1"] in facts) == ("--max_restarts" in flags)
    (tmp_path / "job.yaml").write_text("main_process_ip: 127.0.0.1")
    assert "--main_process_ip" not in cli("--config_file", "job.yaml", "--dry-run", *flags, "train.py").err


@pytest.mark.usefixtures("cli")
def test_a_file_that_nobody_named_is_shown(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """F6."""
    default = tmp_path / "home/accelerate/default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("use_cpu: true")
    assert run(["launch", "--dry_run", "train.py"]) == 0
    assert f"from {default} (--config_file names another)" in capfd.readouterr().out


def test_the_strategy_names_the_place_that_asks_for_it(cli: Run, tmp_path: Path) -> None:
    """F3."""
    assert "fsdp (--use_fsdp)" in cli("--dry_run", "-n", "2", "--use_fsdp", "train.py").out
    (tmp_path / "my.yaml").write_text("distributed_type: FSDP")
    out = cli("--dry_run", "--config_file", "my.yaml", "-n", "2", "train.py").out
    assert "fsdp (my.yaml, line 1: distributed_type)" in out
    assert "none: one process" in cli("--dry_run", "train.py").out
    mesh = ("--use_parallelism_config", "--parallelism_config_tp_size", "2")
    facts = sections(cli("--dry_run", "-n", "2", *mesh, "train.py").out)["A dry run: nothing is started"]
    assert table(facts)["strategy"] == "parallelism"


def test_only_variables_that_are_there_are_taken_away(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert "TORCHELASTIC_ERROR_FILE" not in cli("--dry_run", "-n", "2", "train.py").out
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/somewhere")
    told = starting(sections(cli("--dry_run", "-n", "2", "train.py").out), "Environment of all")
    assert ["TORCHELASTIC_ERROR_FILE", "taken away"] in told


def test_a_dry_run_of_what_cannot_be_started_is_the_same_error(cli: Run) -> None:
    result = cli("--dry_run", "no.py")
    assert (result.code, result.out) == (2, "")
    assert "there is no script no.py" in result.err


def test_on_a_terminal_there_are_tables(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "100")
    cli("--dry_run", "-n", "2", "train.py", "[bold]")
    assert "A dry run: nothing is started" in screen.getvalue()
    assert "train.py '[bold]'" in screen.getvalue()  # no markup
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ""),
        (["rank 0"], "rank 0"),
        (["0", "1", "2"], "0, 1, 2"),
        (["0", "1", "2", "3"], "0 to 3"),
        (["8", "9", "10", "11"], "8 to 11"),
        (["0", "2", "4", "6"], "0, 2, 4, 6"),
        (["a", "b", "c", "d"], "a, b, c, d"),
    ],
)
def test_long_lists_of_numbers_are_short(words: list[str], expected: str) -> None:
    assert dry_run._join_names(words) == expected


def test_what_differs_between_commands_is_told_apart() -> None:
    common, own = dry_run.split_common_variables([{"A": 1, "R": 0}, {"A": 1, "R": 1, "B": 2}])
    assert common == {"A": 1}
    assert own == {"R": [0, 1], "B": [None, 2]}
    rows = list(
        dry_run._command_rows(
            [PlannedCommand("a", ("x",)), PlannedCommand("b", ("x",)), PlannedCommand("c", ("y", "z z"))]
        )
    )
    assert rows == [("a, b", "x"), ("c", "y 'z z'")]


def test_secrets_are_not_shown() -> None:
    assert display_value("aws_secret_access_key", "abc") == dry_run._variable_text("HF_TOKEN", "abc") == "***"
    assert display_value("aws_secret_access_key", None) == "None"


def test_a_dry_run_imports_no_torch(tmp_path: Path) -> None:
    """F10."""
    (tmp_path / "train.py").touch()
    assert "processes" in without_torch("launch", "--dry-run", "--cpu", "-n", "2", str(tmp_path / "train.py"))


# ---------------------------------------------------------------- without effect


@dataclass(frozen=True)
class FarSettings:
    """Of a kind of launch that takes nothing here."""

    far_distance: int = setting(0, help="how far away")


class Far(LaunchKind[Any]):
    """A kind of launch with settings of its own."""

    name: ClassVar[str] = "far away"
    settings: ClassVar[tuple[type[Any], ...]] = (FarSettings,)

    def accepts(self, request: Any) -> bool:
        """Never."""
        return False

    def plan(self, request: Any) -> Any:
        """Not called."""
        raise AssertionError

    def run(self, request: Any, plan: Any, *, replace: bool) -> None:
        """Not called."""
        raise AssertionError


IDLE = [
    (["--machine_rank", "0"], "--machine_rank has no effect: there is one machine"),
    (
        ["--main_process_ip", "10.255.0.5"],
        "--main_process_ip has no effect: there is one machine, whose processes meet at 127.0.0.1",
    ),
    (["--role", "x"], "--role has no effect: one process is in no group"),
    (["--cpu", "--gpu_ids", "0"], "--gpu_ids has no effect: the processes run on the CPU"),
    (
        ["--stop_timeout", "5"],
        "--stop_timeout has no effect: the launcher becomes the script, and no process waits for another",
    ),
    (["--main_process_port", "0"], "--main_process_port has no effect: one process listens nowhere"),
    (
        ["--log_dir", "logs", "--tee", "0"],
        "--log_dir has no effect: --tee is 0: nothing is logged",
    ),
]


@pytest.mark.parametrize(("args", "line"), IDLE)
def test_an_option_without_effect_is_one_line_and_an_error_if_asked(
    cli: Run, args: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option is ignored in silence."""
    assert cli(*args, "train.py").err == f"accelerate launch: {line}\n"
    assert cli(*args, "-q", "train.py").err == ""
    strict = cli("--strict", *args, "train.py")
    assert strict.code == 2
    assert strict.err.splitlines()[:2] == [
        f"accelerate launch: {line}",
        "  why: --strict asks for an error",
    ]
    dry = cli("--dry_run", *args, "train.py")
    where, _, why = line.partition(" has no effect: ")
    assert [where, why] in sections(dry.out)["Without effect"]
    assert dry.code == 0
    monkeypatch.setenv("ACCELERATE_STRICT", "1")
    assert cli("--dry_run", *args, "train.py").code == 2


def test_what_has_an_effect_is_not_warned_about(cli: Run) -> None:
    for args in (["-n", "2", "--role", "x"], ["--tee", "3", "--log_dir", "x"], ["--main_process_port", "1"]):
        result = cli("--dry_run", "--strict", *args, "train.py")
        assert (result.code, "Without effect" in result.out) == (0, False)


def test_settings_of_another_kind_of_launch_have_no_effect(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed, said by a variable or by a file; a file that repeats the default asks for nothing."""
    why = "it is for launches of the kind 'far away'; this one is 'this machine'"
    with KINDS.add("far", Far()):
        (tmp_path / "my.yaml").write_text("far_distance: 3\n")
        file = ("--config_file", "my.yaml", "train.py")
        said = cli(*file)
        assert said.err == f"accelerate launch: my.yaml, line 1: far_distance has no effect: {why}\n"
        (tmp_path / "my.yaml").write_text("far_distance: 0\n")
        assert cli("--strict", *file).err == ""
        monkeypatch.setenv("ACCELERATE_FAR_DISTANCE", "4")
        assert f"ACCELERATE_FAR_DISTANCE has no effect: {why}" in cli("train.py").err


def test_a_setting_of_two_other_kinds_of_launch_names_both(cli: Run) -> None:
    said = cli("--rdzv_conf", "join_timeout=30", "train.py").err
    assert "--rdzv_conf has no effect: it is for launches of the kind 'several machines' or" in said


def test_several_are_one_error(cli: Run) -> None:
    error = cli("--strict", "--machine_rank", "0", "--role", "x", "train.py").err
    assert "--machine_rank has no effect: there is one machine" in error
    assert "--role has no effect: one process is in no group" in error
    assert "fix: leave them out" in error


def test_files_of_the_wizard_are_no_reason_to_warn(cli: Run, tmp_path: Path) -> None:
    """They describe every set-up in the same words; what differs from the ordinary asks for something."""
    (tmp_path / "my.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 1\nrdzv_backend: static\nsame_network: true\n"
        "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
    )
    result = cli("--strict", "--config_file", "my.yaml", "train.py")
    assert (result.code, result.err) == (0, "")


def test_leftover_variables_of_a_strategy_that_nobody_asks_for_have_no_effect(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag or a key of it is refused; a variable may have been meant for somebody else."""
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    line = "the environment variable FSDP_STATE_DICT_TYPE has no effect: --use_fsdp is not given"
    assert cli("train.py").err == f"accelerate launch: {line}\n"
    assert cli("-n", "2", "--use_fsdp", "--dry_run", "--strict", "train.py").code == 0


def test_a_terminal_that_cannot_show_a_character_gets_it_written_out(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gr\xf6\xdfe.py").touch()
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert cli("--dry_run", "gr\xf6\xdfe.py").code == 0
    stream.flush()
    assert b"gr\\xf6\\xdfe.py" in stream.buffer.getvalue()  # type: ignore[attr-defined]
