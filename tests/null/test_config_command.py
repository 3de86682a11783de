"""``accelerate config`` without questions: single keys, the basic file, old files; and which file is used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.support.command import launch, run
from tests.support.configs import FORMATS, TRAINERS, unknown_names
from tests.support.launch_plans import default_file, request_of_file

MINE = """\
# how we train
num_processes: 2  # one per socket
distributed_type: FSDP

fsdp_config:
  version: 1  # not yet
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with comments and a short spelling."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ACCELERATE_CONFIG_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(MINE)
    return path


def config(path: Path, *pairs: str) -> int:
    """The exit code of ``accelerate config --config_file PATH --set PAIR ...``."""
    return run(["config", "--config_file", str(path), *(word for pair in pairs for word in ("--set", pair))])


# ---------------------------------------------------------------- single keys


def test_a_key_is_changed_and_everything_else_stays(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config(job, "num_processes=4", "fsdp_config.fsdp_version=2", "mixed_precision=bf16") == 0
    assert job.read_text() == (
        MINE.replace("num_processes: 2", "num_processes: 4").replace("version: 1", "version: 2")
        + "mixed_precision: bf16\n"
    )
    told = capsys.readouterr().out
    assert str(job) in told
    assert "num_processes: 4 (it was 2)" in told
    assert "fsdp_config.fsdp_version: 2 (it was 1)" in told
    assert request_of_file(job).get("fsdp_version") == 2


@pytest.mark.parametrize("key", ["fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version"])
def test_a_nested_key_has_three_spellings(job: Path, key: str) -> None:
    assert config(job, f"{key}=2") == 0
    assert yaml.safe_load(job.read_text())["fsdp_config"] == {"version": 2}


def test_a_file_is_made_where_there_is_none(job: Path) -> None:
    new = job.with_name("folder") / "new.yaml"
    assert config(new, "num_processes=2", "dynamo_backend=inductor", "dynamo_use_dynamic=yes") == 0
    assert yaml.safe_load(new.read_text()) == {
        "num_processes": 2,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True},
    }
    assert run(["config", "--set", "debug=true"]) == 0
    assert yaml.safe_load(default_file().read_text()) == {"debug": True}


@pytest.mark.parametrize("value", ["", "none", "null"])
def test_a_key_is_taken_out(job: Path, value: str) -> None:
    assert config(job, f"fsdp_version={value}", f"num_processes={value}") == 0
    assert yaml.safe_load(job.read_text()) == {"distributed_type": "FSDP"}


@pytest.mark.parametrize(
    ("pair", "what"),
    [
        ("num_proceses=2", "did you mean 'num_processes'?"),
        ("fsdp_config.fsdp_versoin=2", "did you mean 'fsdp_config.fsdp_version'?"),
        ("num_processes=many", "--set num_processes is the text 'many'"),
        ("mixed_precision=bf61", "unknown value 'bf61'"),
        ("fsdp_version=3", "unknown value '3'"),
        ("num_processes", "has no value"),
        ("multi_gpu=true", "unknown key 'multi_gpu'"),
    ],
)
def test_a_mistake_changes_nothing(
    job: Path, capsys: pytest.CaptureFixture[str], pair: str, what: str
) -> None:
    """F5: also the pairs that were right, beside it."""
    assert config(job, "debug=true", pair) == 2
    assert what in capsys.readouterr().err
    assert job.read_text() == MINE


@pytest.mark.parametrize(
    ("pairs", "what"),
    [
        (["machine_rank=3"], "machine_rank is 3"),
        (["num_machines=12"], "num_processes is 2 on 12 machines"),
        (["num_machines=1:2", "num_processes=none", "main_process_ip=h"], "a static rendezvous"),
        (["num_machines=2", "rdzv_conf=often"], "has the part 'often'"),
        (["num_machines=2", "rdzv_endpoint=h:http"], "http is no port"),
        (["mixed_precision=fp8", "fp8_backend=msamp"], "is fp8, which does not train by"),
        (["distributed_type=TPU", "num_machines=2"], "a launch on a TPU"),
        (["distributed_type=DEEPSPEED", "num_machines=1:2"], "DeepSpeed's launcher needs one number"),
        (["mpirun_hostfile=hosts", "log_dir=logs"], "mpirun reads the output"),
    ],
)
def test_a_file_that_a_launch_would_refuse_is_not_written(
    job: Path, capsys: pytest.CaptureFixture[str], pairs: list[str], what: str
) -> None:
    assert config(job, *pairs) == 2
    told = capsys.readouterr().err
    assert what in told
    assert "nothing was written" in told
    assert job.read_text() == MINE
    new = job.with_name("new.yaml")
    assert config(new, "machine_rank=3") == 2
    assert not new.exists()


def test_a_file_that_was_refused_before_stays(job: Path) -> None:
    job.write_text("num_proceses: 2\n")
    assert config(job, "debug=true") == 2
    assert job.read_text() == "num_proceses: 2\n"


def test_what_a_flag_may_add_is_a_note(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config(job, "num_machines=2", "num_processes=4") == 0
    assert yaml.safe_load(job.read_text())["num_machines"] == 2
    assert "need a place to meet" in capsys.readouterr().err
    assert config(job, "main_process_ip=127.0.0.1") == 0
    assert capsys.readouterr().err == ""


def test_old_and_json_files_are_changed_too(job: Path) -> None:
    job.write_text("fp16: true\nnum_processes: 2\n")
    assert config(job, "mixed_precision=bf16") == 0
    assert yaml.safe_load(job.read_text()) == {"num_processes": 2, "mixed_precision": "bf16"}
    other = job.with_name("job.json")
    other.write_text('{"num_processes": 2}')
    assert config(other, "debug=true") == 0
    assert json.loads(other.read_text()) == {"num_processes": 2, "debug": True}


def test_every_key_of_the_wild_is_found() -> None:
    for text in {**FORMATS, **TRAINERS}.values():
        assert [name for name in unknown_names(text) if "gradient_acc" not in name] == []
    assert unknown_names("fsdp_config: 1") == ["fsdp_config"]


def test_a_write_that_fails_leaves_the_old_file(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert config(job, "num_processes=4") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert job.read_text() == MINE
    assert [path.name for path in job.parent.iterdir()] == ["job.yaml"]


def test_permissions_and_links_stay(job: Path) -> None:
    job.chmod(0o600)
    link = job.with_name("link.yaml")
    link.symlink_to(job)
    assert config(link, "debug=true") == 0
    assert link.is_symlink()
    assert job.stat().st_mode & 0o777 == 0o600
    assert "debug: true" in job.read_text()


# ---------------------------------------------------------------- default, update


def test_default_overwrites_nothing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "default", "--config_file", str(job)]) == 0
    assert "exists already" in capsys.readouterr().out
    assert job.read_text() == MINE
    assert run(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert capsys.readouterr().out == f"accelerate configuration saved at {default_file()}\n"
    assert json.loads(default_file().read_text())["mixed_precision"] == "bf16"
    assert run(["config", "default", "--mixed_precision", "fp8"]) == 2


@pytest.mark.parametrize("name", sorted({*FORMATS, *TRAINERS} - {"json"}))
def test_update_keeps_what_a_file_says(job: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = (FORMATS | TRAINERS)[name]
    job.write_text(text)
    before = request_of_file(job)
    assert run(["config", "update", "--config_file", str(job)]) == 0
    assert job.with_name("job.yaml.bak").read_text() == text
    after = request_of_file(job)
    names = [name for loaded in before.loaded.values() for name in loaded.origins]
    filled = {"mixed_precision": "no", "num_processes": 1}  # said now, and so before
    different = {
        name: after.get(name)
        for name in names
        if (after.get(name) or None) != (before.get(name) or filled.get(name) or None)
        and (after.get(name), before.get(name)) != (None, None)
    }
    assert different == {}
    capsys.readouterr()
    assert run(["config", "update", "--config_file", str(job)]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert not job.with_name("job.yaml.bak1").exists()


def test_update_writes_todays_keys_and_types(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(
        "fp8_config: {amax_history_length: 16}\n"
        "distributed_type: NO\nfp16: true\ndynamo_backend: EAGER\ndowncast_bf16: 'no'\ndeepspeed_config: {}\n"
    )
    assert run(["config", "update", "--config_file", str(job)]) == 0
    assert yaml.safe_load(job.read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": False,
        "dynamo_config": {"dynamo_backend": "EAGER"},
        "enable_cpu_affinity": False,
        "fp8_config": {"fp8_amax_history_len": 16},
        "mixed_precision": "fp16",
        "num_processes": 1,
        "use_cpu": False,
    }
    told = capsys.readouterr().out
    assert "fp16: taken out (it was True)" in told
    job.write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_PRE}\n"
        "machine_rank: '0'\n"
    )
    assert run(["config", "update", "--config_file", str(job)]) == 0
    assert yaml.safe_load(job.read_text())["fsdp_config"] == {"fsdp_backward_prefetch": "BACKWARD_PRE"}
    assert yaml.safe_load(job.read_text())["machine_rank"] == 0
    job.write_text("distributed_type: FSDP\nfsdp_config: {version: 2}\nnum_proceses: 2\n")
    assert run(["config", "update", "--config_file", str(job)]) == 2
    assert "num_proceses" in job.read_text()


# ---------------------------------------------------------------- which file is used

SEES = "import os; print('precision', os.environ.get('ACCELERATE_MIXED_PRECISION'))"


def test_a_file_that_nobody_named_is_announced_in_one_line(tmp_path: Path) -> None:
    """F6: from the cache; a named file wins and needs no line."""
    home = tmp_path / "home" / "accelerate"
    home.mkdir(parents=True)
    (home / "default_config.yaml").write_text("mixed_precision: bf16\nuse_cpu: true\n")
    env = {"HF_HOME": str(home.parent)}
    script = tmp_path / "script.py"
    script.write_text(SEES)

    def run_it(*args: str) -> tuple[str, list[str]]:
        done = launch(*args, path=script, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.output
        return done.stdout.strip(), [line for line in done.stderr.splitlines() if "settings from" in line]

    value, lines = run_it()
    assert value == "precision bf16"
    assert len(lines) == 1
    assert str(home / "default_config.yaml") in lines[0]
    (tmp_path / "named.yaml").write_text("use_cpu: true\n")
    assert run_it("--config_file", "named.yaml") == ("precision None", [])


def test_a_plain_script_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: ``python script.py`` has what its code and the environment say, whatever lies around."""
    from accelerate import Accelerator

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "accelerate.yaml", default_file()):
        place.parent.mkdir(exist_ok=True)
        place.write_text("mixed_precision: bf16\ngradient_accumulation_steps: 7\n")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    assert os.environ.get("ACCELERATE_MIXED_PRECISION") is None
