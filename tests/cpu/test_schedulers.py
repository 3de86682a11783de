"""F1, F2, F16: real schedulers around the launcher, and mpirun below it.

SLURM with two nodes, Open MPI and MPICH run on this machine, where they are installed.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.command import CONSOLE, Finished, Running, launch
from tests.support.free_ports import free_port
from tests.support.launchers import environments
from tests.support.long_run import long_run_param

SCRIPT = """
import os, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
world = accelerator.state.world
place = f"rank {world.rank} of {world.size}, local {world.local_rank} of {world.local_size}"
where = f"machine {world.node} of {world.nodes}, at {os.environ['MASTER_ADDR']}"
print(f"{place}, {where}, all {ranks}, told {os.environ.get('TESTS_WORD')}\\n", end="")
"""
# The same without torch: the ranks do not meet.
TELL = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
rank, size, local, local_size, node, nodes = map(os.environ.get, names)
address = os.environ["MASTER_ADDR"]
place = f"rank {rank} of {size}, local {local} of {local_size}, machine {node} of {nodes}, at {address}"
print(f"{place}, told {os.environ.get('TESTS_WORD')}\\n", end="")
"""
IMPLEMENTATIONS = ("openmpi", "mpich")


def lines(finished: Finished) -> list[str]:
    """What the ranks printed, in order of rank."""
    assert finished.returncode == 0, finished.output
    return sorted(line for line in finished.stdout.splitlines() if line.startswith("rank "))


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Slurm]:
    why = slurm.missing()
    if why:
        pytest.skip(why)
    with slurm.Slurm() as running:
        yield running


def srun(cluster: slurm.Slurm, *words: str, script: str = SCRIPT) -> Finished:
    """``srun WORDS script.py`` to its end."""
    running = Running(["srun", *words], env={**cluster.env, "TESTS_WORD": "srun"}, script_text=script)
    return running.wait(60)


def mpirun(name: str) -> str:
    program = shutil.which(f"mpirun.{name}")
    if program is None:
        pytest.skip(
            f"mpirun.{name} not found: apt-get install {'openmpi-bin' if name == 'openmpi' else name}"
        )
    return program


def as_root(name: str) -> list[str]:
    return ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []


# --- SLURM


def test_a_task_for_each_process_is_a_rank(cluster: slurm.Slurm) -> None:
    """Three tasks on two machines: the launchers become the ranks, and the copied file does not matter."""
    text = "num_machines: 2\nmachine_rank: 0\nmain_process_ip: 192.0.2.1\nnum_processes: 8\n"
    (cluster.folder / "a.yaml").write_text(text)
    file = ["--config_file", str(cluster.folder / "a.yaml")]
    finished = srun(cluster, "-N2", "-n3", *CONSOLE, "launch", *file)
    assert lines(finished) == [
        "rank 0 of 3, local 0 of 2, machine 0 of 2, at n1, all [0, 1, 2], told srun",
        "rank 1 of 3, local 1 of 2, machine 0 of 2, at n1, all [0, 1, 2], told srun",
        "rank 2 of 3, local 0 of 1, machine 1 of 2, at n1, all [0, 1, 2], told srun",
    ]
    said = finished.stderr
    assert "main_process_ip is n1, from SLURM_STEP_NODELIST" in said
    assert "line 3 says 192.0.2.1" in said
    assert said.count("processes that SLURM has started; nothing more is started here") == 1


def test_a_launcher_for_each_machine_starts_those_of_its_machine(cluster: slurm.Slurm) -> None:
    """One task on each machine and four processes: each launcher starts two."""
    each = ("-N2", "--ntasks-per-node=1", *CONSOLE, "launch", "--cpu", "-n", "4")
    places = [f"rank {rank} of 4, local {rank % 2} of 2, machine {rank // 2} of 2" for rank in range(4)]
    expected = [f"{place}, at n1, told srun" for place in places]
    assert lines(srun(cluster, *each, script=TELL)) == expected


def test_the_first_failing_rank_ends_the_step_with_its_code(cluster: slurm.Slurm) -> None:
    script = "import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)"
    finished = srun(cluster, "-N2", "-n2", *CONSOLE, "launch", "--cpu", script=script)
    assert finished.returncode == 7, finished.output


# It is told to stop in its first start, and goes on from its checkpoint in the second one.
REQUEUED = """
import os, signal, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(1, 1))
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
if accelerator.resume_from:
    accelerator.load_state(accelerator.resume_from)
resumes = bool(accelerator.resume_from)
print(f"start {restarts}, rank {accelerator.process_index}, resumes: {resumes}\\n", end="")
sys.stdout.flush()
if restarts == "0":
    accelerator.should_stop
    if accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGUSR1)
    while not accelerator.should_stop:
        pass
    accelerator.save_state()
    accelerator.exit_to_resume()
"""


def wait_until(wanted: str, state: Callable[[], str], output: Path) -> None:
    """Wait for a state of a job. One that SLURM is about to requeue is told as failed for a moment."""
    deadline, failed_since = time.monotonic() + 60, None
    while (now := state()) != wanted:
        told = output.read_text() if output.exists() else ""
        failed_since = (failed_since or time.monotonic()) if now.startswith("FAILED") else None
        assert time.monotonic() < (failed_since + 20 if failed_since else deadline), f"{now}\n{told}"
        time.sleep(0.2)


@pytest.mark.parametrize("processes", [1, long_run_param(2)])
def test_a_job_that_stops_to_be_resumed_is_requeued_and_goes_on(
    cluster: slurm.Slurm, tmp_path: Path, processes: int
) -> None:
    """D12: SLURM's ``RequeueExit=75`` starts it again, from its checkpoint."""
    (tmp_path / "train.py").write_text(REQUEUED)
    command = f"{CONSOLE[0]} launch --cpu -n {processes} --resume auto train.py"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\necho the script begins\nexec {command}\n")
    options = ("--requeue", "--open-mode=append", "--output=out", "-N1", "-n1")
    submitted = Running(["sbatch", *options, "job.sh"], env=cluster.env, cwd=tmp_path).wait()
    number = submitted.stdout.split()[-1]

    def state() -> str:
        """Not asked of ``sbatch --wait``, which may take the end before the requeue for that of the job."""
        told = cluster.ask("scontrol", "show", "job", "-o", number)
        return " ".join(re.findall(r"\b(?:JobState|Reason|Restarts)=(\S+)", told))

    # A requeued job waits for two minutes; whoever may, says that it need not. A new one may wait so, too.
    wait_until("PENDING BeginTime 1", state, tmp_path / "out")
    before = (tmp_path / "out").read_text()
    cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
    try:
        wait_until("COMPLETED None 1", state, tmp_path / "out")
    except AssertionError:
        # On a busy machine SLURM may end the second start before the shell of its script has run.
        if (tmp_path / "out").read_text() != before:
            raise
        print(cluster.ask("scontrol", "show", "job", "-o", number))
        cluster.ask("scontrol", "requeue", number)
        cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
        wait_until("COMPLETED None 2", state, tmp_path / "out")
    text = (tmp_path / "out").read_text()
    starts = [re.sub("start [12]", "again", line) for line in text.splitlines() if line.startswith("start ")]
    first = [f"start 0, rank {rank}, resumes: False" for rank in range(processes)]
    assert sorted(starts) == [f"again, rank {rank}, resumes: True" for rank in range(processes)] + first


def test_a_number_that_is_not_the_schedulers_is_refused(cluster: slurm.Slurm) -> None:
    finished = srun(cluster, "-N1", "-n2", *CONSOLE, "launch", "--cpu", "-n", "3")
    assert finished.returncode != 0
    assert "--num_processes is 3, but 2 processes were started (SLURM_STEP_NUM_TASKS)" in finished.stderr


def test_the_table_of_settings_names_the_scheduler(cluster: slurm.Slurm) -> None:
    """``accelerate env --explain`` inside of a job."""
    finished = srun(cluster, "-N2", "-n2", *CONSOLE, "env", "--explain", script="")
    assert finished.returncode == 0, finished.output
    rows = {tuple(re.split(r"\s{2,}", line)[:3]) for line in finished.stdout.splitlines()}
    assert {("machine_rank", "0", "SLURM_NODEID"), ("machine_rank", "1", "SLURM_NODEID")} <= rows


# --- helpers of a task

# A step of two machines, of which the other never comes.
TASK = {
    **environments("srun -N2 --ntasks-per-node=1")[0],
    "SLURM_STEP_NODELIST": "localhost,other",
    "SLURM_JOB_NODELIST": "localhost,other",
}
HELPERS = """
import multiprocessing, os, subprocess, sys

def start_alone():
    for name in [name for name in os.environ if name in NAMES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    from accelerate import PartialState
    print("alone" if PartialState(cpu=True).num_processes == 1 else "in a group", flush=True)

NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
if __name__ == "__main__":
    if "helper" in sys.argv:
        start_alone()
    else:
        if "opened" in sys.argv:
            from accelerate import PartialState
            PartialState(cpu=True)
        env = {name: value for name, value in os.environ.items() if name not in NAMES}
        subprocess.run([sys.executable, __file__, "helper"], env=env, check=True, timeout=60)
        process = multiprocessing.get_context("spawn").Process(target=start_alone)
        process.start()
        process.join(60)
        process.kill()
"""


def test_helpers_of_a_rank_work_alone() -> None:
    """As trl starts them: without torchrun's variables, and with the scheduler's."""
    protocol = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
    }
    env = {**TASK, **protocol, "MASTER_PORT": free_port()}
    finished = Running((sys.executable,), env=env, script_text=HELPERS, script_args=["opened"]).wait(150)
    assert finished.stdout.splitlines() == ["alone", "alone"], finished.output


def test_helpers_of_a_launched_script_work_alone() -> None:
    """Before it has opened its group, too."""
    own_job = ("--cpu", "-n", "1", "--num_machines", "1")
    finished = launch(*own_job, env=TASK, script_text=HELPERS, timeout=150)
    assert finished.stdout.splitlines() == ["alone", "alone"], finished.output


# --- MPI


@pytest.mark.parametrize("name", ["openmpi", long_run_param("mpich")])
def test_a_launcher_under_mpirun_is_a_rank(name: str) -> None:
    command = [mpirun(name), *as_root(name), "-np", "2", *CONSOLE, "launch", "--cpu"]
    finished = Running(command, env={"TESTS_WORD": "mpirun"}, script_text=TELL).wait(60)
    assert lines(finished) == [
        f"rank {rank} of 2, local {rank} of 2, machine 0 of 1, at 127.0.0.1, told mpirun" for rank in range(2)
    ]


@pytest.mark.parametrize("name", ["openmpi", long_run_param("mpich")])
def test_a_file_of_machines_is_launched_by_mpirun(name: str, tmp_path: Path) -> None:
    """``--mpirun_hostfile``: the ranks are started by mpirun, with the variables of the job."""
    wrapper = tmp_path / "mpirun"
    wrapper.write_text(f'#!/bin/sh\nexec {mpirun(name)} "$@"\n')
    wrapper.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=2\n" if name == "openmpi" else "localhost:2\n")
    finished = launch(
        *("--cpu", "-n", "2", "--mpirun_hostfile", str(tmp_path / "hosts")),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "TESTS_WORD": "launch"},
        script_text=SCRIPT,
    )
    assert lines(finished) == [
        f"rank {rank} of 2, local {rank} of 2, machine 0 of 1, at localhost, all [0, 1], told launch"
        for rank in range(2)
    ]
    assert not finished.survivors()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_code_of_a_failing_rank_arrives(name: str, tmp_path: Path) -> None:
    wrapper = tmp_path / "mpirun"
    wrapper.write_text(f'#!/bin/sh\nexec {mpirun(name)} "$@"\n')
    wrapper.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=2\n" if name == "openmpi" else "localhost:2\n")
    finished = launch(
        *("--cpu", "-n", "2", "--mpirun_hostfile", str(tmp_path / "hosts")),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        script_text="import sys\nsys.exit(5)",
    )
    assert finished.returncode == 5, finished.output


def test_a_launcher_under_torchrun_is_a_rank() -> None:
    torchrun = str(Path(CONSOLE[0]).with_name("torchrun"))
    command = [torchrun, "--nproc_per_node", "2", "--no_python", *CONSOLE, "launch", "--cpu"]
    finished = Running(command, env={"TESTS_WORD": "torchrun"}, script_text=TELL).wait(60)
    assert [line.partition(", machine")[0] for line in lines(finished)] == [
        "rank 0 of 2, local 0 of 2",
        "rank 1 of 2, local 1 of 2",
    ]


def test_the_output_of_a_rank_is_kept_by_its_own_number(tmp_path: Path) -> None:
    """``--log_dir`` under mpirun: each launcher stays, and writes the file of its rank."""
    command = [mpirun("mpich"), "-np", "2", *CONSOLE, "launch", "--cpu", "--log_dir", str(tmp_path / "logs")]
    script = "import os\nprint('words of', os.environ['RANK'])\nif os.environ['RANK'] == '1':\n    int('no')"
    finished = Running(command, script_text=script).wait(60)
    assert finished.returncode == 1, finished.output
    logs = {file.name: file.read_text() for file in (tmp_path / "logs").iterdir()}
    assert logs["rank_1.log"].startswith("words of 1\n")
    assert logs["rank_1.log"].endswith("ValueError: invalid literal for int() with base 10: 'no'\n")
    assert "ValueError: invalid literal" in finished.stderr
