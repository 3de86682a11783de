"""mpirun's command line, for each family of MPI, without running one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.core.errors import LaunchError, SettingError, UnknownNameError
from tests.support import launch_plans

VERSIONS = {
    "mpirun.openmpi (OpenRTE) 4.1.4": "Open MPI",
    "mpirun (Open MPI) 4.1.2": "Open MPI",
    "mpirun (Open MPI) 5.0.3\nprterun (PRRTE) 3.0.5": "Open MPI",
    "HYDRA build details:\n    Version: 4.0.2": "MPICH and its relatives",
    "Intel(R) MPI Library for Linux* OS, Version 2021.9": "MPICH and its relatives",
}


HOSTFILE_FLAGS = {"Open MPI": "--hostfile", "MPICH and its relatives": "-f"}


def program(folder: Path, says: str) -> None:
    """A file called mpirun that says a version."""
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program(tmp_path, "mpirun (Open MPI) 4.1.2")
    (tmp_path / "hosts").write_text("# two machines\nnode1 slots=2\n\nnode2 slots=2 max_slots=4\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(**flags: Any) -> Any:
    words = {"use_cpu": True, "mpirun_hostfile": "hosts", **flags}
    return launch_plans.request(("train.py", "--lr", "1"), **words)


def planned(**flags: Any) -> Any:
    return launch_plans.kind_named("mpi").plan(asked(**flags))


@pytest.mark.parametrize(("says", "family"), list(VERSIONS.items()))
def test_the_family_is_told_by_its_version(folder: Path, says: str, family: str) -> None:
    program(folder, says)
    command = list(planned().commands[0].program)
    assert command[0] == str(folder / "mpirun")
    assert [flag for flag in HOSTFILE_FLAGS.values() if flag in command] == [HOSTFILE_FLAGS[family]]


def test_a_file_of_machines_asks_for_mpirun(folder: Path) -> None:
    plan = launch_plans.plan(asked(), "mpi")
    assert plan.size == 4, "as many as the machines take"
    command = list(plan.commands[0].program)
    assert command[0] == str(folder / "mpirun")
    assert command[-4:] == [sys.executable, "train.py", "--lr", "1"]
    text = " ".join(command)
    assert "--hostfile hosts -np 4 --map-by ppr:2:node" in text
    assert "-x ACCELERATE_USE_CPU -x" in text, "the value is no word of the command line"
    assert ("--allow-run-as-root" in text) == (os.geteuid() == 0)
    assert plan.variables["MASTER_ADDR"] == "node1", "rank 0 runs on the first machine"
    assert plan.variables["RANK"] is None, "what describes this process describes no rank"


def test_values_stand_on_no_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each user of the machine reads it, and a dry run prints it. MPICH hands all variables on."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    program(folder, "HYDRA build details:")
    plan = planned(main_process_ip="ib1", main_process_port="2345", num_processes="2")
    text = " ".join(plan.commands[0].program)
    assert "-genvall -f hosts -np 2 -ppn 1" in text
    assert "hf_of_mine" not in text
    assert "ib1" not in text
    assert "--allow-run-as-root" not in text


def test_what_the_user_has_set_for_communication_is_handed_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray too, whose processes start with the variables of Ray's own."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert "-x NCCL_SOCKET_IFNAME" in " ".join(planned().commands[0].program)


def test_an_uneven_number_is_left_to_mpirun(folder: Path) -> None:
    assert "ppr:" not in " ".join(planned(num_processes="3").commands[0].program)


@pytest.mark.parametrize(
    ("hosts", "flags", "expected", "most"),
    [
        ("a slots=2\nb slots=6\n", {}, "-np 8 -x", 6),
        ("a\nb slots=3\n", {}, "-np 4 -x", 3),
        ("a slots=2\nb slots=6\n", {"num_processes": "4"}, "-np 4 --map-by ppr:2:node", 2),
        ("a slots=2\nb slots=6\n", {"nproc_per_node": "3"}, "-np 6 --map-by ppr:3:node", 3),
        ("a\nb\n", {"num_processes": "6"}, "-np 6 --map-by ppr:3:node", 3),
    ],
)
def test_machines_with_other_numbers_of_slots_get_so_many_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, flags: dict[str, str], expected: str, most: int
) -> None:
    """An equal number for all would be too many for some: Open MPI refuses it, MPICH crowds a machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("accelerate.launch.kinds.local.count_cores", lambda machine: 60)
    (folder / "hosts").write_text(hosts)
    plan = planned(**flags)
    assert expected in " ".join(plan.commands[0].program)
    assert plan.variables["OMP_NUM_THREADS"] == 60 // most


def test_the_forms_of_a_file_of_machines(folder: Path) -> None:
    (folder / "hosts").write_text("a:2\nb slots=3\nc # spare\n")
    assert launch_plans.hosts_of(asked()) == [("a", 2), ("b", 3), ("c", None)]


def test_a_machine_on_several_lines_is_one(folder: Path) -> None:
    """PBS_NODEFILE has a line for each slot, and Open MPI refused fewer processes for each machine."""
    (folder / "hosts").write_text("a\na\nb:1\nb\n")
    assert launch_plans.hosts_of(asked()) == [("a", 2), ("b", 2)]
    plan = planned(nproc_per_node="2")
    assert (plan.size, [*plan.hosts]) == (4, ["a", "b"])
    assert "-np 4 --map-by ppr:2:node" in " ".join(planned().commands[0].program)


def test_a_configuration_file_may_ask_for_it(folder: Path) -> None:
    """The old key mpirun_ccl is read and does nothing."""
    (folder / "a.yaml").write_text("mpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: '1'\n")
    assert launch_plans.plan(launch_plans.request_of_file(folder / "a.yaml"), "mpi").size == 4
    (folder / "b.yaml").write_text("mpirun_config:\n  mpirun_hostfiles: hosts\n")
    with pytest.raises(UnknownNameError, match="mpirun_hostfiles"):
        launch_plans.request_of_file(folder / "b.yaml")


def test_faults_name_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--num_processes is 1, but --mpirun_hostfile names 2 machines"):
        planned(num_processes="1")
    with pytest.raises(SettingError, match="--log_dir cannot be applied"):
        planned(log_dir="logs")
    with pytest.raises(LaunchError, match=r"absent \(--mpirun_hostfile\) cannot be read"):
        planned(mpirun_hostfile="absent")
    (folder / "hosts").write_text("# none\n")
    with pytest.raises(LaunchError, match="names none"):
        planned()
    (folder / "hosts").write_text("a\n")
    program(folder, "some other program 1.0")
    with pytest.raises(LaunchError, match="no MPI that is known here"):
        planned()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="no mpirun on the PATH"):
        planned()
