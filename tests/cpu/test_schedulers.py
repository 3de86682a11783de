"""F1, F2, F16: real schedulers around the launcher, and mpirun below it.

SLURM with two nodes, Open MPI and MPICH run on this machine, where they are installed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.command import CONSOLE, Finished, Running, launch
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
    expected = [f"{place}, at n1, all [0, 1, 2, 3], told srun" for place in places]
    assert lines(srun(cluster, *each)) == expected


def test_the_first_failing_rank_ends_the_step_with_its_code(cluster: slurm.Slurm) -> None:
    script = "import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)"
    finished = srun(cluster, "-N2", "-n2", *CONSOLE, "launch", "--cpu", script=script)
    assert finished.returncode == 7, finished.output


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


# --- MPI


@pytest.mark.parametrize("name", ["openmpi", long_run_param("mpich")])
def test_a_launcher_under_mpirun_is_a_rank(name: str) -> None:
    command = [mpirun(name), *as_root(name), "-np", "2", *CONSOLE, "launch", "--cpu"]
    finished = Running(command, env={"TESTS_WORD": "mpirun"}, script_text=SCRIPT).wait(60)
    assert lines(finished) == [
        f"rank {rank} of 2, local {rank} of 2, machine 0 of 1, at 127.0.0.1, all [0, 1], told mpirun"
        for rank in range(2)
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
    finished = Running(command, env={"TESTS_WORD": "torchrun"}, script_text=SCRIPT).wait(60)
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
    assert logs["rank_1.log"] == "words of 1\n"
    assert "ValueError: invalid literal" in finished.stderr
