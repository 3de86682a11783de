"""A launch on Ray as far as it goes without Ray: its plan, and what is refused. `make test-ray` launches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import accelerate.ray
from tests.support.command import run
from tests.support.ray_streams import FakeWorker, RayMachine, attempt, ended, fake_ray

__all__ = ["fake_ray"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')")
    return "train.py"


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.launch.ray_job.is_installed", lambda name: False)


def test_the_plan_names_what_each_machine_runs(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--ray", "-n", "4", "--ray_resources", "CPU=4,GPU=1", "--use_fsdp", "--fsdp_version", "2"]
    more = ["--mixed_precision", "bf16", "--max_restarts", "2", "--ray_address", "head:6379"]
    assert run(["launch", "--dry-run", *given, *more, script, "--lr", "1"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    for text in ("Ray", "head:6379", "CPU=4, GPU=1", "PACK", "--mixed_precision bf16", "--max_restarts 2"):
        assert text in out
    # Who places the processes is not told where to.
    command = out[out.index("accelerate launch") :]
    assert "--ray" not in command.partition("train.py")[0]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ray_resources", "four"], "--ray_resources has the part 'four', which names no resource"),
        (["--tpu"], "--ray and --tpu do not go together"),
        (["--print_manifest", "jobset"], "--ray and --print_manifest do not go together"),
        (["--strict", "--num_machines", "2"], "--num_machines has no effect: Ray places the processes"),
        (["--strict", "--gpu_ids", "0"], "--gpu_ids has no effect: Ray places the processes"),
    ],
)
def test_what_does_not_go_with_ray(
    script: str, flags: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--ray", *flags, script]) == 2
    assert text in capfd.readouterr().err


def test_without_ray_one_line_says_what_to_install(
    script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without_ray(monkeypatch)
    assert run(["launch", "--ray", "-n", "2", script]) == 2
    err = capfd.readouterr().err
    assert "a launch on Ray needs the package 'ray'" in err
    assert "pip install ray" in err
    assert "Traceback" not in err
    with pytest.raises(ImportError, match="'ray'"):
        accelerate.ray.launch(print, num_workers=2)


def test_the_launcher_of_a_machine_leaves_its_error_to_the_one_around_it(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_ERROR_FILE", str(tmp_path / "error"))
    assert run(["launch", "--cpu", "--multi_gpu", script]) == 2
    assert capfd.readouterr().err == ""
    error = json.loads((tmp_path / "error").read_text())
    assert (error["what"], error["code"]) == ("--cpu and --multi_gpu do not go together", 2)


def test_a_ray_option_without_ray_has_no_effect(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--dry-run", "--ray_address", "head:6379", script]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "it is for launches of the kind 'Ray'; this one is 'this machine'" in out


# --- the launchers of several machines, with a fake of Ray's streams


def test_machines_are_numbered_and_see_the_devices_of_all_their_workers(
    fake_ray: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    first = FakeWorker({"output": [(1, b"hello\n"), (2, b"a warning\n")]}, ended(0))
    second = FakeWorker(ended(0))
    machines = [
        RayMachine("10.0.0.1", workers=[first, None], visible={"CUDA_VISIBLE_DEVICES": ["0", "2"]}),
        RayMachine("10.0.0.2", workers=[second], visible={"CUDA_VISIBLE_DEVICES": ["1"]}),
    ]
    assert attempt(machines).error() is None
    for number, (worker, count, devices) in enumerate(((first, "2", "0,2"), (second, "1", "1"))):
        flags, program, variables, _ = worker.calls[0]
        pairs = dict(zip(flags[:-1:2], flags[1::2], strict=True))
        assert pairs == {
            "--nproc_per_node": count,
            "--num_machines": "2",
            "--machine_rank": str(number),
            "--main_process_ip": "10.0.0.1",
            "--main_process_port": "4711",
        }
        assert (flags[-1], program) == ("--cpu", ("train.py",))
        assert variables == {"CUDA_VISIBLE_DEVICES": devices}
    out, err = capfd.readouterr()
    assert (out, err) == ("hello\n", "a warning\n")


def test_the_error_of_all_machines_is_said_once(fake_ray: type[Exception]) -> None:
    what = {"what": "rank 1 of 2 failed", "why": "", "fix": "", "code": 3, "others": [], "traceback": "boom"}
    quiet = {**what, "traceback": ""}
    machines = [
        RayMachine("10.0.0.1", workers=[FakeWorker(ended(3, **quiet))]),
        RayMachine("10.0.0.2", workers=[FakeWorker(ended(3, **what))]),
    ]
    error = attempt(machines).error()
    assert error is not None
    assert (error.what, error.code, error.traceback) == ("rank 1 of 2 failed", 3, "boom")


def test_a_lost_machine_stops_the_others(fake_ray: type[Exception]) -> None:
    lost = FakeWorker(fake_ray("The actor died: its node has died.\nmore"))
    other = FakeWorker(ended(1, what="machine 0 is lost"))
    machines = [RayMachine("10.0.0.1", workers=[lost]), RayMachine("10.0.0.2", workers=[other])]
    error = attempt(machines).error()
    assert error is not None
    assert error.what == "machine 0 (10.0.0.1) has left the Ray cluster"
    assert error.why == "The actor died: its node has died."
    assert other.calls[1:] == [15]


def test_signals_go_on_to_all_launchers(fake_ray: type[Exception]) -> None:
    workers = [FakeWorker(ended(130, what="stopped by Ctrl-C", code=130)) for _ in range(2)]
    error = attempt(
        [RayMachine(f"10.0.0.{n}", workers=[w]) for n, w in enumerate(workers)], 2, 10, 17
    ).error()
    assert [worker.calls[1:] for worker in workers] == [[2, 10]] * 2
    assert error is not None
    assert (error.what, error.code) == ("stopped by Ctrl-C", 130)
