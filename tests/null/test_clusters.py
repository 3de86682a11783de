"""F16: who started a process and what its place is, from nothing but the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate.core.errors import WorldError
from accelerate.world.clusters import TASK_VARIABLE, ClusterRankInfo, detect, find_scheduler
from accelerate.world.network import DEFAULT_PORT, JOB_PORT_COUNT
from accelerate.world.slurm_lists import expand_counts, expand_nodes
from tests.support.launchers import RECORDED, environments

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29511",
}


def found(env: dict[str, str]) -> ClusterRankInfo:
    cluster = detect(env)
    assert cluster is not None
    return cluster


def place(cluster: ClusterRankInfo) -> tuple[int, ...]:
    return (
        cluster.rank,
        cluster.size,
        cluster.local_rank,
        cluster.local_size,
        cluster.node,
        cluster.nodes,
    )


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_lone_process_is_no_cluster() -> None:
    assert detect({}) is None
    assert detect({"PATH": "/bin", "WORLD_SIZE": "", "RANK": ""}) is None


def test_nothing_here_imports_torch() -> None:
    script = "import sys, accelerate.world.clusters; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- torchrun's protocol


def test_torchrun_says_everything() -> None:
    cluster = found(TORCHRUN)
    assert place(cluster) == (5, 8, 1, 4, 1, 2)
    assert (cluster.name, cluster.address, cluster.port) == ("torchrun", "node-a", 29511)


def test_the_world_size_is_law_on_one_machine() -> None:
    """F2: two processes are two, whatever the device."""
    cluster = found({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"})
    assert place(cluster) == (1, 2, 1, 2, 0, 1)
    assert cluster.port == DEFAULT_PORT


def test_a_group_of_one_that_torchrun_started_is_a_cluster() -> None:
    cluster = found({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert place(cluster) == (0, 1, 0, 1, 0, 1)
    assert cluster.address == "127.0.0.1"


def test_minus_one_means_unset() -> None:
    assert detect({"RANK": "-1", "WORLD_SIZE": "-1", "LOCAL_RANK": "-1"}) is None
    assert detect({"LOCAL_RANK": "-1", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"LOCAL_WORLD_SIZE": "4"},
        {"LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"},
        {"NODE_RANK": "1"},
        {"NNODES": "2"},
        {"NODE_RANK": "1", "AZUREML_NODE_COUNT": "2"},
    ],
)
def test_the_local_size_is_derived_where_it_can_be(extra: dict[str, str]) -> None:
    """Launchers that write torchrun's protocol by halves: DeepSpeed's, Azure's, a user's script."""
    env = without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert place(found(env | extra)) == (5, 8, 1, 4, 1, 2)


def test_machines_with_different_numbers_of_processes() -> None:
    env = TORCHRUN | {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
    assert place(found(env)) == (5, 6, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK is not"]),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ["WORLD_SIZE=2", "LOCAL_RANK=0", "RANK is not"]),
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE is not"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "RANK and WORLD_SIZE are not"]),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK='zero'", "whole number"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, ["LOCAL_RANK"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        (TORCHRUN | {"RANK": "8"}, ["rank 8 of 8"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["local rank 4 of 4"]),
        (TORCHRUN | {"GROUP_RANK": "2"}, ["node 2 of 2"]),
        (TORCHRUN | {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "7"}, ["LOCAL_WORLD_SIZE"]),
        (without(TORCHRUN, "LOCAL_RANK"), ["local rank", "LOCAL_RANK"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR"]),
        (
            without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
            ["local size", "LOCAL_WORLD_SIZE"],
        ),
    ],
)
def test_a_partial_or_wrong_environment_is_an_error_that_names_it(
    env: dict[str, str], names: list[str]
) -> None:
    with pytest.raises(WorldError) as caught:
        detect(env)
    for name in names:
        assert name in str(caught.value)


def test_alone_by_name_is_alone() -> None:
    assert detect({"WORLD_SIZE": "1"}) is None
    assert detect({"LOCAL_RANK": "0"}) is None


# --- recorded launchers


@pytest.mark.parametrize(
    ("command", "places"),
    [
        ("srun -N2 -n4", [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]),
        ("srun -N2 -n3", [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]),
        (
            "srun -N2 -n4 -m cyclic",
            [(0, 4, 0, 2, 0, 2), (1, 4, 0, 2, 1, 2), (2, 4, 1, 2, 0, 2), (3, 4, 1, 2, 1, 2)],
        ),
        (
            "srun in sbatch -N2 -n4",
            [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)],
        ),
        ("srun -N1 -n1 : -N1 -n2", [(0, 3, 0, 1, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 1, 2)]),
        ("srun -N2 --ntasks-per-node=1", [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]),
        ("srun -N1 -n2 in sbatch -N2 -n4", [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
        ("srun -N1 -n2 --mpi=pmi2", [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
        ("mpirun (Open MPI) -np 2", [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
        ("mpirun (MPICH) -np 2", [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
    ],
)
def test_recorded_processes_know_their_place(command: str, places: list[tuple[int, ...]]) -> None:
    clusters = [found(env) for env in environments(command)]
    assert [place(cluster) for cluster in clusters] == places
    assert len({(cluster.address, cluster.port) for cluster in clusters}) == 1, "all meet at one place"


@pytest.mark.parametrize(
    "command",
    [
        "srun -N1 -n1",
        "salloc -N2 -n4",
        "sbatch -N2 -n4",
        "interactive step of salloc -N2 -n4",
        "sbatch -n2 sent from srun -n1",
        "sbatch -n2 sent from srun -n2 --pty",
    ],
)
def test_a_shell_of_a_job_is_one_process(command: str) -> None:
    """salloc and sbatch tell SLURM_NTASKS=4 to a shell that is one process; only srun starts four."""
    assert [detect(env) for env in environments(command)] == [None]


@pytest.mark.skipif(sys.platform != "linux", reason="SLURM opens terminals on Linux")
@pytest.mark.parametrize(
    ("on_terminal", "in_own_group", "size"),
    [
        (True, True, None),  # typed in the shell that is the task
        (True, False, 2),  # the program is the task: the others run it too
        (False, True, 2),  # a step that was started from salloc's shell, which has told it the port
    ],
)
def test_what_is_typed_in_a_shell_of_srun_is_one_process(
    on_terminal: bool, in_own_group: bool, size: int | None
) -> None:
    """``srun -n2 --pty bash`` is the first of two tasks, and the other shell has ended at once."""
    terminal = os.openpty()
    stdin = terminal[1] if on_terminal else subprocess.PIPE
    with subprocess.Popen(["sleep", "60"], stdin=stdin, start_new_session=in_own_group) as task:
        try:
            told = {"SLURM_PTY_PORT": "34609", "SLURM_TASK_PID": str(task.pid)}
            cluster = detect({**environments("srun -N1 -n2 --mpi=pmi2")[0], **told})
            assert (cluster and cluster.size) == size
        finally:
            task.kill()
            for end in terminal:
                os.close(end)


def test_a_step_of_a_script_that_was_sent_from_a_step_is_read() -> None:
    env = environments("sbatch -n2 sent from srun -n2 --pty")[0]
    assert place(found({**env, "SLURM_GTIDS": "0,1"})) == (0, 2, 0, 2, 0, 1)


def test_a_task_that_cannot_be_seen_is_a_rank() -> None:
    env = {**environments("srun -N1 -n2 --mpi=pmi2")[0], "SLURM_PTY_PORT": "34609"}
    for pid in ("", "0", "4194305"):
        assert found({**env, "SLURM_TASK_PID": pid}).size == 2


def test_every_recorded_environment_is_read() -> None:
    for command in RECORDED:
        for env in environments(command):
            detect(env)


def test_who_started_it_is_told() -> None:
    names = {command: detect(environments(command)[0]) for command in RECORDED}
    assert {command: cluster.name for command, cluster in names.items() if cluster} == {
        "srun -N2 -n4": "SLURM",
        "srun -N2 -n3": "SLURM",
        "srun -N2 -n4 -m cyclic": "SLURM",
        "srun -N1 -n1 : -N1 -n2": "SLURM",
        "srun -N2 --ntasks-per-node=1": "SLURM",
        "srun in sbatch -N2 -n4": "SLURM",
        "srun -N1 -n2 in sbatch -N2 -n4": "SLURM",
        "srun -N1 -n2 --mpi=pmi2": "SLURM",
        "mpirun (Open MPI) -np 2": "Open MPI",
        "mpirun (MPICH) -np 2": "MPI (Hydra)",
    }


# --- what a task has started


@pytest.mark.parametrize("command", ["srun -N2 --ntasks-per-node=1", "mpirun (Open MPI) -np 2"])
def test_what_a_task_starts_is_no_task(command: str) -> None:
    """It has the variables of the task, which the other machines would be waited for by."""
    env = environments(command)[0]
    scheduler = find_scheduler(env)
    assert scheduler is not None
    own = scheduler.mark_task()
    assert own[TASK_VARIABLE].startswith(f"{os.getpid()} ")
    assert found(env | own).size == 2, "the task itself, in a second Accelerator"
    inherited = {TASK_VARIABLE: own[TASK_VARIABLE].replace(str(os.getpid()), "1", 1)}
    assert detect(env | inherited) is None
    assert found(env | inherited | TORCHRUN).size == 8, "a rank that torchrun, or a launcher, has started"
    step = {"SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "1591934978"}
    assert found(env | inherited | step).size == 2, "a task of a step that a task has started"


def test_a_process_of_multiprocessing_is_no_task() -> None:
    env = environments("srun -N2 -n4")[0]
    rank = env | {"RANK": "0", "WORLD_SIZE": "4"}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        alone, in_group = pool.map(detect, [env, rank])
    assert alone is None
    assert in_group is not None
    assert place(in_group) == (0, 4, 0, 2, 0, 2)


# --- SLURM


def slurm(rank: int, local: int, node: int, **changes: str) -> dict[str, str]:
    """One task of a step on seven machines with InfiniBand names, 2(x3),1(x4) tasks."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": "10",
        "SLURM_NTASKS": "10",
        "SLURM_STEP_NUM_NODES": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x4)",
        "SLURM_STEP_NODELIST": "gpu[01-03,07]-ib0,big[8-10]",
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "3",
        **changes,
    }


def test_slurm_with_uneven_machines_and_infiniband_names() -> None:
    assert place(found(slurm(5, 1, 2))) == (5, 10, 1, 2, 2, 7)
    last = found(slurm(9, 0, 6))
    assert place(last) == (9, 10, 0, 1, 6, 7)
    assert last.address == "gpu01-ib0", "the name as SLURM has it, suffix kept, never expanded elsewhere"


def test_slurm_ports_are_a_jobs_own() -> None:
    """F7: two jobs, or two steps of a job, on one machine do not meet."""
    ports = {
        found(slurm(0, 0, 0, SLURM_JOB_ID=job, SLURM_STEP_ID=step)).port
        for job in ("4242", "4243")
        for step in ("0", "1")
    }
    assert len(ports) == 4
    assert all(DEFAULT_PORT <= port < DEFAULT_PORT + JOB_PORT_COUNT < 32768 for port in ports)
    assert found(slurm(0, 0, 0)).port == found(slurm(9, 0, 6)).port


def test_the_users_address_and_port_win() -> None:
    cluster = found(slurm(0, 0, 0, MASTER_ADDR="head", MASTER_PORT="12345"))
    assert (cluster.address, cluster.port) == ("head", 12345)


def test_slurm_without_step_variables() -> None:
    """A container that passes on only the task's own variables and the job's."""
    env = {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
    }
    assert place(found(env)) == (3, 4, 1, 2, 1, 2)


def test_slurm_on_one_machine_meets_on_loopback() -> None:
    assert found(environments("srun -N1 -n2 --mpi=pmi2")[1]).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_NUM_TASKS=10"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE='2(x'"),
        ({"SLURM_STEP_NODELIST": "gpu[a-b]"}, "SLURM_STEP_NODELIST='gpu[a-b]'"),
        ({"SLURM_PROCID": "10"}, "rank 10 of 10"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but SLURM started 10"),
    ],
)
def test_slurm_that_contradicts_itself(changes: dict[str, str], text: str) -> None:
    with pytest.raises(WorldError) as caught:
        detect(slurm(0, 0, 0, **changes))
    assert text in str(caught.value)


def test_a_world_size_that_agrees_is_welcome() -> None:
    assert found(slurm(0, 0, 0, WORLD_SIZE="10")).name == "SLURM"


def test_torchrun_inside_of_a_slurm_task_wins() -> None:
    env = slurm(
        1, 0, 1, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_STEP_NUM_NODES="2"
    )
    cluster = found(env | TORCHRUN)
    assert (cluster.name, place(cluster)) == ("torchrun", (5, 8, 1, 4, 1, 2))


def test_ranks_exported_by_a_slurm_script_are_completed_by_slurm() -> None:
    """``export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS`` and no more."""
    cluster = found(slurm(5, 1, 2, RANK="5", WORLD_SIZE="10", MASTER_ADDR="gpu01-ib0"))
    assert (cluster.name, place(cluster)) == ("torchrun", (5, 10, 1, 2, 2, 7))


def test_devices_stay_narrowed_below_the_protocol() -> None:
    """srun --gpus-per-task shows each task its own devices, also when our launcher has become the rank."""
    protocol = {"RANK": "5", "WORLD_SIZE": "10", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place = {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "7", "MASTER_ADDR": "gpu01-ib0"}
    assert found(slurm(5, 1, 2, **protocol, **place)).hides_devices
    assert not found(protocol | place | {"GROUP_WORLD_SIZE": "5"}).hides_devices


def test_a_wrong_scheduler_below_a_complete_protocol_does_not_matter() -> None:
    env = slurm(5, 1, 1, SLURM_STEP_NUM_TASKS="8", SLURM_STEP_TASKS_PER_NODE="3")
    assert place(found(env | TORCHRUN)) == (5, 8, 1, 4, 1, 2)


# --- MPI


def mpi(rank: int, size: int, local: int, per_node: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
        "MASTER_ADDR": "head",
        **more,
    }


def test_open_mpi_fills_machines_or_deals() -> None:
    filled = [found(mpi(rank, 4, rank % 2, 2)) for rank in range(4)]
    assert [(c.node, c.nodes) for c in filled] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    dealt = [found(mpi(rank, 4, rank // 2, 2)) for rank in range(4)]
    assert [(c.node, c.nodes) for c in dealt] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_open_mpi_with_uneven_machines_asks_for_the_machine() -> None:
    assert found(mpi(1, 5, 1, 3, OMPI_MCA_orte_num_nodes="2")).node == 0
    with pytest.raises(WorldError, match="its machine cannot be told"):
        detect(mpi(4, 5, 1, 2, OMPI_MCA_orte_num_nodes="2"))
    assert found(mpi(4, 5, 1, 2, OMPI_MCA_orte_num_nodes="2", GROUP_RANK="1")).node == 1


def test_mpi_on_several_machines_needs_an_address() -> None:
    with pytest.raises(WorldError, match="where rank 0 runs") as caught:
        detect(without(mpi(3, 4, 1, 2), "MASTER_ADDR"))
    assert "export MASTER_ADDR" in str(caught.value)


def test_mpi_daemons_of_slurm_do_not_hide_mpi() -> None:
    """mpirun in a SLURM job starts its daemons by srun: ranks inherit the daemon's step variables."""
    env = slurm(
        1, 0, 1, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_STEP_NUM_NODES="2"
    )
    assert place(found(env | mpi(3, 4, 1, 2))) == (3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (
            {
                "MV2_COMM_WORLD_RANK": "1",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "MVAPICH",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, "MPI (Hydra)"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "localhost"}, "MPI (Hydra)"),
    ],
)
def test_other_mpis(env: dict[str, str], name: str) -> None:
    cluster = found(env)
    assert (cluster.name, place(cluster)) == (name, (1, 2, 1, 2, 0, 1))


# --- LSF


def lsf(hosts: str, **more: str) -> dict[str, str]:
    return {
        "LSB_JOBID": "991",
        "LSB_MCPU_HOSTS": hosts,
        "JSM_NAMESPACE_RANK": "7",
        "JSM_NAMESPACE_SIZE": "12",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "6",
        # jsrun's ranks are MPI ranks too.
        **mpi(7, 12, 1, 6),
        **more,
    }


@pytest.mark.parametrize(
    "hosts", ["batch5 1 h36n03 42 h36n17 42", "h36n03 42 h36n17 42", "h36n03 6 h36n17 6"]
)
def test_lsf_skips_the_launch_node(hosts: str) -> None:
    cluster = found(without(lsf(hosts), "MASTER_ADDR"))
    assert (cluster.name, place(cluster), cluster.address) == ("LSF", (7, 12, 1, 6, 1, 2), "h36n03")


def test_lsf_with_plain_hosts() -> None:
    env = without(lsf(""), "MASTER_ADDR", "LSB_MCPU_HOSTS") | {"LSB_HOSTS": "batch1 a a b b"}
    assert found(env).address == "a"


def test_an_lsf_job_without_jsrun_is_one_process() -> None:
    assert detect({"LSB_JOBID": "991", "LSB_HOSTS": "a a b b"}) is None


# --- Kubeflow


POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def test_a_kubeflow_pod_is_a_machine() -> None:
    cluster = found(POD)
    assert (cluster.name, place(cluster)) == ("Kubeflow", (2, 3, 0, 1, 2, 3))
    assert (cluster.address, cluster.port) == ("job-master-0", 23456)


def test_torchrun_inside_of_a_pod_wins() -> None:
    assert found(POD | TORCHRUN).name == "torchrun"


def test_a_pod_with_several_processes_needs_a_launcher() -> None:
    with pytest.raises(WorldError, match="4 processes per pod"):
        detect(POD | {"PET_NPROC_PER_NODE": "4"})
    assert found(POD | {"PET_NPROC_PER_NODE": "auto"}).local_size == 1


# --- laws


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_all_ranks_of_any_torchrun_job_agree(nodes: int, per_node: int, data: Any) -> None:
    keep = data.draw(st.sets(st.sampled_from(["GROUP_RANK", "GROUP_WORLD_SIZE"])))
    clusters: list[ClusterRankInfo] = []
    for rank in range(nodes * per_node):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes * per_node),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(rank // per_node),
            "GROUP_WORLD_SIZE": str(nodes),
            "MASTER_ADDR": "head",
        }
        clusters.append(found({k: v for k, v in env.items() if k in keep or not k.startswith("GROUP")}))
    assert len({(c.size, c.nodes, c.local_size, c.address, c.port) for c in clusters}) == 1
    assert sorted({(c.node, c.local_rank) for c in clusters}) == [
        (node, local) for node in range(nodes) for local in range(per_node)
    ]
    assert all(c.nodes == nodes and c.local_size == per_node for c in clusters)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("gpu[01-02]-ib0", ["gpu01-ib0", "gpu02-ib0"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1,3].cluster.org,b2", ["a1.cluster.org", "a3.cluster.org", "b2"]),
        ("nid[000012-000013]", ["nid000012", "nid000013"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "gpu[01-03", "gpu01-03]", "gpu[a]", "gpu[]", "gpu[1-2-3]", ","])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(WorldError, match="X="):
        expand_nodes(text, where="X")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_counts_are_written_out(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert expand_counts(text) == [count for count, times in groups for _ in range(times)]
