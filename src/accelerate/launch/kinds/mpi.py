"""Ranks on several machines, started by ``mpirun`` from a file of machines: for clusters of CPUs.

One command on one machine starts all. mpirun reaches the machines (by ssh or by its scheduler) and tells each
process its place, which ``world/clusters.py`` reads; the processes compute and communicate with torch, not
with MPI. So any MPI will do, and none has to be built into torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError, RankError, SettingError
from accelerate.core.packages import find_program
from accelerate.core.setting import setting
from accelerate.core.value_types import frozen_dataclass
from accelerate.device import DeviceProbeHost, count_cores
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand, Variables, explain_start_error
from accelerate.launch.config_files import expand_home
from accelerate.launch.device_selection import LaunchDeviceSelection, select_devices, unused_type
from accelerate.launch.kinds.local import NO_RANK_VARIABLES, exec_program, script_command, shared_variables
from accelerate.launch.launch_request import MULTI_MACHINE, LaunchRequest
from accelerate.world.network import DEFAULT_PORT, JOB_PORT_COUNT, ReservedPort

# Variables of this process that the ranks get besides those of the job.
FORWARDED_VARIABLES = re.compile(
    r"ACCELERATE_\w+|HF_\w+|TORCH_\w+|GLOO_\w+|NCCL_\w+|PYTHON\w+|OMP_\w+|KMP_\w+|CCL_\w+"
)


@frozen_dataclass
class MpirunSettings:
    """Starting the ranks with mpirun."""

    __section__ = "mpirun_config"
    __prefix__ = "mpirun_"
    __topic__ = "Several machines, mpirun"
    __when__: ClassVar[Mapping[str, Any]] = {"distributed_type": ("MULTI_CPU",), **MULTI_MACHINE}

    mpirun_hostfile: str | None = setting(
        None,
        help="a file of machines, one a line, on which mpirun starts the processes",
        question="Hostfile of mpirun? (empty: without mpirun)",
    )
    mpirun_ccl: str | int | None = setting(
        None, flag=None, variable=None, help="read and ignored: old files have it, and torch does not need it"
    )


HostSlots = Mapping[str, int | None]  # how many processes each machine takes; None where nothing says it


@frozen_dataclass
class MpiFamily:
    """The command line of one family of ``mpirun``.

    Attributes:
        name: of the family.
        version_pattern: a pattern that ``mpirun --version`` of this family matches.
        hostfile_flag: the flag of the file of machines.
        fixed_flags: flags that are always given: here ranks are no MPI programs, and several threads each.
        root_flags: what an administrator has to add.
        per_machine_flags: flags for this many processes on each machine.
        variable_flag: hands on the variable whose name follows; "" where all are handed on. No flag has a
            value: mpirun reads it from its own environment, so that it stands in no list of processes.
    """

    name: str
    version_pattern: str
    hostfile_flag: str
    per_machine_flags: tuple[str, ...]
    variable_flag: str = ""
    fixed_flags: tuple[str, ...] = ()
    root_flags: tuple[str, ...] = ()


# Sources: mpirun(1) of Open MPI 4.1 and 5.0; MPICH wiki, "Using the Hydra Process Manager", which MVAPICH has
# too; Intel MPI Library Developer Reference, "Global Hydra Options".
FAMILIES = (
    MpiFamily(
        "Open MPI",
        r"open[ -]?mpi|openrte|prrte",
        hostfile_flag="--hostfile",
        per_machine_flags=("--map-by", "ppr:{each}:node"),
        variable_flag="-x",
        # By default it binds each process to one core, whatever its number of threads.
        fixed_flags=("--bind-to", "none"),
        root_flags=("--allow-run-as-root",),
    ),
    MpiFamily(
        "MPICH and its relatives",
        r"mpich|intel\(r\) mpi|build details",
        hostfile_flag="-f",
        per_machine_flags=("-ppn", "{each}"),
        # All variables: a list of names (-genvlist) would keep PATH and LD_LIBRARY_PATH from other machines.
        fixed_flags=("-genvall",),
    ),
)


@frozen_dataclass
class MPILaunchPlan(LaunchPlan):
    """A launch by mpirun.

    Attributes:
        path: the program.
        family: how it is told.
        hosts: the machines.
        size: the number of processes.
    """

    path: str
    family: MpiFamily
    hosts: HostSlots
    size: int


class MpiLaunch(LaunchKind[MPILaunchPlan]):
    """Processes that mpirun starts."""

    name: ClassVar[str] = "mpirun"
    priority: ClassVar[int] = 50
    asked_by: ClassVar[tuple[str, ...]] = ("mpirun_hostfile",)
    settings: ClassVar[tuple[type[MpirunSettings], ...]] = (MpirunSettings,)

    def accepts(self, request: LaunchRequest) -> bool:
        """Every job with a file of machines."""
        return request.values_of(MpirunSettings).mpirun_hostfile is not None

    def check(self, request: LaunchRequest) -> None:
        """Refuse logs, which mpirun keeps; see ``LaunchKind.check``."""
        for name in ("tee", "log_dir"):
            if request.get(name) is not None:
                raise SettingError(
                    f"{request.origin(name).where} cannot be applied: mpirun reads the output of the ranks",
                    fix=f"leave it out, or {request.origin('mpirun_hostfile').where}",
                )

    def plan(self, request: LaunchRequest) -> MPILaunchPlan:
        """Read the file of machines and write the command; see ``LaunchKind.plan``."""
        self.check(request)
        hosts = read_hosts(request)
        size = _count_processes(request, hosts)
        path, family = find_mpirun()
        machine = DeviceProbeHost()
        most = _equal_share(request, hosts, size) or _largest_share(hosts, size)
        allocation = LaunchDeviceSelection(select_devices(request, machine).device, 0, None, most)
        variables = {
            **shared_variables(request, allocation, machine),
            **_rendezvous_variables(request, hosts),
        }
        if "OMP_NUM_THREADS" not in variables and environ.get("OMP_NUM_THREADS") is None:
            variables["OMP_NUM_THREADS"] = max(1, count_cores(machine) // most)
        command = mpirun_command(request, path, family, hosts, size, variables)
        return MPILaunchPlan(
            kind=self.name,
            facts=(
                ("processes", str(size)),
                ("machines", ", ".join(hosts)),
                ("started by", f"{path} ({family.name})"),
            ),
            variables=variables,
            commands=(PlannedCommand("mpirun", command),),
            unused_settings=(
                ("machine_rank", "one command starts the ranks of all machines"),
                ("stop_timeout", "mpirun stops the ranks"),
                ("gpu_ids", "the ranks are spread over the machines of the file"),
                *unused_type(request, allocation.device),
            ),
            setting_effects=(("num_processes", f"{size} processes on {len(hosts)} machines"),),
            path=path,
            family=family,
            hosts=hosts,
            size=size,
        )

    def run(self, request: LaunchRequest, plan: MPILaunchPlan, *, replace: bool) -> None:
        """Run mpirun; see ``LaunchKind.run``."""
        import subprocess

        # The plan may have learnt of more variables since its command was written for people.
        command = mpirun_command(request, plan.path, plan.family, plan.hosts, plan.size, plan.variables)
        env = environ.make_child_environment(plan.variables)
        with explain_start_error(command[0]):
            if replace:
                exec_program(command, env)
            code = subprocess.run(command, env=env, check=False).returncode
        if code:
            from accelerate.launch.rank_reports import code_text, shell_code

            error = RankError(f"mpirun failed ({code_text(code)})")
            error.code = shell_code(code)
            raise error


def find_mpirun() -> tuple[str, MpiFamily]:
    """The ``mpirun`` on the PATH and its family.

    Raises:
        LaunchError: there is none, or it is of no family that is known here.
    """
    import subprocess

    path = find_program("mpirun")
    if path is None:
        raise LaunchError(
            "there is no mpirun on the PATH",
            why="--mpirun_hostfile asks it to start the ranks",
            fix="install an MPI (apt-get install mpich), or load its module",
        )
    process = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    output = process.stdout + process.stderr
    for family in FAMILIES:
        if re.search(family.version_pattern, output, re.IGNORECASE):
            return path, family
    raise LaunchError(
        f"{path} is of no MPI that is known here",
        why=f"mpirun --version says {output.strip().splitlines()[:1]}",
        fix=f"use one of these: {', '.join(family.name for family in FAMILIES)}",
    )


def read_hosts(request: LaunchRequest) -> HostSlots:
    """The machines of the file; ``name slots=4``, ``name:4`` and ``name`` are understood.

    Raises:
        LaunchError: the file cannot be read, or names none.
    """
    location, path = request.origin("mpirun_hostfile").where, Path(str(request.get("mpirun_hostfile")))
    try:
        text = expand_home(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"the file of machines {path} ({location}) cannot be read", why=str(error)
        ) from error
    hosts = _parse_hosts(text)
    if not hosts:
        raise LaunchError(
            f"the file of machines {path} ({location}) names none",
            fix="write the name of a machine on each line, and how many processes it takes: node1 slots=4",
        )
    return hosts


def _parse_hosts(text: str) -> HostSlots:
    """Return the machines. mpirun adds up lines with one name: PBS and LSF write a line for each slot."""
    machines: dict[str, int | None] = {}
    for line in text.splitlines():
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        name, _, count = tokens[0].partition(":") if tokens[0].count(":") == 1 else (tokens[0], "", "")
        slots = next((token.partition("=")[2] for token in tokens[1:] if token.startswith("slots=")), count)
        number = int(slots) if slots.isdecimal() else None
        machines[name] = (machines[name] or 1) + (number or 1) if name in machines else number
    return machines


def _count_processes(request: LaunchRequest, hosts: HostSlots) -> int:
    """The number of processes to start: as many as asked for, or as the machines take.

    Raises:
        SettingError: there are fewer than machines.
    """
    total, each = request.origin("num_processes"), request.origin("nproc_per_node")
    if isinstance(each.value, int):
        return each.value * len(hosts)
    if not isinstance(total.value, int):
        return sum(slots or 1 for slots in hosts.values())
    if total.value < len(hosts):
        raise SettingError(
            f"{total.where} is {total.value}, but {request.origin('mpirun_hostfile').where} names "
            f"{len(hosts)} machines",
            why="each machine of the file runs at least one process",
            fix="start more processes, or take machines out of the file",
        )
    return total.value


def _equal_share(request: LaunchRequest, hosts: HostSlots, size: int) -> int | None:
    """Return the number of processes of each machine; None where mpirun spreads them by the file's slots."""
    share, rest = divmod(size, len(hosts))
    is_requested = isinstance(request.origin("nproc_per_node").value, int)
    slots = {count or 1 for count in hosts.values()}
    return share if not rest and (is_requested or len(slots) == 1 or share <= min(slots)) else None


def _largest_share(hosts: HostSlots, size: int) -> int:
    """Return how many processes a machine runs at most where mpirun fills the slots of one after another."""
    return max(-(-size // len(hosts)), min(size, max(count or 1 for count in hosts.values())))


def _rendezvous_variables(request: LaunchRequest, hosts: HostSlots) -> dict[str, object | None]:
    """Return MASTER_ADDR and MASTER_PORT: the first machine of the file, and a port of this job's own.

    Variables of a launcher around this one would be taken for those of the ranks.
    """
    port, first = request.settings.main_process_port, next(iter(hosts))
    if not port and first in ("localhost", "127.0.0.1"):
        with closing(ReservedPort()) as free:
            port = free.number
    job: dict[str, object | None] = {
        "MASTER_ADDR": request.settings.main_process_ip or first,
        "MASTER_PORT": port or DEFAULT_PORT + os.getpid() % JOB_PORT_COUNT,
    }
    return {**NO_RANK_VARIABLES, "ACCELERATE_STOP_FOLDER": None, **job}


def mpirun_command(
    request: LaunchRequest,
    path: str,
    family: MpiFamily,
    hosts: HostSlots,
    size: int,
    variables: Variables,
) -> tuple[str, ...]:
    """Return the command line of mpirun.

    Args:
        request: what was asked.
        path: the program.
        family: the implementation of MPI, with its flags.
        hosts: the machines.
        size: the number of processes.
        variables: the variables of the job.
    """
    command = [path, *(family.root_flags if os.geteuid() == 0 else ()), *family.fixed_flags]
    command += [family.hostfile_flag, str(expand_home(request.get("mpirun_hostfile")))]
    command += ["-np", str(size)]
    if each := _equal_share(request, hosts, size):
        command += [flag.format(each=each) for flag in family.per_machine_flags]
    forwarded = {k: v for k, v in environ.snapshot().items() if FORWARDED_VARIABLES.fullmatch(k)}
    for name, value in sorted({**forwarded, **variables}.items()):
        if value is not None and family.variable_flag:
            command += [family.variable_flag, name]
    return (*command, *script_command(request))


PLUGIN = MpiLaunch()
