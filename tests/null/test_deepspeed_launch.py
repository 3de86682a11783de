"""DeepSpeed's own launcher for several machines: its command, and the file of variables it hands on.

A program of its name stands on the path and writes down how it was called.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from accelerate.core.errors import MissingExtraError, SettingError
from tests.support import launch_plans
from tests.support.command import CONSOLE, Running, launch

FAKE = """\
#!{python}
import json, os, sys
path = os.environ.get("DS_ENV_FILE", "")
said = {{
    "argv": sys.argv[1:],
    "file": open(path).read() if os.path.isfile(path) else None,
    "path": path,
    "stage": os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"),
    "use": os.environ.get("ACCELERATE_USE_DEEPSPEED"),
    "python": os.environ.get("PYTHONPATH"),
}}
print(json.dumps(said), flush=True)
{ending}
"""


def fake(folder: Path, ending: str = "") -> Path:
    """A program that says how it was called."""
    program = folder / "bin" / "deepspeed"
    program.parent.mkdir(exist_ok=True)
    program.write_text(FAKE.format(python=sys.executable, ending=ending))
    program.chmod(0o755)
    return program


@pytest.fixture
def asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``asks(file=..., **flags)`` is a request for two machines of DeepSpeed."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{fake(tmp_path).parent}:{os.defpath}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("# ours\nworker-0 slots=4\n\nworker-1 slots=4\n")

    def request(file: str = "", program: tuple[str, ...] = ("train.py", "--lr", "1"), **flags: Any) -> Any:
        if file:
            (tmp_path / "job.yaml").write_text(file)
            flags["config_file"] = "job.yaml"
        engine = {"use_deepspeed": True, "num_machines": "2", "deepspeed_hostfile": "hosts"}
        return launch_plans.request(program, **{**engine, **flags})

    return request


def command(request: Any) -> list[str]:
    launch_plans.check(request)
    (start,) = launch_plans.plan(request, "deepspeed").commands
    assert start.program[0].endswith("/bin/deepspeed")
    return list(start.program[1:])


# ---------------------------------------------------------------- whose job it is


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ({}, True),
        ({"deepspeed_multinode_launcher": "PDSH"}, True),
        ({"deepspeed_multinode_launcher": "standard"}, False),
        ({"num_machines": "1"}, False),
        ({"use_deepspeed": None, "file": "distributed_type: DEEPSPEED"}, True),
        ({"use_deepspeed": None, "deepspeed_hostfile": None, "use_fsdp": True}, False),
    ],
)
def test_it_takes_jobs_of_deepspeed_on_several_machines(asks: Any, flags: Any, takes: bool) -> None:
    """The default launcher is that of 1.15; ``standard`` starts this launcher on each machine."""
    assert launch_plans.kind_named("deepspeed").accepts(asks(**flags)) is takes


def test_its_options_on_one_machine_are_said_to_do_nothing(
    asks: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """F15."""
    (Path.cwd() / "train.py").write_text("print('runs')")
    launch_plans.start(asks(num_machines="1", use_cpu=True, program=("train.py",)))
    found = capfd.readouterr()
    assert found.out == "runs\n"
    assert "--deepspeed_hostfile has no effect: it is for launches of the kind" in found.err


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--hostfile hosts --no_local_rank --launcher pdsh --num_nodes 2 train.py --lr 1"),
        (
            {"num_processes": "4", "main_process_ip": "10.0.0.1", "main_process_port": "1234"},
            "--hostfile hosts --no_local_rank --launcher pdsh --num_nodes 2 --num_gpus 2 "
            "--master_addr 10.0.0.1 --master_port 1234 train.py --lr 1",
        ),
        (
            {"deepspeed_multinode_launcher": "openmpi", "main_process_ip": "10.0.0.1"},
            "--hostfile hosts --no_local_rank --launcher openmpi --master_addr 10.0.0.1 train.py --lr 1",
        ),
        (
            {"deepspeed_multinode_launcher": "nossh", "machine_rank": "1", "main_process_ip": "10.0.0.1"},
            "--hostfile hosts --no_local_rank --no_ssh --node_rank 1 --num_nodes 2 --master_addr 10.0.0.1 "
            "train.py --lr 1",
        ),
        (
            {"deepspeed_exclusion_filter": "worker-1:0", "module": True},
            "--hostfile hosts --no_local_rank --launcher pdsh --exclude worker-1:0 --module train.py --lr 1",
        ),
        (
            {"deepspeed_inclusion_filter": "worker-0@worker-1:0,2", "no_python": True},
            "--hostfile hosts --no_local_rank --launcher pdsh --include worker-0@worker-1:0,2 --no_python "
            "train.py --lr 1",
        ),
    ],
)
def test_the_command(asks: Any, flags: Any, words: str) -> None:
    """Arguments of the script come last and untouched (F9), and it gets no ``--local_rank`` among them."""
    assert command(asks(**flags)) == words.split()


@pytest.mark.parametrize("name", ["openmpi", "mvapich", "mpich", "impi"])
def test_the_launchers_of_mpi_take_the_command(asks: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start all slots of the hostfile, and refuse numbers and filters."""
    runner = pytest.importorskip("deepspeed.launcher.runner")
    request = asks(deepspeed_multinode_launcher=name, main_process_ip="a", num_processes="8")
    args = runner.parse_args(command(request))
    kinds = {
        "openmpi": "OpenMPIRunner",
        "mvapich": "MVAPICHRunner",
        "mpich": "MPICHRunner",
        "impi": "IMPIRunner",
    }
    kind = getattr(runner, kinds[name])
    monkeypatch.setattr(kind, "add_export", lambda *_: None)  # MVAPICH's writes a file
    kind(args, "", {"worker-0": 4, "worker-1": 4})  # it checks its arguments


def test_tasks_of_slurm_hear_where_the_first_is(asks: Any) -> None:
    request = asks(deepspeed_multinode_launcher="slurm", main_process_ip="a", main_process_port="1234")
    variables = launch_plans.plan(request, "deepspeed").variables
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("a", "1234")


def test_ranks_of_mpi_hear_where_the_first_is(asks: Any, capfd: pytest.CaptureFixture[str]) -> None:
    run(asks(deepspeed_multinode_launcher="mpich", main_process_ip="10.0.0.1", main_process_port="1234"))
    lines = said(capfd)["file"].splitlines()
    assert {"MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234"} <= set(lines)


def test_words_with_blanks_stay_whole(asks: Any) -> None:
    assert command(asks(program=("train.py", "--name", "a b", "--")))[-4:] == [
        "train.py",
        "--name",
        "a b",
        "--",
    ]


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"deepspeed_hostfile": None}, ["the hostfile is /job/hostfile (the default)", "cannot be read"]),
        ({"deepspeed_hostfile": "host"}, ["--deepspeed_hostfile is host", "cannot be read"]),
        (
            {"num_machines": "3"},
            ["--num_machines is 3", "--deepspeed_hostfile is hosts, which has 2 machines"],
        ),
        ({"num_machines": "1:2"}, ["--num_machines is 1:2", "needs one number"]),
        ({"num_processes": "3"}, ["--num_processes is 3 on 2 machines"]),
        ({"machine_rank": "1"}, ["--machine_rank is 1", "starts all machines from one"]),
        ({"deepspeed_multinode_launcher": "nossh"}, ["launcher is nossh", "where rank 0 is"]),
        ({"deepspeed_multinode_launcher": "mpich"}, ["launcher is mpich", "where rank 0 is"]),
        ({"deepspeed_multinode_launcher": "slurm", "module": True}, ["--module", "which is slurm"]),
        (
            {"deepspeed_multinode_launcher": "mpich", "deepspeed_inclusion_filter": "a"},
            ["--deepspeed_inclusion_filter", "which is mpich"],
        ),
        (
            {"deepspeed_multinode_launcher": "mpich", "main_process_ip": "a", "num_processes": "4"},
            ["whose slots are 4, 4", "2 machines of 2 processes each"],
        ),
        (
            {"deepspeed_inclusion_filter": "a", "deepspeed_exclusion_filter": "b"},
            ["--deepspeed_inclusion_filter and --deepspeed_exclusion_filter"],
        ),
        (
            {"deepspeed_inclusion_filter": "a", "num_processes": "2"},
            ["--deepspeed_inclusion_filter and --num_processes"],
        ),
    ],
)
def test_what_does_not_fit_names_both_places(asks: Any, flags: Any, words: list[str]) -> None:
    """A hostfile that is not there would make DeepSpeed's launcher train on this machine alone."""
    request = asks(**flags)
    with pytest.raises(SettingError) as error:
        launch_plans.kind_named("deepspeed").plan(request)
    assert [word for word in words if word not in error.value.what] == []
    assert error.value.why or error.value.fix


def test_without_deepspeed_its_package_is_named(asks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asks()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(MissingExtraError, match="'deepspeed'") as error:
        launch_plans.kind_named("deepspeed").plan(request)
    assert error.value.fix == "pip install deepspeed"


def test_its_launcher_may_lie_beside_python(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment that is not activated is not on the PATH."""
    request, program = asks(), fake(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    assert launch_plans.kind_named("deepspeed").plan(request).commands[0].program[0] == str(program)


# ---------------------------------------------------------------- what is handed on


def said(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def run(request: Any) -> None:
    launch_plans.start(request)


def test_variables_reach_other_machines_in_a_file(
    asks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And only those: 1.15 writes the whole environment, secrets too, into a file that stays."""
    run(asks(zero_stage="2", mixed_precision="bf16"))
    found = said(capfd)
    lines = [line for line in found["file"].splitlines() if not line.startswith("ACCELERATE_ASKED=")]
    assert lines == [
        "ACCELERATE_MIXED_PRECISION=bf16",
        "ACCELERATE_USE_DEEPSPEED=true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE=2",
        "ACCELERATE_CONFIG_DS_FIELDS=",
        f"PYTHONPATH={tmp_path}",
    ]
    assert (found["stage"], found["use"], found["python"]) == ("2", "true", str(tmp_path))
    assert not Path(found["path"]).exists()
    assert not (tmp_path / ".deepspeed_env").exists()


REPORT = """
from accelerate.facade.option_report import _parse_launched
import json, os
print(json.dumps([_parse_launched(os.environ[name]) for name in ("BY_SHELL", "BY_MPI")]))
"""


def test_requested_options_reach_other_machines_as_deepspeed_hands_them_on(
    asks: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each process reports them: through the shell of pdsh, and to MPI without one."""
    from deepspeed.launcher.multinode_runner import MultiNodeRunner

    capfd.readouterr()  # what the import says
    run(asks(zero_stage="2", file="mixed_precision: bf16\n"))
    runner: Any = types.SimpleNamespace(exports={})
    for line in said(capfd)["file"].splitlines():
        MultiNodeRunner.add_export(runner, *line.split("=", maxsplit=1))
    name = "ACCELERATE_ASKED"
    by_shell = subprocess.check_output(["sh", "-c", f"export {name}={runner.exports[name]}; printenv {name}"])
    values = {"BY_SHELL": by_shell.decode().strip(), "BY_MPI": runner.exports[name].strip()}
    told = subprocess.check_output([sys.executable, "-c", REPORT], env={**os.environ, **values})
    answers = json.loads(told)
    assert answers[0] == answers[1]
    assert answers[0]["zero_stage"] == ["--zero_stage", 2]
    assert answers[0]["mixed_precision"][1] == "bf16"
    assert "job.yaml" in answers[0]["mixed_precision"][0]


@pytest.mark.parametrize("named", [None, "mine.env"])
def test_the_users_own_file_is_kept_and_counts(
    asks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    named: str | None,
) -> None:
    file = tmp_path / (named or ".deepspeed_env")
    if named:
        monkeypatch.setenv("DS_ENV_FILE", named)
    text = "NCCL_DEBUG=INFO\n\nACCELERATE_DEEPSPEED_ZERO_STAGE=1\n"
    file.write_text(text)
    run(asks(zero_stage="2"))
    lines = said(capfd)["file"].splitlines()
    assert lines[0] == "NCCL_DEBUG=INFO"
    assert [line for line in lines if "ZERO_STAGE" in line] == ["ACCELERATE_DEEPSPEED_ZERO_STAGE=2"]
    assert "" not in lines
    assert file.read_text() == text


def test_a_scheduler_hands_on_the_environment_itself(asks: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Its option for variables would cut values at commas."""
    run(asks(deepspeed_multinode_launcher="slurm", zero_stage="2"))
    found = said(capfd)
    assert (found["file"], found["stage"]) == (None, "2")


def test_how_it_failed_is_how_the_launch_failed(asks: Any, tmp_path: Path) -> None:
    """F8."""
    fake(tmp_path, "sys.exit(7)")
    with launch_plans.a_rank_fails(r"the command deepspeed failed \(exit code 7\)") as error:
        run(asks())
    assert error.value.code == 7


def test_a_signal_goes_on_to_it(tmp_path: Path) -> None:
    """F8: DeepSpeed's launcher stops its processes on other machines when it is asked to stop."""
    ending = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('asked', flush=True), sys.exit(1)))\n"
    )
    fake(tmp_path, f"{ending}print('ready', flush=True)\nsignal.pause()")
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "train.py").touch()
    flags = ("--use_deepspeed", "--num_machines", "2", "--deepspeed_hostfile", "hosts", "train.py")
    running = Running(
        (*CONSOLE, "launch", *flags), env={"PATH": f"{tmp_path}/bin:{os.defpath}"}, cwd=tmp_path
    )
    running.wait_for("ready")
    running.signal(signal.SIGTERM)
    ended = running.wait()
    assert "asked" in ended.stdout, ended.output
    assert ended.returncode == 128 + signal.SIGTERM, ended.output
    assert not ended.survivors()


def test_a_dry_run_shows_the_command_and_starts_nothing(tmp_path: Path) -> None:
    fake(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    ended = launch(
        *(
            "--dry_run",
            "--use_deepspeed",
            "--num_machines",
            "2",
            "--deepspeed_hostfile",
            str(tmp_path / "hosts"),
        ),
        env={"PATH": f"{tmp_path}/bin:{os.defpath}"},
        script_text="print('started')",
    )
    assert ended.returncode == 0, ended.output
    assert "--launcher pdsh --num_nodes 2" in ended.stdout, ended.output
    assert "ACCELERATE_USE_DEEPSPEED" in ended.stdout
    assert "argv" not in ended.stdout
