"""Launching on several machines by the launcher of DeepSpeed, which starts the processes on all of them.

Source: DeepSpeed documentation, "Getting started", "Resource configuration (multi-node)", "Multi-node
environment variables" and "Launching without passwordless SSH"; the options of ``deepspeed --help``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import ClassVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError, MissingExtraError, SettingError
from accelerate.core.frozen import frozen
from accelerate.launch.base import Kind
from accelerate.launch.job import Request
from accelerate.launch.kinds.local import startable
from accelerate.launch.logs import Logs
from accelerate.launch.plan import Plan, Start

PROGRAM = "deepspeed"
STANDARD, ALONE, INHERITS = "standard", "nossh", "slurm"
HOSTFILE = "/job/hostfile"  # where the engine's launcher looks when nobody names one
NAME = "DS_ENV_FILE"
ENVIRONMENT = ".deepspeed_env"


@frozen
class EnginePlan(Plan):
    """One command that starts processes on all machines.

    Attributes:
        exported: the lines that its file of variables gets: what the processes on other machines are told.
    """

    exported: tuple[str, ...] = field(default=(), kw_only=True)


class Engine(Kind[EnginePlan]):
    """Several machines, started by the engine's own launcher."""

    name: ClassVar[str] = "DeepSpeed's launcher"
    priority: ClassVar[int] = 20
    reads: ClassVar[tuple[str, ...]] = (
        "deepspeed_hostfile",
        "deepspeed_inclusion_filter",
        "deepspeed_exclusion_filter",
    )

    def takes(self, request: Request) -> bool:
        """Jobs of this engine on several machines, unless somebody wants the standard launcher."""
        several = request.machines[1] > 1 and "use_deepspeed" in request.engines
        return several and request.get("deepspeed_multinode_launcher") != STANDARD

    def plan(self, request: Request) -> EnginePlan:
        """Makes the command; see ``Kind.plan``.

        Raises:
            MissingExtraError: the engine is not installed here.
            SettingError: the hostfile does not fit, or an option does not go with this launcher.
        """
        import shutil

        _check(request)
        program = shutil.which(PROGRAM)
        if program is None:
            raise MissingExtraError(PROGRAM, f"a launch on {request.machines[1]} machines by its launcher")
        told = dict(request.handed())
        threads = request.settings.num_cpu_threads_per_process
        if threads is not None:
            told["OMP_NUM_THREADS"] = str(threads)
        started_by = request.get("deepspeed_multinode_launcher") or "pdsh"
        exported = () if started_by == INHERITS else tuple(f"{name}={value}" for name, value in told.items())
        return EnginePlan(
            kind=self.name,
            facts=(
                ("machines", f"{request.machines[1]}, of {_hostfile(request)}"),
                ("started by", started_by),
            ),
            variables={**told, **({} if not exported else {NAME: "a file with these variables"})},
            starts=(Start(PROGRAM, (program, *_options(request), *request.program)),),
            notes=(),
            unused=tuple(_unused(request)),
            exported=exported,
        )

    def run(self, request: Request, plan: EnginePlan, *, replace: bool) -> None:
        """Starts the command and watches it; see ``Kind.run``."""
        from accelerate.launch import report
        from accelerate.launch.ranks import Command, Ranks
        from accelerate.launch.watched import own_folder

        logs = Logs(request.settings.tee, request.settings.log_dir)
        with own_folder() as folder:
            told = dict(plan.variables)
            if plan.exported:
                told[NAME] = str(_write(folder, plan.exported))
            command = Command(plan.starts[0].program, environ.child(told), *logs.pipes(0))
            ranks = Ranks([command], stop_timeout=request.settings.stop_timeout, started=logs.read)
            with startable(command.program[0]):
                outcome = ranks.run()
            logs.finish()
            error = report.failure(outcome, folder)
        if error is not None:
            if outcome.stopped_by is None:
                error.what = error.what.replace("the script", f"the command {PROGRAM}", 1)
                error.why = "what its processes said stands above"
            raise error


def _options(request: Request) -> Iterator[str]:
    """The flags of the engine's launcher, before the script."""
    job, started_by = request.settings, request.get("deepspeed_multinode_launcher") or "pdsh"
    yield from ("--hostfile", str(_hostfile(request)), "--no_local_rank")
    if started_by == ALONE:
        yield from ("--no_ssh", "--node_rank", str(job.machine_rank))
    else:
        yield from ("--launcher", started_by)
    filters = {
        "--include": request.get("deepspeed_inclusion_filter"),
        "--exclude": request.get("deepspeed_exclusion_filter"),
    }
    if any(filters.values()):
        # It takes a filter or numbers, not both.
        yield from (word for flag, value in filters.items() if value for word in (flag, str(value)))
    else:
        yield from ("--num_nodes", str(request.machines[1]))
        each = request.local_processes.value
        if isinstance(each, int):
            yield from ("--num_gpus", str(each))
    for flag, value in (("--master_addr", job.main_process_ip), ("--master_port", job.main_process_port)):
        if value:
            yield from (flag, str(value))
    yield from (flag for flag, on in (("--module", job.module), ("--no_python", job.no_python)) if on)


def _check(request: Request) -> None:
    started_by, machine = request.origin("deepspeed_multinode_launcher"), request.origin("machine_rank")
    least, most = request.machines
    if least != most:
        raise SettingError(
            f"{request.origin('num_machines').where} is {least}:{most}, "
            "but DeepSpeed's launcher needs one number",
            fix="write one number, or add --deepspeed_multinode_launcher standard",
        )
    if started_by.value == ALONE and not request.settings.main_process_ip:
        raise SettingError(
            f"{started_by.where} is {ALONE}, but nothing says where rank 0 is",
            why="without ssh nobody can ask for its address",
            fix="add --main_process_ip, the address of the first machine of the hostfile",
        )
    if started_by.value != ALONE and machine.value > 0:
        raise SettingError(
            f"{machine.where} is {machine.value}, but DeepSpeed's launcher starts all machines from one",
            fix="launch on the first machine only, or add --deepspeed_multinode_launcher nossh or standard",
        )
    _check_filters(request)
    _check_hosts(request)


def _check_filters(request: Request) -> None:
    both = [request.origin(f"deepspeed_{kind}_filter") for kind in ("inclusion", "exclusion")]
    if all(origin.value for origin in both):
        raise SettingError(
            f"{both[0].where} and {both[1].where} do not go together",
            why="each says which devices are used",
            fix="keep one of them",
        )
    each = request.local_processes
    given = next((origin for origin in both if origin.value), None)
    if given is not None and each.source == "flag":
        raise SettingError(
            f"{given.where} and {each.where} do not go together",
            why="each says how many processes there are: one for each device",
            fix="keep one of them",
        )


def _check_hosts(request: Request) -> None:
    """Refuses a hostfile that has too few machines: the engine's launcher would use this one alone."""
    path, origin = _hostfile(request), request.origin("deepspeed_hostfile")
    where = f"{origin.where} is {path}" if origin.value else f"the hostfile is {path} (the default)"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingError(
            f"{where}, which cannot be read",
            why=error.strerror or str(error),
            fix="give --deepspeed_hostfile, a file with a line like 'worker-1 slots=8' for each machine",
        ) from error
    hosts = [line.split()[0] for line in lines if line.strip() and not line.strip().startswith("#")]
    if len(hosts) < request.machines[1]:
        raise SettingError(
            f"{request.origin('num_machines').where} is {request.machines[1]}, but {where}, which has "
            f"{len(hosts)} machine" + ("" if len(hosts) == 1 else "s"),
            fix="add a line like 'worker-1 slots=8' for each machine",
        )


def _hostfile(request: Request) -> Path:
    return Path(request.get("deepspeed_hostfile") or HOSTFILE).expanduser()


def _write(folder: Path, lines: tuple[str, ...]) -> Path:
    """The file of variables for processes on other machines: the user's own lines, then ours.

    Raises:
        LaunchError: a value has several lines, which such a file cannot hold.
    """
    several = next((line.partition("=")[0] for line in lines if "\n" in line), None)
    if several is not None:
        raise LaunchError(
            f"the variable {several} has several lines, which DeepSpeed's launcher cannot hand on",
            fix="make it one line, or add --deepspeed_multinode_launcher standard",
        )
    ours = {line.partition("=")[0] for line in lines}
    kept = (line for line in _users_lines() if line.partition("=")[0].strip() not in ours)
    file = folder / ENVIRONMENT.lstrip(".")
    file.write_text("\n".join([*kept, *lines]) + "\n", encoding="utf-8")
    return file


def _users_lines() -> Iterator[str]:
    """What the user's own files say: in the home folder and here, as the engine's launcher reads them."""
    named = environ.get(NAME) or ENVIRONMENT
    places = dict.fromkeys(Path(os.path.abspath(folder / named)) for folder in (Path.home(), Path()))
    for path in places:
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            yield from (line for line in lines if "=" in line)


def _unused(request: Request) -> Iterator[tuple[str, str]]:
    """What says nothing here; see ``Plan.unused``."""
    if request.get("deepspeed_multinode_launcher") != ALONE:
        yield "machine_rank", "one command starts all machines"
    yield "gpu_ids", "the hostfile and its filters say which devices are used"
    yield "role", "the engine's launcher has no roles"
    yield "preemption_grace", "the engine's launcher stops its processes itself"


PLUGIN = Engine()
