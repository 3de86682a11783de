"""mpirun's command line, for each family of MPI, without running one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.core.errors import LaunchError, SettingError, UnknownNameError
from accelerate.launch.base import choose_kind
from accelerate.launch.config_files import read_config
from accelerate.launch.kinds import mpi
from accelerate.launch.launch_request import LaunchRequest, build_request

VERSIONS = {
    "mpirun.openmpi (OpenRTE) 4.1.4": "Open MPI",
    "mpirun (Open MPI) 4.1.2": "Open MPI",
    "mpirun (Open MPI) 5.0.3\nprterun (PRRTE) 3.0.5": "Open MPI",
    "HYDRA build details:\n    Version: 4.0.2": "MPICH and its relatives",
    "Intel(R) MPI Library for Linux* OS, Version 2021.9": "MPICH and its relatives",
}


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


def asked(**flags: Any) -> LaunchRequest:
    return build_request(
        None,
        {"use_cpu": True, "mpirun_hostfile": "hosts", **flags},
        ("train.py", "--lr", "1"),
        SCRIPT_SETTINGS,
    )


@pytest.mark.parametrize(("says", "family"), list(VERSIONS.items()))
def test_the_family_is_told_by_its_version(folder: Path, says: str, family: str) -> None:
    program(folder, says)
    assert mpi.find_mpirun() == (
        str(folder / "mpirun"),
        next(each for each in mpi.FAMILIES if each.name == family),
    )


def test_a_file_of_machines_asks_for_mpirun(folder: Path) -> None:
    request = asked()
    assert choose_kind(request) is mpi.PLUGIN
    plan = mpi.PLUGIN.plan(request)
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


def test_mpich_is_told_the_values(folder: Path) -> None:
    program(folder, "HYDRA build details:")
    plan = mpi.PLUGIN.plan(asked(main_process_ip="ib1", main_process_port="2345", num_processes="2"))
    text = " ".join(plan.commands[0].program)
    assert "-f hosts -np 2 -ppn 1" in text
    assert "-genv MASTER_ADDR ib1 -genv MASTER_PORT 2345" in text
    assert "--allow-run-as-root" not in text


def test_an_uneven_number_is_left_to_mpirun(folder: Path) -> None:
    assert "ppr:" not in " ".join(mpi.PLUGIN.plan(asked(num_processes="3")).commands[0].program)


def test_the_forms_of_a_file_of_machines(folder: Path) -> None:
    (folder / "hosts").write_text("a:2\nb slots=3\nc # spare\n")
    hosts = [(host.name, host.slots) for host in mpi.read_hosts(asked())]
    assert hosts == [("a", 2), ("b", 3), ("c", None)]


def test_a_configuration_file_may_ask_for_it(folder: Path) -> None:
    """The old key mpirun_ccl is read and does nothing."""
    (folder / "a.yaml").write_text("mpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: '1'\n")
    request = build_request(read_config(folder / "a.yaml"), {}, ("train.py",), SCRIPT_SETTINGS)
    assert choose_kind(request) is mpi.PLUGIN
    (folder / "b.yaml").write_text("mpirun_config:\n  mpirun_hostfiles: hosts\n")
    with pytest.raises(UnknownNameError, match="mpirun_hostfiles"):
        build_request(read_config(folder / "b.yaml"), {}, ("train.py",), SCRIPT_SETTINGS)


def test_faults_name_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--num_processes is 1, but --mpirun_hostfile names 2 machines"):
        mpi.PLUGIN.plan(asked(num_processes="1"))
    with pytest.raises(SettingError, match="--log_dir cannot be applied"):
        mpi.PLUGIN.plan(asked(log_dir="logs"))
    with pytest.raises(LaunchError, match=r"absent \(--mpirun_hostfile\) cannot be read"):
        mpi.PLUGIN.plan(asked(mpirun_hostfile="absent"))
    (folder / "hosts").write_text("# none\n")
    with pytest.raises(LaunchError, match="names none"):
        mpi.PLUGIN.plan(asked())
    (folder / "hosts").write_text("a\n")
    program(folder, "some other program 1.0")
    with pytest.raises(LaunchError, match="no MPI that is known here"):
        mpi.PLUGIN.plan(asked())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="no mpirun on the PATH"):
        mpi.PLUGIN.plan(asked())
