"""What a plan says is what the ranks of a real launch are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_deepspeed_cmd_env
from tests.support.command import Running, launch
from tests.support.environment import clean

TELL = """
import json, os, sys
sys.stdout.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
"""
ARGS = ["--cpu", "-n", "2", "--mixed_precision", "bf16", "--gradient_accumulation_steps", "4"]


def environment_of_all(text: str) -> dict[str, str]:
    """The shared part of a printed plan."""
    block = next(part for part in text.split("\n\n") if part.startswith("Environment of all"))
    return dict(line.split(maxsplit=1) for line in block.splitlines()[1:])  # type: ignore[misc]


def test_a_dry_run_shows_what_the_ranks_are_told() -> None:
    """All that ranks are told beyond the launcher's own environment is in the plan, and nothing else."""
    script_args = ["--lr", "a 'b", "--"]
    dry = launch(*ARGS, "--dry-run", script_text=TELL, script_args=script_args)
    assert dry.returncode == 0, dry.output
    real = launch(*ARGS, script_text=TELL, script_args=script_args)
    assert real.returncode == 0, real.output
    told = [json.loads(line) for line in real.stdout.splitlines()]
    shared = environment_of_all(dry.stdout)
    free = {
        "MASTER_PORT": "a free port",
        "TORCHELASTIC_RUN_ID": "a new name",
        "ACCELERATE_ASKED": "what was asked, as listed below",
    }
    assert {name: shared[name] for name in free} == free
    own = {"RANK", "LOCAL_RANK", "ROLE_RANK"}
    for args, env in told:
        assert args == script_args
        new = env.keys() - clean({}).keys() - {"ACCELERATE_TESTS_MARK", "PYTHONFAULTHANDLER", "HF_HOME"}
        internal = {"ACCELERATE_STOP_FOLDER", "ACCELERATE_OUTER_LAUNCH"}
        assert {name for name in new if not name.startswith("__")} - internal == {*shared, *own}
        assert {name: env[name] for name in shared if name not in free} == {
            name: value for name, value in shared.items() if name not in free
        }
    assert sorted(env["RANK"] for _, env in told) == ["0", "1"]


def test_the_one_command_of_a_plan_runs_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun is another launcher, and our part of the environment reaches its ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TELL)
    args = launch_command_parser().parse_args([*ARGS, "train.py", "a b"])
    command, env = prepare_deepspeed_cmd_env(args)
    done = Running(command, env={**env, "OMP_NUM_THREADS": "1"}, cwd=tmp_path).wait()
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [args for args, _ in told] == [["a b"], ["a b"]], done.output
    ranks = sorted((env["RANK"], env["ACCELERATE_MIXED_PRECISION"]) for _, env in told)
    assert ranks == [("0", "bf16"), ("1", "bf16")]
