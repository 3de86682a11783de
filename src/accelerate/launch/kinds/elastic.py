"""Launching on several machines, and starting again when a process fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.core.frozen import frozen
from accelerate.device.machine import Machine
from accelerate.launch.base import Kind, say
from accelerate.launch.check import Place, place
from accelerate.launch.elastic import settings
from accelerate.launch.elastic.settings import STATIC, Endpoint, Rendezvous
from accelerate.launch.job import Request
from accelerate.launch.kinds.local import alone, own_variables, program_of, shared_variables
from accelerate.launch.logs import Logs
from accelerate.launch.plan import Plan, Start, Variables


@frozen
class ElasticPlan(Plan):
    """Processes on this machine, among those of others.

    Attributes:
        place: their devices, and how many there are here.
        endpoint: where the machines meet; None for one machine.
        conf: more about how they meet.
    """

    place: Place
    endpoint: Endpoint | None
    conf: dict[str, str]


class Elastic(Kind[ElasticPlan]):
    """Several machines, or processes that are started again when one fails."""

    name: ClassVar[str] = "several machines, restarts"
    priority: ClassVar[int] = 10
    settings: ClassVar[tuple[type[Any], ...]] = (Rendezvous,)

    def takes(self, request: Request) -> bool:
        """Jobs on several machines, and jobs that may start again."""
        return request.machines != (1, 1) or request.of(Rendezvous).max_restarts > 0

    def plan(self, request: Request) -> ElasticPlan:
        """Chooses devices, processes and the place to meet; see ``Kind.plan``."""
        settings.refuse(request)
        machine, conf = Machine(), settings.configuration(request)
        where, several = place(request, machine), request.machines[1] > 1
        endpoint = settings.endpoint(request) if several else None
        if endpoint is not None:
            _check_number(request, endpoint)
        return ElasticPlan(
            kind=self.name,
            facts=tuple(_facts(request, where, endpoint)),
            variables=shared_variables(request, where, machine),
            starts=tuple(_starts(request, where, endpoint)),
            notes=(),
            place=where,
            endpoint=endpoint,
            conf=conf,
            unused=tuple(_unused(request)),
        )

    def run(self, request: Request, plan: ElasticPlan, *, replace: bool) -> None:
        """Starts the job; see ``Kind.run``. This process stays: it watches."""
        from accelerate.launch.elastic.attempt import Attempts
        from accelerate.launch.ranks import Guard, Signals
        from accelerate.launch.watched import own_folder

        logs = Logs(request.settings.tee, request.settings.log_dir)
        with own_folder() as folder, Guard(request.settings.stop_timeout) as guard, Signals() as signals:
            attempts = Attempts(request, logs, folder, guard, signals)
            run = _run_here if plan.endpoint is None else _run_machines
            run(request, plan, attempts)


def _run_here(request: Request, plan: ElasticPlan, attempts: Any) -> None:
    from accelerate.launch.elastic import restarts
    from accelerate.launch.watched import own_port

    size, most = plan.place.processes, request.of(Rendezvous).max_restarts
    run_id = os.urandom(4).hex()

    def owns(restart: int) -> list[Variables]:
        counted = {"TORCHELASTIC_RESTART_COUNT": restart, "TORCHELASTIC_MAX_RESTARTS": most}
        each = [alone(request)] if port is None else own_variables(request, size, port.number, run_id)
        return [{**plan.variables, **own, **counted} for own in each]

    with own_port(request, size) as port:
        restarts.run(attempts, size, most, owns, lambda line: say(request, line))


def _run_machines(request: Request, plan: ElasticPlan, attempts: Any) -> None:
    from accelerate.launch import preflight
    from accelerate.launch.elastic.link import Link
    from accelerate.launch.elastic.machines import Machines

    assert plan.endpoint is not None
    asked, (least, most) = request.of(Rendezvous), request.machines
    join, said, where = settings.joining(plan.conf), request.local_processes.value, plan.place
    job = {
        "backend": asked.rdzv_backend,
        "host": plan.endpoint.host,
        "port": plan.endpoint.port,
        "id": asked.rdzv_id,
        "conf": plan.conf,
        "join": join,
        "least": least,
        "most": most,
        "machine_rank": request.settings.machine_rank,
        "processes": plan.place.processes,
        "facts": preflight.facts(where.device.type, None if isinstance(said, int) else where.processes),
        "max_restarts": asked.max_restarts,
        "monitor_interval": asked.monitor_interval,
        "machine_timeout": asked.machine_timeout,
    }
    Machines(
        attempts,
        Link(job, attempts.guard, request.settings.stop_timeout),
        lambda world: [
            {**plan.variables, **own} for own in _told(request, world, plan.place.processes, asked.rdzv_id)
        ],
        timeout=asked.machine_timeout,
        join=join,
        place=str(plan.endpoint),
        static=asked.rdzv_backend == STATIC,
        say=lambda line: say(request, line),
    ).run()


def _told(request: Request, world: dict[str, Any], count: int, run_id: str) -> Iterator[Variables]:
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


def _check_number(request: Request, endpoint: Endpoint) -> None:
    """Refuses machine 0 by default where rank 0 is plainly elsewhere: the others would wait for ever."""
    from accelerate.launch.elastic.meeting import is_here

    asked, number = request.of(Rendezvous), request.origin("machine_rank")
    if asked.rdzv_backend == STATIC and number.source == "default" and not is_here(endpoint.host):
        raise SettingError(
            f"{endpoint.where} is {endpoint.host}, which is not this machine, "
            "but machine_rank is 0 (the default)",
            why="rank 0 runs on machine 0, and the others find it by that address",
            fix="give each machine its own --machine_rank, from 0",
        )


def _facts(request: Request, where: Place, endpoint: Endpoint | None) -> Iterator[tuple[str, str]]:
    asked, (least, most) = request.of(Rendezvous), request.machines
    here, device = where.processes, where.device.type
    yield "machines", str(most) if least == most else f"{least} to {most}"
    if endpoint is not None:
        static = asked.rdzv_backend == STATIC
        yield "this machine", str(request.settings.machine_rank) if static else "numbered when they meet"
        yield "rendezvous", f"{asked.rdzv_backend} at {endpoint} ({endpoint.where})"
    total = str(here * most) if least == most else f"{here * least} to {here * most}"
    yield "processes", total if most == 1 else f"{total}, {here} on this machine"
    yield "devices", device if here == 1 else f"{here} x {device}"
    yield "restarts", str(asked.max_restarts)


def _starts(request: Request, where: Place, endpoint: Endpoint | None) -> Iterator[Start]:
    program, here = program_of(request), where.processes
    if endpoint is None:
        port = request.settings.main_process_port or "a free port"
        each = [alone(request)] if here == 1 else own_variables(request, here, port, "a new name")
        yield from (Start(f"rank {rank}", program, told) for rank, told in enumerate(each))
        return
    asked, (_, most) = request.of(Rendezvous), request.machines
    static = asked.rdzv_backend == STATIC
    number = request.settings.machine_rank
    world = {
        "address": endpoint.host if static else "the address of machine 0",
        "port": endpoint.port if static else "a free port",
        "size": here * most if static else "as many as meet",
        "first": number * here if static else 0,
        "machine": number if static else "as they meet",
        "machines": most if static else "as many as meet",
        "restarts": 0,
        "max_restarts": asked.max_restarts,
        "interface": None,
    }
    for local, told in enumerate(_told(request, world, here, asked.rdzv_id)):
        own = told if static else {**told, "RANK": "as they meet", "ROLE_RANK": "as they meet"}
        yield Start(f"rank {told['RANK']}" if static else f"local rank {local}", program, own)


def _unused(request: Request) -> Iterator[tuple[str, str]]:
    """What says nothing in this job; see ``Plan.unused``."""
    asked = request.of(Rendezvous)
    yield "same_network", "machines are reached by their addresses, on one network or not"
    if request.machines == (1, 1):
        why = "there is one machine"
        for name in ("machine_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"):
            yield name, why
        yield "monitor_interval", f"{why}; ends of its processes are seen at once"
        yield "machine_timeout", why
    elif asked.rdzv_backend != STATIC:
        yield "machine_rank", f"{asked.rdzv_backend} numbers the machines as they meet"


PLUGIN = Elastic()
