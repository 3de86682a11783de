"""F16: what a scheduler around the launcher says of the job, from nothing but the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.core.errors import LaunchError, SettingError, WorldError
from accelerate.launch.config_files import ConfigFile, read_config
from accelerate.launch.job_scheduler import JobSchedulerContext, detect_scheduler, overridden_lines
from accelerate.launch.kinds import scheduled_rank
from accelerate.launch.launch_request import JobSettings, LaunchRequest, build_request
from accelerate.launch.launcher import choose_kind
from accelerate.world.clusters import TASK_VARIABLE, detect, find_scheduler
from tests.support.launchers import RECORDED, environments

POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "none",
}
EACH = "srun -N2 --ntasks-per-node=1"


def asked(env: dict[str, str], file: ConfigFile | None = None, **flags: Any) -> LaunchRequest:
    """What a launcher of a CPU script reads in this environment."""
    return build_request(file, {"use_cpu": True, **flags}, ("train.py",), SCRIPT_SETTINGS, env)


def found(env: dict[str, str]) -> JobSchedulerContext:
    result = detect_scheduler(env)
    assert result is not None
    return result


def origin(request: LaunchRequest, name: str) -> tuple[Any, str, str]:
    winner = request.origin(name)
    return winner.value, winner.source, winner.where


def test_a_launcher_that_was_started_alone() -> None:
    alone = ["srun -N1 -n1", "salloc -N2 -n4", "sbatch -N2 -n4", "interactive step of salloc -N2 -n4"]
    assert [detect_scheduler(env) for command in alone for env in environments(command)] == [None] * 4
    assert detect_scheduler({}) is None
    assert detect_scheduler({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}) is None


@pytest.mark.parametrize("command", list(RECORDED))
def test_who_is_a_rank(command: str) -> None:
    """More processes than machines: each is a rank. One on each of several: a machine."""
    for env in environments(command):
        told = detect_scheduler(env)
        assert told is None or told.is_rank == (command != EACH)


def test_every_value_names_the_variable_that_said_it() -> None:
    request = asked(environments("srun -N2 -n4")[2])
    assert origin(request, "num_machines") == (2, "scheduler", "SLURM_STEP_NUM_NODES")
    assert origin(request, "machine_rank") == (1, "scheduler", "SLURM_NODEID")
    assert origin(request, "num_processes") == (4, "scheduler", "SLURM_STEP_NUM_TASKS")
    assert origin(request, "main_process_ip") == ("n1", "scheduler", "SLURM_STEP_NODELIST")
    assert origin(request, "main_process_port") == (29508, "scheduler", "SLURM_JOB_ID")


def test_who_wins(tmp_path: Path) -> None:
    """F4, F16: flag > variable > scheduler > file, and a port that is only derived loses to the file."""
    (tmp_path / "a.yaml").write_text("machine_rank: 0\nmain_process_ip: old\nmain_process_port: 29600\n")
    file, env = read_config(tmp_path / "a.yaml"), environments(EACH)[1]
    request = asked({**env, "ACCELERATE_MAIN_PROCESS_IP": "mine"}, file, num_machines="2")
    assert origin(request, "num_machines")[1] == "flag"
    assert origin(request, "main_process_ip")[:2] == ("mine", "environment")
    assert origin(request, "machine_rank") == (1, "scheduler", "SLURM_NODEID")
    assert origin(request, "main_process_port")[:2] == (29600, "file")
    told = asked({**env, "MASTER_PORT": "23"}, file)
    assert origin(told, "main_process_port") == (23, "scheduler", "MASTER_PORT"), "somebody has said this one"


def test_a_copied_file_is_overruled_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("num_machines: 2\nmachine_rank: 0\n")
    request = asked(environments(EACH)[1], read_config(path))
    assert request.scheduler is not None
    assert overridden_lines(request.scheduler, request.loaded[JobSettings].origins) == (
        f"machine 1 of 2, from SLURM_NODEID ({path}, line 2 says 0)",
    )


# --- a rank, or a launcher of its machine


@pytest.mark.parametrize(
    ("env", "flags", "is_rank"),
    [
        (environments("srun -N2 -n4")[3], {}, True),
        (environments("srun -N1 -n1 : -N1 -n2")[0], {}, True),
        (environments("mpirun (MPICH) -np 2")[1], {}, True),
        (TORCHRUN, {}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, {}, True),
        (environments(EACH)[1], {}, True),
        (environments(EACH)[1], {"num_processes": "2"}, True),
        (environments(EACH)[1], {"num_processes": "4"}, False),
        (environments(EACH)[1], {"nproc_per_node": "2"}, False),
        (environments(EACH)[1], {"max_restarts": "1"}, False),
        (environments(EACH)[1], {"num_machines": "1", "machine_rank": "0"}, False),
        (POD, {}, True),
        (POD, {"num_processes": "6"}, False),
    ],
)
def test_the_rule(env: dict[str, str], flags: dict[str, Any], is_rank: bool) -> None:
    kind = choose_kind(asked(env, **flags))
    assert (kind is scheduled_rank.PLUGIN) == is_rank


def test_the_scheduler_tells_the_launcher_of_a_machine_its_place() -> None:
    request = asked(environments(EACH)[1], num_processes="4")
    assert request.machines == (2, 2)
    assert request.local_processes.value == 2
    assert (request.settings.machine_rank, request.settings.main_process_ip) == (1, "n1")


def test_a_pod_is_a_machine_whoever_runs_the_cluster() -> None:
    for env in (POD, {name: value for name, value in POD.items() if name != "KUBERNETES_SERVICE_HOST"}):
        request = asked(env, num_processes="6")
        assert request.machines == (3, 3)
        assert origin(request, "num_machines") == (3, "scheduler", "WORLD_SIZE")
        assert origin(request, "machine_rank") == (2, "scheduler", "RANK")
        assert origin(request, "main_process_ip") == ("job-master-0", "scheduler", "MASTER_ADDR")


LEFT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_a_loopback_address_is_no_job_of_several_machines(address: str) -> None:
    """The launcher waited for another machine that nobody had started."""
    request = asked({**LEFT, "MASTER_ADDR": address}, num_processes="2")
    assert (request.scheduler, request.machines, request.get("machine_rank")) == (None, (1, 1), 0)
    (note,) = request.notes
    assert note.startswith("RANK=1 and WORLD_SIZE=2 of the environment are not used")


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({}, {"num_machines": "2"}),
        ({}, {"main_process_ip": "head"}),
        ({"ACCELERATE_NUM_MACHINES": "2"}, {}),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, {}),
        ({"NODE_RANK": "1"}, {}),
        ({"NNODES": "2"}, {}),
        ({"MASTER_ADDR": "node1"}, {}),
    ],
)
def test_machines_that_somebody_counts_are_several(env: dict[str, str], flags: dict[str, Any]) -> None:
    request = asked({**LEFT, "MASTER_ADDR": "localhost", **env}, **flags)
    assert (request.machines, request.get("machine_rank"), request.notes) == ((2, 2), 1, ())


@pytest.mark.parametrize(
    "env",
    [
        environments(EACH)[1],
        {**LEFT, "MASTER_ADDR": "node1"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head"},
    ],
)
def test_one_machine_that_is_typed_is_a_job_of_its_own(env: dict[str, str]) -> None:
    """One launcher on each machine, of which each trains for itself."""
    request = asked(env, num_machines="1", num_processes="2")
    assert (request.scheduler, request.machines, request.get("machine_rank")) == (None, (1, 1), 0)
    assert "--num_machines is 1: a job of its own" in request.notes[0]
    assert choose_kind(request) is not scheduled_rank.PLUGIN


def test_a_launcher_that_a_task_has_started_is_a_job_of_its_own() -> None:
    """A script under torchrun and srun starts a launch, and has taken torchrun's variables from it."""
    env = environments(EACH)[1]
    scheduler = find_scheduler(env)
    assert scheduler is not None
    request = asked({**env, TASK_VARIABLE: f"1 {scheduler.task}"}, num_processes="2")
    assert (request.scheduler, request.machines, request.get("machine_rank")) == (None, (1, 1), 0)
    assert request.notes == ("started by a task of a scheduler, and no task itself: a job of its own",)


def test_a_lone_process_of_its_own_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of srun would make it one of two."""
    env = environments(EACH)[1]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    request = asked(env, num_machines="1", num_processes="1")
    (command,) = choose_kind(request).plan(request).commands
    world = {name: str(value) for name, value in command.variables.items()}
    assert (world["RANK"], world["WORLD_SIZE"], world["LOCAL_RANK"]) == ("0", "1", "0")
    cluster = detect({**env, **world})
    assert cluster is not None
    assert cluster.size == 1


def test_torchruns_own_variables_describe_a_machine() -> None:
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "head"}
    request = asked({**env, "PET_MASTER_PORT": "2345"})
    assert (request.machines, request.local_processes.value) == ((2, 2), 4)
    assert origin(request, "machine_rank") == (1, "scheduler", "PET_NODE_RANK")
    assert (request.settings.main_process_ip, request.settings.main_process_port) == ("head", 2345)


@pytest.mark.parametrize("each", ["auto", "1"])
def test_typed_processes_win_over_those_of_the_operator(tmp_path: Path, each: str) -> None:
    """Kubeflow's operator writes a number for each pod, "auto" by default: 16 is not "autoauto"."""
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": each, "PET_MASTER_ADDR": "head"}
    for request in (
        asked(env, num_processes="16"),
        asked({**env, "ACCELERATE_NUM_PROCESSES": "16"}, num_machines="2"),
    ):
        assert (request.machines, request.local_processes.value) == ((2, 2), 8)
    (tmp_path / "a.yaml").write_text("num_processes: 16\n")
    local = asked(env, read_config(tmp_path / "a.yaml")).local_processes
    assert local.value == (8 if each == "auto" else 1), "a number of the scheduler wins over a file"


# --- RANK, WORLD_SIZE and LOCAL_RANK that job scripts and Azure set in front of a launcher

LOCAL = {**LEFT, "LOCAL_RANK": "0", "MASTER_ADDR": "node0"}
AZURE = {"NODE_RANK": "1", "AZUREML_NODE_COUNT": "2"}


@pytest.mark.parametrize(
    ("env", "machines", "address"),
    [
        ({**LOCAL, **AZURE}, (2, 2), "node0"),
        ({**LOCAL, **environments(EACH)[1], "WORLD_SIZE": "8"}, (2, 2), "node0"),
        ({**LOCAL, **environments(EACH)[1], "WORLD_SIZE": "8", "LOCAL_RANK": ""}, (2, 2), "node0"),
        ({**LOCAL, **environments("srun -N1 -n1")[0], "LOCAL_RANK": ""}, (2, 2), "node0"),
        ({**LOCAL, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod0"}, (2, 2), "pod0"),
    ],
    ids=["azure", "slurm", "slurm-no-local", "step-each", "kubeflow"],
)
def test_a_local_rank_that_no_launcher_has_set(
    env: dict[str, str], machines: tuple[int, int], address: str
) -> None:
    """They make no rank of it: it starts the processes of its machine."""
    request = asked(env, num_processes="8")
    assert (request.machines, request.get("machine_rank"), request.notes) == (machines, 1, ())
    assert (request.local_processes.value, request.settings.main_process_ip) == (4, address)
    assert choose_kind(request) is not scheduled_rank.PLUGIN


@pytest.mark.parametrize("address", ["localhost", "node0"])
def test_exported_ranks_that_count_no_machines_are_passed_over(address: str) -> None:
    env = {**LOCAL, "WORLD_SIZE": "4", "MASTER_ADDR": address}
    request = asked(env, num_processes="16", num_machines="2", machine_rank="0", main_process_ip="node0")
    assert (request.scheduler, request.machines, request.get("machine_rank")) == (None, (2, 2), 0)
    assert "RANK=1 and WORLD_SIZE=4 of the environment are not used" in request.notes[0]


# --- what a rank is told


def test_a_rank_speaks_torchruns_protocol() -> None:
    request = asked(environments("srun -N1 -n1 : -N1 -n2")[2])
    plan = scheduled_rank.PLUGIN.plan(request)
    assert plan.commands[0].variables == {
        "RANK": 2,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 3,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 1,
        "GROUP_WORLD_SIZE": 2,
        "MASTER_ADDR": "n1",
        "MASTER_PORT": 29508,
    }


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"num_processes": "2"}, "--num_processes is 2, but 4 processes were started (SLURM_STEP_NUM_TASKS)"),
        ({"num_machines": "3"}, "--num_machines is 3, but 2 machines take part (SLURM_STEP_NUM_NODES)"),
        ({"machine_rank": "0"}, "--machine_rank is 0, but 1 is the number of this machine (SLURM_NODEID)"),
        (
            {"nproc_per_node": "4"},
            "--nproc_per_node is 4, but 2 processes were started on this",
        ),
    ],
)
def test_numbers_that_are_not_those_of_the_job_are_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        scheduled_rank.PLUGIN.plan(asked(environments("srun -N2 -n4")[3], **flags))
    assert caught.value.what.startswith(text)
    assert "unset SLURM_PROCID" in caught.value.fix


def test_numbers_that_agree_are_welcome() -> None:
    flags: dict[str, Any] = {
        "num_processes": "4",
        "num_machines": "2",
        "machine_rank": "1",
        "main_process_port": "29999",
    }
    plan = scheduled_rank.PLUGIN.plan(asked(environments("srun -N2 -n4")[3], **flags))
    assert plan.commands[0].variables["MASTER_PORT"] == 29999


def test_mpi_on_several_machines_takes_the_address_from_a_flag() -> None:
    common = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    env = {**common, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(LaunchError, match="where rank 0 runs") as caught:
        scheduled_rank.PLUGIN.plan(asked(env))
    assert "--main_process_ip" in caught.value.fix
    plan = scheduled_rank.PLUGIN.plan(asked(env, main_process_ip="head"))
    assert plan.commands[0].variables["MASTER_ADDR"] == "head"


def test_ranks_of_torchrun_meet_where_torchrun_has_opened_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(SettingError, match="--main_process_port is 1234, but MASTER_PORT is 29511"):
        scheduled_rank.PLUGIN.plan(asked(TORCHRUN, main_process_port="1234"))


def test_an_environment_that_contradicts_itself_is_an_error() -> None:
    with pytest.raises(WorldError, match="its machines hold 3"):
        detect_scheduler({**environments("srun -N2 -n4")[0], "SLURM_STEP_TASKS_PER_NODE": "2,1"})
