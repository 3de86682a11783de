"""Launching on several machines, and starting again when a process fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.device.machine import DeviceProbeHost
from accelerate.launch.base import LaunchKind, print_line
from accelerate.launch.device_selection import LaunchDeviceSelection, allocate_devices
from accelerate.launch.elastic import settings
from accelerate.launch.elastic.settings import STATIC, ElasticLaunchSettings, RendezvousEndpoint
from accelerate.launch.kinds.local import (
    ranks_variables,
    script_command,
    shared_variables,
    single_process_variables,
)
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import RankLogSettings
from accelerate.launch.plan import LaunchPlan, PlannedCommand, Variables


@frozen_dataclass
class ElasticLaunchPlan(LaunchPlan):
    """Processes on this machine, among those of others.

    Attributes:
        allocation: their devices, and how many there are here.
        endpoint: where the machines meet; None for one machine.
        conf: more about how they meet.
    """

    allocation: LaunchDeviceSelection
    endpoint: RendezvousEndpoint | None
    conf: dict[str, str]


class ElasticLaunch(LaunchKind[ElasticLaunchPlan]):
    """Several machines, or processes that are started again when one fails."""

    name: ClassVar[str] = "several machines, restarts"
    priority: ClassVar[int] = 10
    settings: ClassVar[tuple[type[Any], ...]] = (ElasticLaunchSettings,)

    def accepts(self, request: LaunchRequest) -> bool:
        """Jobs on several machines, and jobs that may start again."""
        return request.machines != (1, 1) or request.values_of(ElasticLaunchSettings).max_restarts > 0

    def plan(self, request: LaunchRequest) -> ElasticLaunchPlan:
        """Chooses devices, processes and the place to meet; see ``LaunchKind.plan``."""
        settings.refuse_contradictions(request)
        machine, conf = DeviceProbeHost(), settings.parse_rdzv_conf(request)
        allocation, several = allocate_devices(request, machine), request.machines[1] > 1
        endpoint = settings.find_endpoint(request) if several else None
        if endpoint is not None:
            _check_machine_rank(request, endpoint)
        return ElasticLaunchPlan(
            kind=self.name,
            facts=tuple(_facts(request, allocation, endpoint)),
            variables=shared_variables(request, allocation, machine),
            commands=tuple(_planned_commands(request, allocation, endpoint)),
            notes=(),
            allocation=allocation,
            endpoint=endpoint,
            conf=conf,
            unused_settings=tuple(_unused_settings(request)),
        )

    def run(self, request: LaunchRequest, plan: ElasticLaunchPlan, *, replace: bool) -> None:
        """Starts the job; see ``LaunchKind.run``. This process stays: it watches."""
        from accelerate.launch.elastic.attempt import ElasticAttemptRunner
        from accelerate.launch.rank_commands import report_folder
        from accelerate.launch.supervisor import GuardProcess, SignalAndChildExitWaiter

        logs = RankLogSettings(request.settings.tee, request.settings.log_dir)
        with (
            report_folder() as folder,
            GuardProcess(request.settings.stop_timeout) as guard,
            SignalAndChildExitWaiter() as signals,
        ):
            attempts = ElasticAttemptRunner(request, logs, folder, guard, signals)
            run = _run_single_machine if plan.endpoint is None else _run_multi_machine
            run(request, plan, attempts)


def _run_single_machine(request: LaunchRequest, plan: ElasticLaunchPlan, attempts: Any) -> None:
    from accelerate.launch.elastic import single_machine_restarts
    from accelerate.launch.rank_commands import reserve_port

    size, most = plan.allocation.processes, request.values_of(ElasticLaunchSettings).max_restarts
    run_id = os.urandom(4).hex()

    def variables_of_restart(restart: int) -> list[Variables]:
        counted = {"TORCHELASTIC_RESTART_COUNT": restart, "TORCHELASTIC_MAX_RESTARTS": most}
        each = (
            [single_process_variables(request)]
            if port is None
            else ranks_variables(request, size, port.number, run_id)
        )
        return [{**plan.variables, **variables, **counted} for variables in each]

    with reserve_port(request, size) as port:
        single_machine_restarts.run_with_restarts(
            attempts, size, most, variables_of_restart, lambda line: print_line(request, line)
        )


def _run_multi_machine(request: LaunchRequest, plan: ElasticLaunchPlan, attempts: Any) -> None:
    from accelerate.launch import preflight
    from accelerate.launch.elastic.agent_process_handle import ElasticAgentProcess
    from accelerate.launch.elastic.multi_machine_runner import MultiMachineAttemptRunner

    assert plan.endpoint is not None
    options, (least, most) = request.values_of(ElasticLaunchSettings), request.machines
    join, local_processes, allocation = (
        settings.parse_join_timeout(plan.conf),
        request.local_processes.value,
        plan.allocation,
    )
    job = {
        "backend": options.rdzv_backend,
        "host": plan.endpoint.host,
        "port": plan.endpoint.port,
        "id": options.rdzv_id,
        "conf": plan.conf,
        "join": join,
        "least": least,
        "most": most,
        "machine_rank": request.settings.machine_rank,
        "processes": plan.allocation.processes,
        "facts": preflight.machine_facts(
            allocation.device.type, None if isinstance(local_processes, int) else allocation.processes
        ),
        "max_restarts": options.max_restarts,
        "monitor_interval": options.monitor_interval,
        "machine_timeout": options.machine_timeout,
    }
    MultiMachineAttemptRunner(
        attempts,
        ElasticAgentProcess(job, attempts.guard, request.settings.stop_timeout),
        lambda world: [
            {**plan.variables, **variables}
            for variables in _torchrun_variables(request, world, plan.allocation.processes, options.rdzv_id)
        ],
        timeout=options.machine_timeout,
        join=join,
        endpoint=str(plan.endpoint),
        is_static=options.rdzv_backend == STATIC,
        print_line=lambda line: print_line(request, line),
    ).run()


def _torchrun_variables(
    request: LaunchRequest, world: dict[str, Any], count: int, run_id: str
) -> Iterator[Variables]:
    """torchrun's protocol for the processes of this machine, by what the machines agreed on.

    Source: PyTorch documentation, "torchrun (Elastic Launch)", section "Environment Variables".
    """
    job: dict[str, object | None] = {
        "MASTER_ADDR": world["address"],
        "MASTER_PORT": world["port"],
        "WORLD_SIZE": world["size"],
        "ROLE_WORLD_SIZE": world["size"],
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": world["machine"],
        "GROUP_WORLD_SIZE": world["machines"],
        "ROLE_NAME": request.settings.role,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": world["restarts"],
        "TORCHELASTIC_MAX_RESTARTS": world["max_restarts"],
        # The agent of machine 0 holds the store; no rank opens one.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": None,
    }
    if world["interface"] is not None and environ.get("GLOO_SOCKET_IFNAME") is None:
        job["GLOO_SOCKET_IFNAME"] = world["interface"]
    for local in range(count):
        rank = world["first"] + local
        yield {**job, "RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local}


def _check_machine_rank(request: LaunchRequest, endpoint: RendezvousEndpoint) -> None:
    """Refuses machine 0 by default where rank 0 is plainly elsewhere: the others would wait for ever."""
    from accelerate.launch.elastic.rendezvous import is_this_machine

    options, number = request.values_of(ElasticLaunchSettings), request.origin("machine_rank")
    if options.rdzv_backend == STATIC and number.source == "default" and not is_this_machine(endpoint.host):
        raise SettingError(
            f"{endpoint.where} is {endpoint.host}, which is not this machine, "
            "but machine_rank is 0 (the default)",
            why="rank 0 runs on machine 0, and the others find it by that address",
            fix="give each machine its own --machine_rank, from 0",
        )


def _facts(
    request: LaunchRequest, where: LaunchDeviceSelection, endpoint: RendezvousEndpoint | None
) -> Iterator[tuple[str, str]]:
    options, (least, most) = request.values_of(ElasticLaunchSettings), request.machines
    processes, device = where.processes, where.device.type
    yield "machines", str(most) if least == most else f"{least} to {most}"
    if endpoint is not None:
        static = options.rdzv_backend == STATIC
        yield "this machine", str(request.settings.machine_rank) if static else "numbered when they meet"
        yield "rendezvous", f"{options.rdzv_backend} at {endpoint} ({endpoint.where})"
    total = str(processes * most) if least == most else f"{processes * least} to {processes * most}"
    yield "processes", total if most == 1 else f"{total}, {processes} on this machine"
    yield "devices", device if processes == 1 else f"{processes} x {device}"
    yield "restarts", str(options.max_restarts)


def _planned_commands(
    request: LaunchRequest, where: LaunchDeviceSelection, endpoint: RendezvousEndpoint | None
) -> Iterator[PlannedCommand]:
    program, processes = script_command(request), where.processes
    if endpoint is None:
        port = request.settings.main_process_port or "a free port"
        each = (
            [single_process_variables(request)]
            if processes == 1
            else ranks_variables(request, processes, port, "a new name")
        )
        yield from (PlannedCommand(f"rank {rank}", program, variables) for rank, variables in enumerate(each))
        return
    options, (_, most) = request.values_of(ElasticLaunchSettings), request.machines
    static = options.rdzv_backend == STATIC
    number = request.settings.machine_rank
    world = {
        "address": endpoint.host if static else "the address of machine 0",
        "port": endpoint.port if static else "a free port",
        "size": processes * most if static else "as many as meet",
        "first": number * processes if static else 0,
        "machine": number if static else "as they meet",
        "machines": most if static else "as many as meet",
        "restarts": 0,
        "max_restarts": options.max_restarts,
        "interface": None,
    }
    for local, variables in enumerate(_torchrun_variables(request, world, processes, options.rdzv_id)):
        shown_variables = (
            variables if static else {**variables, "RANK": "as they meet", "ROLE_RANK": "as they meet"}
        )
        yield PlannedCommand(
            f"rank {variables['RANK']}" if static else f"local rank {local}", program, shown_variables
        )


def _unused_settings(request: LaunchRequest) -> Iterator[tuple[str, str]]:
    """Yield the settings without use in this job; see ``LaunchPlan.unused_settings``."""
    options = request.values_of(ElasticLaunchSettings)
    yield "same_network", "machines are reached by their addresses, on one network or not"
    if request.machines == (1, 1):
        reason = "there is one machine"
        for name in ("machine_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"):
            yield name, reason
        yield "monitor_interval", f"{reason}; ends of its processes are seen at once"
        yield "machine_timeout", reason
    elif options.rdzv_backend != STATIC:
        yield "machine_rank", f"{options.rdzv_backend} numbers the machines as they meet"


PLUGIN = ElasticLaunch()
