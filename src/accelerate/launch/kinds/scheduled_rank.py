"""A launcher that somebody has started once for each process: it becomes the script, as that rank.

``srun -n4 accelerate launch train.py``, ``mpirun -np 4 accelerate launch train.py`` and a launcher under
torchrun start nothing more. Where one launcher was started on each of several machines (``srun
--ntasks-per-node=1``, a pod of a container cluster), it is a rank too if its machine has one process to
start: without more than one device, and unless restarts, or more processes than machines, are asked for.
Otherwise it is a launcher of several machines, whose place the scheduler tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError, SettingError
from accelerate.device import DeviceProbeHost, count_cores
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand, Variables
from accelerate.launch.device_selection import select_devices, unused_type
from accelerate.launch.job_scheduler import JobSchedulerContext
from accelerate.launch.kinds.local import replace_process, script_command, shared_variables
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import RankLogSettings
from accelerate.world.network import DEFAULT_PORT


class ScheduledRankLaunch(LaunchKind[LaunchPlan]):
    """A rank that a scheduler, mpirun or torchrun has started."""

    name: ClassVar[str] = "one rank of a job that is started already"
    priority: ClassVar[int] = 100
    asked_by: ClassVar[tuple[str, ...]] = ("num_machines",)  # every scheduler says how many there are

    def accepts(self, request: LaunchRequest) -> bool:
        """Every launcher that is a rank itself; see the rule above."""
        scheduler = request.scheduler
        return scheduler is not None and (scheduler.is_rank or _is_only_process(request, scheduler))

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Find the place of the rank; see ``LaunchKind.plan``."""
        scheduler, machine = request.scheduler, DeviceProbeHost()
        assert scheduler is not None
        _refuse_other_numbers(request, scheduler)
        allocation = select_devices(request, machine, scheduler.local_size)
        variables = rank_variables(request, scheduler)
        note = (
            f"the ranks of this job are the {scheduler.size} processes that {scheduler.name} has started; "
            "nothing more is started here"
        )
        return LaunchPlan(
            kind=self.name,
            facts=(
                ("rank", f"{scheduler.rank} of {scheduler.size}, started by {scheduler.name}"),
                ("machine", f"{scheduler.node} of {scheduler.nodes}"),
                ("devices", allocation.device.type),
            ),
            variables={
                **shared_variables(request, allocation, machine),
                **_thread_variables(request, scheduler, machine),
            },
            commands=(PlannedCommand(f"rank {scheduler.rank}", script_command(request), variables),),
            notes=() if scheduler.rank else (note,),
            unused_settings=tuple(unused_type(request, allocation.device)),
            setting_effects=tuple(_setting_effects(request, scheduler)),
        )

    def run(self, request: LaunchRequest, plan: LaunchPlan, *, replace: bool) -> None:
        """Become the rank; see ``LaunchKind.run``."""
        logs = RankLogSettings(request.settings.tee, request.settings.log_dir)
        variables: Variables = {
            **plan.variables,
            **plan.commands[0].variables,
            "ACCELERATE_STOP_FOLDER": None,
        }
        if replace and not logs.is_active:
            replace_process(request, environ.make_child_environment(variables))
        else:
            _run_supervised(request, variables, logs)


def _is_only_process(request: LaunchRequest, scheduler: JobSchedulerContext) -> bool:
    """Return whether this machine has no more than one process to start."""
    if request.machines != (scheduler.nodes, scheduler.nodes):
        return False
    if request.get("max_restarts"):
        return False
    processes = request.local_processes.value
    if isinstance(processes, int):
        return processes == 1
    return processes != "cpu" and select_devices(request, DeviceProbeHost()).count <= 1


def rank_variables(request: LaunchRequest, scheduler: JobSchedulerContext) -> dict[str, object | None]:
    """torchrun's protocol for one rank.

    Raises:
        LaunchError: nobody says where rank 0 is.
    """
    address = request.settings.main_process_ip
    if address is None:
        raise LaunchError(
            f"{scheduler.size} processes on {scheduler.nodes} machines were started by {scheduler.name}, "
            "which does not say where rank 0 runs",
            why="MASTER_ADDR is not set",
            fix="add --main_process_ip HOST with the name of the machine of rank 0, the same for all",
        )
    return {
        "RANK": scheduler.rank,
        "LOCAL_RANK": scheduler.local_rank,
        "WORLD_SIZE": scheduler.size,
        "LOCAL_WORLD_SIZE": scheduler.local_size,
        "GROUP_RANK": scheduler.node,
        "GROUP_WORLD_SIZE": scheduler.nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": request.settings.main_process_port or DEFAULT_PORT,
    }


def _refuse_other_numbers(request: LaunchRequest, scheduler: JobSchedulerContext) -> None:
    """Refuse numbers that are not those of the job around.

    Raises:
        SettingError: there is one; the error names both places.
    """
    place = {
        "num_processes": (scheduler.size, "processes were started"),
        "nproc_per_node": (scheduler.local_size, "processes were started on this machine"),
        "num_machines": (scheduler.nodes, "machines take part"),
        "machine_rank": (scheduler.node, "is the number of this machine"),
    }
    for name, (value, means) in place.items():
        origin = request.origin(name)
        if origin.source not in ("code", "flag", "environment") or str(origin.value) == str(value):
            continue
        if str(origin.value).isdecimal():
            location = scheduler.settings[name].where if name in scheduler.settings else scheduler.name
            raise SettingError(
                f"{origin.where} is {origin.value}, but {value} {means} ({location})",
                why=f"{scheduler.name} has started this launcher as rank {scheduler.rank} of "
                f"{scheduler.size}, and it starts nothing more",
                fix=f"leave {origin.where.split()[-1]} out; for a job of its own, "
                f"unset {scheduler.rank_variable}",
            )
    _refuse_other_store(request, scheduler)


def _refuse_other_store(request: LaunchRequest, scheduler: JobSchedulerContext) -> None:
    """The ranks of torchrun meet at a store that it has opened already.

    Raises:
        SettingError: another address or port is given.
    """
    has_store = environ.get_flag("TORCHELASTIC_USE_AGENT_STORE")
    for name in ("main_process_ip", "main_process_port") if has_store else ():
        origin, scheduler_value = request.origin(name), scheduler.settings.get(name)
        if scheduler_value is not None and str(origin.value) != str(scheduler_value.value):
            raise SettingError(
                f"{origin.where} is {origin.value}, but {scheduler_value.where} is {scheduler_value.value}",
                why=f"{scheduler.name} has started this process, and its ranks meet there",
                fix=f"leave {origin.where.split()[-1]} out",
            )


def _thread_variables(
    request: LaunchRequest, scheduler: JobSchedulerContext, machine: DeviceProbeHost
) -> Variables:
    """A process that is bound to some of the cores has its share already."""
    if request.settings.num_cpu_threads_per_process is not None or environ.get("OMP_NUM_THREADS"):
        return {}
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if bound and bound < (os.cpu_count() or 1) and scheduler.local_size > 1:
        return {"OMP_NUM_THREADS": count_cores(machine)}
    return {}


def _setting_effects(request: LaunchRequest, scheduler: JobSchedulerContext) -> Iterator[tuple[str, str]]:
    yield "num_processes", f"the {scheduler.size} processes that {scheduler.name} has started"
    yield "main_process_ip", f"MASTER_ADDR={request.settings.main_process_ip}"
    yield "main_process_port", f"MASTER_PORT={request.settings.main_process_port or DEFAULT_PORT}"


def _run_supervised(request: LaunchRequest, variables: Variables, logs: RankLogSettings) -> None:
    """Run the rank below this process, which reads its output or outlives it."""
    from accelerate.launch.supervisor import WorkerSupervisor, open_attempts

    assert request.scheduler is not None
    rank, size = request.scheduler.rank, request.scheduler.size
    with open_attempts(request, logs) as attempts:
        _, error = attempts.run(WorkerSupervisor, [variables], size=size, first_rank=rank, reads_stdin=True)
    if error is not None:
        raise error


PLUGIN = ScheduledRankLaunch()
