"""Launching on this machine: one process becomes the script, several are started side by side."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError
from accelerate.core.frozen import frozen
from accelerate.device.machine import Machine
from accelerate.launch.base import Kind
from accelerate.launch.check import Place, cores, place
from accelerate.launch.job import Request
from accelerate.launch.logs import Logs
from accelerate.launch.plan import Plan, Start, Variables

HOST = "127.0.0.1"


@frozen
class LocalPlan(Plan):
    """Processes on this machine.

    Attributes:
        place: their devices, and how many they are.
    """

    place: Place


class Local(Kind[LocalPlan]):
    """Processes on this machine, on any device, the CPU included."""

    name: ClassVar[str] = "this machine"

    def takes(self, request: Request) -> bool:
        """Every job on one machine."""
        return request.machines == (1, 1)

    def plan(self, request: Request) -> LocalPlan:
        """Chooses devices and processes; see ``Kind.plan``."""
        machine = Machine()
        where = place(request, machine)
        device, count = where.device.type, where.processes
        guessed = count > 1 and request.local_processes.value is None
        note = f"{count} processes, one for each {device} device (--num_processes says another number)"
        program = program_of(request)
        port = request.settings.main_process_port or "a free port"
        own = [alone(request)] if count == 1 else own_variables(request, count, port, "a new name")
        return LocalPlan(
            kind=self.name,
            facts=(("processes", str(count)), ("devices", device if count == 1 else f"{count} x {device}")),
            variables=shared_variables(request, where, machine),
            starts=tuple(Start(f"rank {rank}", program, told) for rank, told in enumerate(own)),
            notes=(note,) if guessed else (),
            place=where,
            unused=tuple(_unused(request, where)),
            effects=tuple(_effects(request, where)),
        )

    def run(self, request: Request, plan: LocalPlan, *, replace: bool) -> None:
        """Starts the job; see ``Kind.run``."""
        logs = Logs(request.settings.tee, request.settings.log_dir)
        if plan.place.processes == 1 and replace and not logs.active:
            # The folder of a launcher around this one is not for this process.
            own: Variables = {**alone(request), "ACCELERATE_STOP_FOLDER": None}
            become(request, environ.child({**plan.variables, **own}))
        else:
            _supervise(request, plan.place.processes, plan.variables, logs)


def _unused(request: Request, where: Place) -> Iterator[tuple[str, str]]:
    """What says nothing about processes on one machine; see ``Plan.unused``."""
    yield "machine_rank", "there is one machine"
    if not where.count:
        yield "gpu_ids", f"the processes run on the {where.device.type.upper()}"
    if where.processes == 1:
        yield "role", "one process is in no group"
        if not request.settings.main_process_port:
            yield "main_process_port", "one process listens nowhere"
    if request.settings.tee == "0":
        yield "log_dir", f"{request.origin('tee').where} is 0: nothing is logged"


def _effects(request: Request, where: Place) -> Iterator[tuple[str, str]]:
    """What some options do here; see ``Plan.effects``."""
    alone = where.processes == 1
    yield "num_processes", "one process" if alone else f"{where.processes} processes"
    if where.visible is not None:
        yield "gpu_ids", f"{where.device.visible_variable}={where.visible}: the processes see only these"
    if alone:
        told = "the script is told; one process opens no group unless its code does"
        yield "main_process_port", f"MASTER_PORT: {told}"
        yield "main_process_ip", f"MASTER_ADDR: {told}"


def shared_variables(request: Request, where: Place, machine: Machine) -> dict[str, object | None]:
    """What every process of the job is told; None removes a variable that it must not inherit."""
    told: dict[str, object | None] = {**environ.unset(where.device.environment), **request.handed()}
    if where.device.type == "cpu" and request.get("distributed_type") == "MULTI_CPU":
        told["ACCELERATE_USE_CPU"] = "true"
    if where.visible is not None and where.device.visible_variable is not None:
        told[where.device.visible_variable] = where.visible
    threads = request.settings.num_cpu_threads_per_process
    if threads is None and where.processes > 1 and environ.get("OMP_NUM_THREADS") is None:
        threads = max(1, cores(machine) // where.processes)
    if threads is not None:
        told["OMP_NUM_THREADS"] = threads
    return told


def rank_variables(rank: int, size: int) -> dict[str, object | None]:
    """torchrun's protocol for one process of a job on one machine, address and port left out.

    Source: PyTorch documentation, "torchrun (Elastic Launch)", section "Environment Variables".
    """
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
    }


def alone(request: Request) -> Variables:
    """A lone process opens no group; where it would, if it did, is told only if somebody said so."""
    port = request.settings.main_process_port
    return {
        name: value
        for name, value in (("MASTER_ADDR", request.settings.main_process_ip), ("MASTER_PORT", port or None))
        if value is not None
    }


def program_of(request: Request) -> tuple[str, ...]:
    """The command of a process that nobody watches."""
    if request.settings.no_python:
        return request.program
    return (sys.executable, *(("-m",) if request.settings.module else ()), *request.program)


def become(request: Request, env: dict[str, str]) -> None:
    """Replaces this process by the script.

    Raises:
        LaunchError: the program cannot be started.
    """
    program = program_of(request)
    sys.stdout.flush()
    sys.stderr.flush()
    with startable(program[0]):
        os.execvpe(program[0], program, env)


def _supervise(request: Request, size: int, variables: Variables, logs: Logs) -> None:
    # A launcher that becomes its script watches nobody, and need not load what that takes.
    from accelerate.launch import report
    from accelerate.launch.ranks import Command, Ranks
    from accelerate.launch.watched import keep_code, own_folder, own_port, watched

    with own_folder() as folder, own_port(request, size) as port:
        shared = environ.child({**variables, "ACCELERATE_STOP_FOLDER": folder})
        if size > 1:
            keep_code(request, folder)
        run_id = os.urandom(4).hex()
        owns = [alone(request)] if port is None else own_variables(request, size, port.number, run_id)
        commands = [
            Command(watched(request, folder, rank), environ.child(own, shared), *logs.pipes(rank))
            for rank, own in enumerate(owns)
        ]
        ranks = Ranks(
            commands,
            stop_timeout=request.settings.stop_timeout,
            raised=lambda rank, pid: report.raised(folder, rank, pid),
            armed=lambda pid: report.armed(folder, pid),
            grace=request.settings.preemption_grace,
            started=logs.read,
        )
        with startable(commands[0].program[0]):
            outcome = ranks.run()
        logs.finish()
        error = report.failure(outcome, folder)
    if error is not None:
        raise error


def own_variables(request: Request, size: int, port: object, run_id: str) -> Iterator[Variables]:
    job = {
        "MASTER_ADDR": request.settings.main_process_ip or HOST,
        "MASTER_PORT": port,
        "ROLE_NAME": request.settings.role,
        # Libraries ask by this name whether torchrun's protocol is spoken, and name their folders by it.
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Of a surrounding torchrun: its store and its error file are not this job's.
        "TORCHELASTIC_USE_AGENT_STORE": None,
        "TORCHELASTIC_ERROR_FILE": None,
    }
    for rank in range(size):
        yield {**job, **rank_variables(rank, size)}


@contextmanager
def startable(program: str) -> Iterator[None]:
    """Says in words that a program is none."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
            raise
        raise LaunchError(
            f"the program {program} cannot be started",
            why=error.strerror or str(error),
            fix="with --no_python, name an executable file or a program on the PATH",
        ) from error


PLUGIN = Local()
