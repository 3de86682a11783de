"""Launching on this machine: one process becomes the script, several are started side by side.

With ``--max_restarts`` they are started again when one fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import ClassVar, NoReturn

from accelerate.core import environ
from accelerate.device import DeviceProbeHost, count_cores
from accelerate.launch.base import (
    LaunchKind,
    LaunchPlan,
    PlannedCommand,
    Variables,
    explain_start_error,
    print_line,
)
from accelerate.launch.config_files import CPU_GROUP
from accelerate.launch.device_selection import LaunchDeviceSelection, allocate_devices, unused_type
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import RankLogSettings
from accelerate.world import clusters
from accelerate.world.network import LOOPBACK, reserve_port

# Settings that tell machines apart, and why one machine does not need them.
UNUSED_ON_ONE_MACHINE = (
    ("machine_rank", "there is one machine"),
    ("main_process_ip", f"there is one machine, whose processes meet at {LOOPBACK}"),
)
# torchrun's protocol for the only process of a world; a lone process may have any of it.
WORLD_OF_ONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1"),
}


class LocalLaunch(LaunchKind[LaunchPlan]):
    """Processes on this machine, on any device, the CPU included."""

    name: ClassVar[str] = "this machine"
    reads: ClassVar[tuple[str, ...]] = ("max_restarts",)

    def accepts(self, request: LaunchRequest) -> bool:
        """Every job on one machine."""
        return request.machines == (1, 1)

    def passes_stdin(self, request: LaunchRequest) -> bool:
        """Return whether nobody reads the output of a lone process; see ``LaunchKind.passes_stdin``."""
        tee = request.settings.tee
        return not request.get("max_restarts") and (tee == "0" or not (tee or request.settings.log_dir))

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Choose devices and processes; see ``LaunchKind.plan``."""
        machine = DeviceProbeHost()
        allocation = allocate_devices(request, machine)
        device, count = allocation.device.type, allocation.processes
        restarts = request.get("max_restarts")
        guessed = count > 1 and request.local_processes.value is None
        note = f"{count} processes, one for each {device} device (--num_processes says another number)"
        program = script_command(request)
        port = request.settings.main_process_port or "a free port"
        variables_by_rank = ranks_variables(request, count, port, "a new name", (0, restarts))
        return LaunchPlan(
            kind=self.name,
            facts=(
                ("processes", str(count)),
                ("devices", device if count == 1 else f"{count} x {device}"),
                *((("restarts", str(restarts)),) if restarts else ()),
            ),
            variables=shared_variables(request, allocation, machine),
            commands=tuple(
                PlannedCommand(f"rank {rank}", program, variables)
                for rank, variables in enumerate(variables_by_rank)
            ),
            notes=(note,) if guessed else (),
            unused_settings=tuple(_unused_settings(request, allocation)),
            setting_effects=tuple(_setting_effects(request, allocation)),
        )

    def run(self, request: LaunchRequest, plan: LaunchPlan, *, replace: bool) -> None:
        """Start the job; see ``LaunchKind.run``."""
        logs, size = RankLogSettings(request.settings.tee, request.settings.log_dir), len(plan.commands)
        restarts, run_id = request.get("max_restarts"), os.urandom(4).hex()
        has_group = size > 1 or asks_for_group(request)
        say, wanted = partial(print_line, request), request.settings.main_process_port or 0
        port_context = reserve_port(wanted, say) if has_group else nullcontext()
        if size == 1 and replace and not logs.is_active and not restarts:
            with port_context as port:
                (own,) = ranks_variables(request, 1, port and port.number, run_id)
                # The folder of a launcher around this one is not for this process.
                variables: Variables = {**plan.variables, **own, "ACCELERATE_STOP_FOLDER": None}
                replace_process(request, environ.make_child_environment(variables))
            return
        # A launcher that becomes its script watches nobody, and need not load what that takes.
        from accelerate.launch.supervisor import (
            WorkerSupervisor,
            describe_failure,
            open_attempts,
            print_restart,
        )

        # What a rank has left behind is in the way of another attempt.
        create = partial(WorkerSupervisor, keeps_leftovers=not restarts)
        with open_attempts(request, logs) as attempts, port_context as port:
            for restart in range(restarts + 1):
                each = ranks_variables(request, size, port and port.number, run_id, (restart, restarts))
                variables_of_ranks = [{**plan.variables, **own} for own in each]
                ranks, error = attempts.run(create, variables_of_ranks, size=size)
                if error is None:
                    return
                # A signal that stops the job is no failure, and neither are ranks that stop to be resumed.
                is_stopped = ranks.outcome.stopped_by is not None or ranks.outcome.resumable
                if restart == restarts or is_stopped:
                    raise error
                line = f"{describe_failure(error)}; restart {restart + 1} of {restarts}"
                print_restart(line, error.traceback, say)


def _unused_settings(request: LaunchRequest, where: LaunchDeviceSelection) -> Iterator[tuple[str, str]]:
    """Yield the settings without use on one machine; see ``LaunchPlan.unused_settings``."""
    yield from UNUSED_ON_ONE_MACHINE
    if where.count:
        yield from unused_type(request, where.device)
    else:
        yield "gpu_ids", f"the processes run on the {where.device.type.upper()}"
    if where.processes == 1 and not asks_for_group(request):
        yield "role", "one process is in no group"
        if not request.settings.main_process_port:
            yield "main_process_port", "one process listens nowhere"
    tee = request.settings.tee
    is_logged = request.settings.log_dir if tee is None else tee != "0"
    if where.processes == 1 and not is_logged and not request.get("max_restarts"):
        for name in ("stop_timeout", "preemption_grace"):
            yield name, "the launcher becomes the script, and no process waits for another"
    if tee == "0":
        yield "log_dir", f"{request.origin('tee').where} is 0: nothing is logged"


def _setting_effects(request: LaunchRequest, where: LaunchDeviceSelection) -> Iterator[tuple[str, str]]:
    """Yield what some settings do here; see ``LaunchPlan.setting_effects``."""
    yield "num_processes", "one process" if where.processes == 1 else f"{where.processes} processes"
    if where.visible is not None:
        yield "gpu_ids", f"{where.device.visible_variable}={where.visible}: the processes see only these"
    if where.processes == 1 and not asks_for_group(request):
        note = "the script is told; one process opens no group unless its code does"
        yield "main_process_port", f"MASTER_PORT: {note}"


def shared_variables(
    request: LaunchRequest, where: LaunchDeviceSelection, machine: DeviceProbeHost
) -> dict[str, object | None]:
    """Return the variables of every process; None removes a variable that it must not inherit."""
    variables: dict[str, object | None] = {
        **environ.filter_unset(where.device.environment),
        **request.script_variables(),
    }
    if where.device.type == "cpu" and request.distributed_type == CPU_GROUP:
        variables["ACCELERATE_USE_CPU"] = "true"
    if where.visible is not None and where.device.visible_variable is not None:
        variables[where.device.visible_variable] = where.visible
    threads = request.settings.num_cpu_threads_per_process
    if threads is None and where.processes > 1 and environ.get("OMP_NUM_THREADS") is None:
        threads = max(1, count_cores(machine) // where.processes)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    return variables


def ranks_variables(
    request: LaunchRequest, size: int, port: object, run_id: str, restarts: tuple[int, int] = (0, 0)
) -> Iterator[Variables]:
    """Yield the variables of each process of a job on this machine alone; see ``torchrun_variables``."""
    if size == 1 and not asks_for_group(request):
        counted = {"TORCHELASTIC_RESTART_COUNT": restarts[0], "TORCHELASTIC_MAX_RESTARTS": restarts[1]}
        yield {**single_process_variables(request), **(counted if restarts[1] else {})}
        return
    # An address of a machine among several may be none of this machine: rank 0 could not listen there.
    yield from torchrun_variables(size, LOOPBACK, port, run_id, role=request.settings.role, restarts=restarts)


def asks_for_group(request: LaunchRequest) -> bool:
    """Return whether a lone process opens a group too: code of such a training uses torch.distributed."""
    return bool(request.strategy_switches) or request.get("multi_gpu") or request.names_accelerators


def torchrun_variables(
    count: int,
    address: object,
    port: object,
    run_id: str,
    *,
    role: str = "default",
    restarts: tuple[int, int] = (0, 0),
    first: int = 0,
    size: object = None,
    machine: object = 0,
    machines: object = 1,
) -> Iterator[Variables]:
    """Yield torchrun's protocol for the processes of this machine.

    Args:
        count: how many they are.
        address, port: where rank 0 listens.
        run_id: the name of the job; libraries name their folders by it.
        role: a name that the processes are told.
        restarts: how often they were started again, and how often they may be.
        first: the rank of the first of them.
        size: of the world; None for ``count``.
        machine, machines: the number of this machine, and how many there are.

    Source: PyTorch documentation, "torchrun (Elastic Launch)", section "Environment Variables".
    """
    size = count if size is None else size
    for local in range(count):
        yield {
            "RANK": first + local,
            "LOCAL_RANK": local,
            "ROLE_RANK": first + local,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": count,
            "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": machine,
            "GROUP_WORLD_SIZE": machines,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "ROLE_NAME": role,
            # Libraries ask by this name whether torchrun's protocol is spoken.
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": restarts[0],
            "TORCHELASTIC_MAX_RESTARTS": restarts[1],
            # Of a surrounding torchrun: its store and its error file are not this job's.
            "TORCHELASTIC_USE_AGENT_STORE": None,
            "TORCHELASTIC_ERROR_FILE": None,
        }


# Takes the variables of a rank away from a process that is none.
NO_RANK_VARIABLES: Variables = dict.fromkeys(next(torchrun_variables(1, None, None, "")))


def single_process_variables(request: LaunchRequest) -> Variables:
    """Return the variables of a lone process, which opens no group.

    Where it would, if it did, is told only if somebody said so. A rank or a world size that an earlier job
    has left in the environment is taken away; those of a world of one, which torchrun gives too, stay. They
    are given where a scheduler's variables would make the process one of several.
    """
    job, variables = request.settings, dict[str, object | None]()
    if job.main_process_ip or job.main_process_port:
        variables["MASTER_ADDR"] = LOOPBACK
    if job.main_process_port:
        variables["MASTER_PORT"] = job.main_process_port
    scheduler = clusters.find_scheduler(environ.snapshot())
    if scheduler is not None and (scheduler.size or 1) > 1:
        return {**WORLD_OF_ONE, "MASTER_ADDR": LOOPBACK, **variables}
    stale = {name for name, value in WORLD_OF_ONE.items() if environ.get(name) not in (None, value)}
    if environ.get("WORLD_SIZE") != WORLD_OF_ONE["WORLD_SIZE"]:
        stale.add("RANK")
    return {**variables, **{name: None for name in WORLD_OF_ONE if name in stale}}


def script_command(request: LaunchRequest) -> tuple[str, ...]:
    """The command of a process that nobody watches."""
    if request.settings.no_python:
        return request.program
    return (sys.executable, *(("-m",) if request.settings.module else ()), *request.program)


def replace_process(request: LaunchRequest, env: dict[str, str]) -> None:
    """Replace this process by the script.

    Raises:
        LaunchError: the program cannot be started.
        SystemExit: on Windows, where the script is a child, with its exit code.
    """
    program = script_command(request)
    sys.stdout.flush()
    sys.stderr.flush()
    with explain_start_error(program[0]):
        if sys.platform == "win32":  # its exec returns at once, and splits arguments at spaces
            import subprocess

            process = subprocess.Popen(program, env=env)
            while True:
                with suppress(KeyboardInterrupt):  # the script hears of it too, and ends when it wants to
                    sys.exit(process.wait())
        exec_program(program, env)


def exec_program(program: tuple[str, ...], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program, found on the PATH.

    Python ignores some signals, and a program inherits that: a shell's pipes would never break.
    ``subprocess`` restores them for the programs that it starts.
    """
    import signal

    for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvpe(program[0], program, env)


PLUGIN = LocalLaunch()
