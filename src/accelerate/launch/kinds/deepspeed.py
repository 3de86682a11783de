"""Launching on several machines by the launcher of DeepSpeed, which starts the processes on all of them.

Source: DeepSpeed documentation, "Getting started", "Resource configuration (multi-node)", "Multi-node
environment variables" and "Launching without passwordless SSH"; the options of ``deepspeed --help``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from accelerate.core import environ
from accelerate.core.errors import LaunchError, MissingExtraError, SettingError
from accelerate.core.packages import find_program
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand, origin_variables
from accelerate.launch.config_files import expand_home
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import RankLogSettings

PROGRAM = "deepspeed"
STANDARD, NO_SSH, SLURM = "standard", "nossh", "slurm"
MPI = ("openmpi", "mvapich", "mpich", "impi")  # mpirun starts all slots of the hostfile, and takes no others
HOSTFILE = "/job/hostfile"  # where DeepSpeed's launcher looks by default
ENV_FILE_VARIABLE = "DS_ENV_FILE"
ENV_FILE = ".deepspeed_env"


class DeepSpeedLaunch(LaunchKind[LaunchPlan]):
    """Several machines, started by DeepSpeed's own launcher."""

    name: ClassVar[str] = "DeepSpeed's launcher"
    priority: ClassVar[int] = 20
    asked_by: ClassVar[tuple[str, ...]] = ("num_machines",)
    reads: ClassVar[tuple[str, ...]] = (
        "deepspeed_hostfile",
        "deepspeed_inclusion_filter",
        "deepspeed_exclusion_filter",
    )

    def accepts(self, request: LaunchRequest) -> bool:
        """Accept DeepSpeed jobs on several machines, unless the standard launcher is requested."""
        several = request.machines[1] > 1 and "use_deepspeed" in request.strategy_switches
        return several and request.get("deepspeed_multinode_launcher") != STANDARD

    def check(self, request: LaunchRequest) -> None:
        """Refuse what contradicts itself; see ``LaunchKind.check``."""
        least, most = request.machines
        if least != most:
            raise SettingError(
                f"{request.origin('num_machines').where} is {least}:{most}, "
                "but DeepSpeed's launcher needs one number",
                fix="write one number, or add --deepspeed_multinode_launcher standard",
            )
        _check_filters(request)

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Make the command; see ``LaunchKind.plan``.

        Raises:
            MissingExtraError: DeepSpeed is not installed here.
            SettingError: the hostfile does not fit, or an option does not go with this launcher.
        """
        self.check(request)
        _check_machine(request)
        _check_hostfile(request)
        program = find_program(PROGRAM)
        if program is None:
            raise MissingExtraError(PROGRAM, f"a launch on {request.machines[1]} machines by its launcher")
        started_by = request.get("deepspeed_multinode_launcher") or "pdsh"
        variables = _job_variables(request)
        exported = {ENV_FILE_VARIABLE: "a file with these variables"} if _needs_env_file(request) else {}
        return LaunchPlan(
            kind=self.name,
            facts=(
                ("machines", f"{request.machines[1]}, of {_hostfile(request)}"),
                ("started by", started_by),
            ),
            variables={**variables, **exported},
            commands=(PlannedCommand(PROGRAM, (program, *_launcher_flags(request), *request.program)),),
            unused_settings=tuple(_unused_settings(request)),
        )

    def run(self, request: LaunchRequest, plan: LaunchPlan, *, replace: bool) -> None:
        """Start the command and watch it; see ``LaunchKind.run``."""
        from accelerate.launch import rank_reports
        from accelerate.launch.supervisor import WorkerSupervisor

        logs = RankLogSettings(request.settings.tee, request.settings.log_dir)
        with rank_reports.report_folder() as folder:
            variables = dict(plan.variables)
            if _needs_env_file(request):
                variables[ENV_FILE_VARIABLE] = str(_write_env_file(folder, _file_variables(request)))
            command = rank_reports.ProcessSpec(
                plan.commands[0].program, environ.make_child_environment(variables)
            )
            outcome = WorkerSupervisor(
                [command], logs, folder, stop_timeout=request.settings.stop_timeout
            ).run()
            error = rank_reports.build_job_error(outcome, folder)
        if error is not None:
            if outcome.stopped_by is None:
                error.what = error.what.replace("the script", f"the command {PROGRAM}", 1)
                error.why = "what its processes said stands above"
            raise error


def _job_variables(request: LaunchRequest) -> dict[str, str]:
    """Return the variables of the job that processes on all machines get."""
    job = request.settings
    told: dict[str, object] = {"OMP_NUM_THREADS": job.num_cpu_threads_per_process}
    # DeepSpeed does not tell the processes of these.
    if request.get("deepspeed_multinode_launcher") in (*MPI, SLURM):
        told |= {"MASTER_ADDR": job.main_process_ip, "MASTER_PORT": job.main_process_port or None}
    return {**request.script_variables(), **{n: str(value) for n, value in told.items() if value is not None}}


def _file_variables(request: LaunchRequest) -> dict[str, str]:
    """Return those of the file; the requested options, which are JSON, percent-encoded.

    DeepSpeed puts other values than plain words between quotes, that a shell removes, or that stay.
    """
    origins = {name: quote(value, safe="") for name, value in origin_variables(request).items()}
    return {**_job_variables(request), **origins}


def _needs_env_file(request: LaunchRequest) -> bool:
    """Return whether processes on other machines read the variables of the job from a file."""
    return request.get("deepspeed_multinode_launcher") != SLURM and bool(_job_variables(request))


def _launcher_flags(request: LaunchRequest) -> Iterator[str]:
    """Yield the flags of DeepSpeed's launcher, before the script."""
    job, started_by = request.settings, request.get("deepspeed_multinode_launcher") or "pdsh"
    yield from ("--hostfile", str(_hostfile(request)), "--no_local_rank")
    if started_by == NO_SSH:
        yield from ("--no_ssh", "--node_rank", str(job.machine_rank))
    else:
        yield from ("--launcher", started_by)
    filters = {
        "--include": request.get("deepspeed_inclusion_filter"),
        "--exclude": request.get("deepspeed_exclusion_filter"),
    }
    if any(filters.values()):
        # It takes a filter or numbers, not both.
        yield from (arg for flag, value in filters.items() if value for arg in (flag, str(value)))
    elif started_by not in MPI:
        yield from ("--num_nodes", str(request.machines[1]))
        each = request.local_processes.value
        if isinstance(each, int):
            yield from ("--num_gpus", str(each))
    for flag, value in (("--master_addr", job.main_process_ip), ("--master_port", job.main_process_port)):
        if value:
            yield from (flag, str(value))
    yield from (flag for flag, on in (("--module", job.module), ("--no_python", job.no_python)) if on)


def _check_machine(request: LaunchRequest) -> None:
    """Refuse a rank of this machine, or an address, that does not go with DeepSpeed's launcher."""
    started_by, machine = request.origin("deepspeed_multinode_launcher"), request.origin("machine_rank")
    if started_by.value in (NO_SSH, *MPI) and not request.settings.main_process_ip:
        raise SettingError(
            f"{started_by.where} is {started_by.value}, but nothing says where rank 0 is",
            why="nobody asks that machine for its address",
            fix="add --main_process_ip, the address of the first machine of the hostfile",
        )
    if started_by.value != NO_SSH and machine.value > 0:
        raise SettingError(
            f"{machine.where} is {machine.value}, but DeepSpeed's launcher starts all machines from one",
            fix="launch on the first machine only, or add --deepspeed_multinode_launcher nossh or standard",
        )
    unused = {"--module": request.settings.module, "--no_python": request.settings.no_python}
    for flag in (flag for flag, on in unused.items() if on and started_by.value == SLURM):
        raise SettingError(
            f"{flag} does not go with {started_by.where}, which is {SLURM}",
            why="DeepSpeed's launcher gives srun a Python file there",
            fix="start one accelerate launch on each machine: srun accelerate launch "
            "--deepspeed_multinode_launcher standard ...",
        )


def _check_filters(request: LaunchRequest) -> None:
    both = [request.origin(f"deepspeed_{kind}_filter") for kind in ("inclusion", "exclusion")]
    if all(origin.value for origin in both):
        raise SettingError(
            f"{both[0].where} and {both[1].where} do not go together",
            why="each says which devices are used",
            fix="keep one of them",
        )
    each = request.local_processes
    filter_origin = next((origin for origin in both if origin.value), None)
    started_by = request.origin("deepspeed_multinode_launcher")
    if filter_origin is not None and started_by.value in MPI:
        raise SettingError(
            f"{filter_origin.where} does not go with {started_by.where}, which is {started_by.value}",
            why="mpirun starts a process for each slot of the hostfile",
            fix="write the machines and slots that are to be used into a hostfile of its own",
        )
    if filter_origin is not None and each.source == "flag":
        raise SettingError(
            f"{filter_origin.where} and {each.where} do not go together",
            why="each says how many processes there are: one for each device",
            fix="keep one of them",
        )


def _check_hostfile(request: LaunchRequest) -> None:
    """Refuse a hostfile with too few machines: DeepSpeed's launcher would use this one alone."""
    path, origin = _hostfile(request), request.origin("deepspeed_hostfile")
    hostfile = f"{origin.where} is {path}" if origin.value else f"the hostfile is {path} (the default)"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingError(
            f"{hostfile}, which cannot be read",
            why=error.strerror or str(error),
            fix="give --deepspeed_hostfile, a file with a line like 'worker-1 slots=8' for each machine",
        ) from error
    hosts = [line.split()[0] for line in lines if line.strip() and not line.strip().startswith("#")]
    if request.get("deepspeed_multinode_launcher") in MPI:
        _check_slots(request, hostfile, lines)
    if len(hosts) < request.machines[1]:
        raise SettingError(
            f"{request.origin('num_machines').where} is {request.machines[1]}, but {hostfile}, which has "
            f"{len(hosts)} machine" + ("" if len(hosts) == 1 else "s"),
            fix="add a line like 'worker-1 slots=8' for each machine",
        )


def _check_slots(request: LaunchRequest, hostfile: str, lines: Sequence[str]) -> None:
    """Refuse another number of machines or processes than mpirun starts."""
    slots = [int(number) for line in lines for number in re.findall(r"^[^#]*slots=(\d+)", line)]
    each, machines = request.local_processes.value, request.machines[1]
    if len(slots) > machines or (isinstance(each, int) and any(count != each for count in slots)):
        size = f" of {each} processes each" if isinstance(each, int) else ""
        raise SettingError(
            f"{hostfile}, whose slots are {', '.join(map(str, slots))}, but {machines} machines{size} "
            "are asked for",
            why="mpirun starts a process for each slot of the hostfile",
            fix="write the machines and slots that are to be used into a hostfile of its own",
        )


def _hostfile(request: LaunchRequest) -> Path:
    return expand_home(request.get("deepspeed_hostfile") or HOSTFILE)


def _write_env_file(folder: Path, variables: Mapping[str, str]) -> Path:
    """The file of variables for processes on other machines: the user's own lines, then ours.

    Raises:
        LaunchError: a value has several lines, which such a file cannot hold.
    """
    several = next((name for name, value in variables.items() if "\n" in value), None)
    if several is not None:
        raise LaunchError(
            f"the variable {several} has several lines, which DeepSpeed's launcher cannot hand on",
            fix="make it one line, or add --deepspeed_multinode_launcher standard",
        )
    lines = [line for line in _user_env_lines() if line.partition("=")[0].strip() not in variables]
    lines += [f"{name}={value}" for name, value in variables.items()]
    file = folder / ENV_FILE.lstrip(".")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _user_env_lines() -> Iterator[str]:
    """Yield the lines of the user's own files, in the home folder and here, as DeepSpeed reads them."""
    named = environ.get(ENV_FILE_VARIABLE) or ENV_FILE
    places = dict.fromkeys(Path(os.path.abspath(folder / named)) for folder in (expand_home("~"), Path()))
    for path in places:
        if os.path.isfile(path):
            lines = path.read_text(encoding="utf-8").splitlines()
            yield from (line for line in lines if "=" in line)


def _unused_settings(request: LaunchRequest) -> Iterator[tuple[str, str]]:
    """Yield the settings without use here; see ``LaunchPlan.unused_settings``."""
    if request.get("deepspeed_multinode_launcher") != NO_SSH:
        yield "machine_rank", "one command starts all machines"
    yield "gpu_ids", "the hostfile and its filters say which devices are used"
    yield "role", "DeepSpeed's launcher has no roles"
    yield "preemption_grace", "DeepSpeed's launcher stops its processes itself"


PLUGIN = DeepSpeedLaunch()
