"""Launching on several machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.core.setting import setting
from accelerate.core.value_types import Index, PositiveNumber, frozen_dataclass
from accelerate.device import DeviceProbeHost
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand, Variables, print_line
from accelerate.launch.device_selection import LaunchDeviceSelection, allocate_devices, unused_type
from accelerate.launch.kinds.local import script_command, shared_variables, torchrun_variables
from accelerate.launch.launch_request import MULTI_MACHINE, LaunchRequest
from accelerate.launch.logs import RankLogSettings

STATIC, DYNAMIC = "static", "c10d"
DEFAULT_PORTS = {STATIC: 29500, DYNAMIC: 29400}  # torchrun's, where nobody says another
DEFAULT_JOIN_TIMEOUT = 600.0  # seconds that machines wait for each other, where nobody says another number


@frozen_dataclass
class ElasticLaunchSettings:
    """How machines find each other, and what happens when a process fails."""

    __topic__ = "Several machines, restarts"

    rdzv_backend: str = setting(
        STATIC,
        help="how machines find each other: static, each knows its number; c10d, they number themselves; or "
        "another one that torch.distributed.elastic knows",
        question="Rendezvous backend?",
        when=MULTI_MACHINE,
    )
    rdzv_endpoint: str | None = setting(
        None,
        help="where they find each other, HOST:PORT; by default the address and port of rank 0",
    )
    rdzv_conf: str | None = setting(
        None,
        help="more about it, like join_timeout=600,last_call_timeout=30: seconds to wait for the fewest "
        "machines, and then for more",
    )
    rdzv_id: str = setting("none", help="the name of the job, where several use one endpoint")
    max_restarts: Index = setting(
        0, help="how often the processes are started again when one fails, on all machines together"
    )
    monitor_interval: PositiveNumber = setting(
        0.1, help="seconds between looks at the other machines, 1 at most"
    )
    machine_timeout: PositiveNumber = setting(
        60.0, help="seconds without a word from a machine after which it is lost, and the job ends"
    )
    same_network: bool = setting(
        False,
        help="the machines share a network; they are reached by their addresses, shared or not",
    )


@frozen_dataclass
class RendezvousEndpoint:
    """The host and port where machines meet.

    Attributes:
        host: a name or an address.
        port: of it.
        where: the setting that says so.
    """

    host: str
    port: int
    where: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@frozen_dataclass
class ElasticLaunchPlan(LaunchPlan):
    """Processes on this machine, among those of others.

    Attributes:
        allocation: their devices, and how many there are here.
        endpoint: where the machines meet.
        conf: more about how they meet.
    """

    allocation: LaunchDeviceSelection
    endpoint: RendezvousEndpoint
    conf: dict[str, str]


class ElasticLaunch(LaunchKind[ElasticLaunchPlan]):
    """Several machines."""

    name: ClassVar[str] = "several machines"
    priority: ClassVar[int] = 10
    asked_by: ClassVar[tuple[str, ...]] = ("num_machines",)
    settings: ClassVar[tuple[type[Any], ...]] = (ElasticLaunchSettings,)

    def accepts(self, request: LaunchRequest) -> bool:
        """Every job on several machines."""
        return request.machines != (1, 1)

    def check(self, request: LaunchRequest) -> None:
        """Refuse what contradicts itself; see ``LaunchKind.check``. An address may still come by a flag."""
        least, most = request.machines
        machines = f"{request.origin('num_machines').where} {request.settings.num_machines}"
        if request.settings.standalone:
            raise SettingError(
                f"--standalone and {machines} do not go together",
                why="the first says that there is one machine",
                fix="keep one of them",
            )
        if request.values_of(ElasticLaunchSettings).rdzv_backend == STATIC and least != most:
            raise SettingError(
                f"{request.origin('num_machines').where} is {request.settings.num_machines}, but a static "
                "rendezvous has a fixed number of machines",
                why="each of them has its number from the start",
                fix="add --rdzv_backend c10d",
            )
        parse_rdzv_conf(request)
        _ = request.local_processes
        if _knows_endpoint(request):
            find_endpoint(request)

    def plan(self, request: LaunchRequest) -> ElasticLaunchPlan:
        """Choose devices, processes and the place to meet; see ``LaunchKind.plan``."""
        self.check(request)
        machine, conf = DeviceProbeHost(), parse_rdzv_conf(request)
        allocation, endpoint = allocate_devices(request, machine), find_endpoint(request)
        _check_machine_rank(request, endpoint)
        return ElasticLaunchPlan(
            kind=self.name,
            facts=tuple(_facts(request, allocation, endpoint)),
            variables=shared_variables(request, allocation, machine),
            commands=tuple(_planned_commands(request, allocation, endpoint)),
            notes=tuple(_unread_conf(request, conf)),
            allocation=allocation,
            endpoint=endpoint,
            conf=conf,
            unused_settings=(*_unused_settings(request), *unused_type(request, allocation.device)),
        )

    def run(self, request: LaunchRequest, plan: ElasticLaunchPlan, *, replace: bool) -> None:
        """Start the job; see ``LaunchKind.run``. This process stays: it watches."""
        from accelerate.launch.elastic import rendezvous
        from accelerate.launch.elastic.attempts import ElasticAgentProcess, MultiMachineAttemptRunner
        from accelerate.launch.supervisor import open_attempts

        options, (least, most) = request.values_of(ElasticLaunchSettings), request.machines
        allocation = plan.allocation
        # Where nobody has said how many processes a machine starts, all have to find as many devices.
        counted = None if isinstance(request.local_processes.value, int) else allocation.processes
        job = {
            "backend": options.rdzv_backend,
            "host": plan.endpoint.host,
            "port": plan.endpoint.port,
            "id": options.rdzv_id,
            "conf": plan.conf,
            "join": parse_join_timeout(request, plan.conf),
            "least": least,
            "most": most,
            "machine_rank": request.settings.machine_rank,
            "processes": allocation.processes,
            "facts": rendezvous.machine_facts(allocation.device.type, counted),
            "max_restarts": options.max_restarts,
            "monitor_interval": options.monitor_interval,
            "machine_timeout": options.machine_timeout,
        }
        logs = RankLogSettings(request.settings.tee, request.settings.log_dir)
        with open_attempts(request, logs) as attempts:
            MultiMachineAttemptRunner(
                attempts,
                ElasticAgentProcess(job, attempts.guard),
                lambda world: [
                    {**plan.variables, **variables}
                    for variables in _ranks_variables(request, world, allocation.processes, options.rdzv_id)
                ],
                job,
                str(plan.endpoint),
                lambda line: print_line(request, line),
            ).run()


def _ranks_variables(
    request: LaunchRequest, world: dict[str, Any], count: int, run_id: str
) -> Iterator[Variables]:
    """Yield the variables of the processes of this machine, by what the machines agreed on."""
    # The agent of machine 0 holds the store; no rank opens one.
    common: dict[str, object | None] = {"TORCHELASTIC_USE_AGENT_STORE": True}
    if world["interface"] is not None and environ.get("GLOO_SOCKET_IFNAME") is None:
        common["GLOO_SOCKET_IFNAME"] = world["interface"]
    each = torchrun_variables(
        count,
        world["address"],
        world["port"],
        run_id,
        role=request.settings.role,
        restarts=(world["restarts"], world["max_restarts"]),
        first=world["first"],
        size=world["size"],
        machine=world["machine"],
        machines=world["machines"],
    )
    yield from ({**variables, **common} for variables in each)


def parse_rdzv_conf(request: LaunchRequest) -> dict[str, str]:
    """``rdzv_conf`` as a table.

    Raises:
        SettingError: it is not written ``key=value,key=value``, or a number in it is none; in strict mode, it
            has what the rendezvous does not read.
    """
    text = request.values_of(ElasticLaunchSettings).rdzv_conf or ""
    location = request.origin("rdzv_conf").where
    conf: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        key, equals, value = part.partition("=")
        if not equals:
            raise SettingError(f"{location} has the part {part!r}", fix="write key=value,key=value")
        conf[key] = value
    unread = next(_unread_conf(request, conf), "")
    if unread and "strict" in request.origins and request.get("strict"):
        raise SettingError(unread, why=f"{request.origin('strict').where} asks for an error")
    parse_join_timeout(request, conf)
    return conf


def _unread_conf(request: LaunchRequest, conf: Mapping[str, str]) -> Iterator[str]:
    """Yield a line about what a rendezvous of torch does not read: job scripts in use pass it."""
    backend = request.values_of(ElasticLaunchSettings).rdzv_backend
    unread = {STATIC: conf.keys() - {"timeout", "join_timeout", "rank"}, DYNAMIC: conf.keys() & {"timeout"}}
    if keys := sorted(unread.get(backend, ())):
        more = "; --rdzv_backend c10d reads more" if backend == STATIC else ""
        yield (
            f"{request.origin('rdzv_conf').where} sets {', '.join(keys)}, which a {backend} rendezvous does "
            f"not read: it reads join_timeout{more}"
        )


def parse_join_timeout(request: LaunchRequest, conf: Mapping[str, str]) -> float:
    """Seconds that the machines wait for each other; torch's static rendezvous calls them ``timeout``.

    Raises:
        SettingError: it is no number.
    """
    is_c10d = request.values_of(ElasticLaunchSettings).rdzv_backend == DYNAMIC
    names = ("join_timeout",) if is_c10d else ("join_timeout", "timeout")
    text = next((conf[name] for name in names if name in conf), str(DEFAULT_JOIN_TIMEOUT))
    where = request.origin("rdzv_conf").where
    try:
        return float(text)
    except ValueError as error:
        raise SettingError(f"{where} has a join_timeout of {text!r}", fix="give seconds") from error


def find_endpoint(request: LaunchRequest) -> RendezvousEndpoint:
    """Return the endpoint where the machines of a request meet.

    Raises:
        SettingError: nobody says where, two settings disagree, or the port is none.
    """
    options, job = request.values_of(ElasticLaunchSettings), request.settings
    endpoint_origin, address = request.origin("rdzv_endpoint"), request.origin("main_process_ip")
    if not _knows_endpoint(request):
        raise SettingError(
            f"{job.num_machines} machines ({request.origin('num_machines').where}) need a place to meet",
            why="each of them must know where rank 0 is",
            fix="give all of them the same --main_process_ip and --main_process_port",
        )
    default = job.main_process_port or DEFAULT_PORTS.get(options.rdzv_backend, DEFAULT_PORTS[DYNAMIC])
    if options.rdzv_endpoint is None:
        return RendezvousEndpoint(job.main_process_ip or "", default, address.where)
    host, port = _split_endpoint(options.rdzv_endpoint, endpoint_origin.where)
    # Where a scheduler would have them meet, or a default, does not contradict what somebody wrote.
    main_port = request.origin("main_process_port")
    ip_of_user, port_of_user = (
        None if origin.source in ("default", "scheduler") else origin.value for origin in (address, main_port)
    )
    differs = address if host != ip_of_user else None
    if differs is None and None not in (port, port_of_user) and port != port_of_user:
        differs = main_port
    if options.rdzv_backend == STATIC and ip_of_user is not None and differs is not None:
        raise SettingError(
            f"{endpoint_origin.where} is {endpoint_origin.value}, but {differs.where} is {differs.value}",
            why="a static rendezvous meets at the address and port of rank 0",
            fix="keep one of them",
        )
    return RendezvousEndpoint(host, port or default, endpoint_origin.where)


def _knows_endpoint(request: LaunchRequest) -> bool:
    options = request.values_of(ElasticLaunchSettings)
    return options.rdzv_endpoint is not None or request.settings.main_process_ip is not None


def _split_endpoint(text: str, where: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    if port and not (port.isdecimal() and 0 < int(port) <= 65535):
        raise SettingError(f"{where} is {text}, but {port} is no port", fix="write HOST:PORT")
    if not host:
        raise SettingError(f"{where} is {text}, which names no host", fix="write HOST:PORT")
    return host.strip("[]"), int(port) if port else None


def _check_machine_rank(request: LaunchRequest, endpoint: RendezvousEndpoint) -> None:
    """Refuse machine 0 by default where rank 0 is plainly elsewhere: the others would wait for ever."""
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
    request: LaunchRequest, where: LaunchDeviceSelection, endpoint: RendezvousEndpoint
) -> Iterator[tuple[str, str]]:
    options, (least, most) = request.values_of(ElasticLaunchSettings), request.machines
    processes, device = where.processes, where.device.type
    yield "machines", str(most) if least == most else f"{least} to {most}"
    static = options.rdzv_backend == STATIC
    yield "this machine", str(request.settings.machine_rank) if static else "numbered when they meet"
    yield "rendezvous", f"{options.rdzv_backend} at {endpoint} ({endpoint.where})"
    total = str(processes * most) if least == most else f"{processes * least} to {processes * most}"
    yield "processes", f"{total}, {processes} on this machine"
    yield "devices", device if processes == 1 else f"{processes} x {device}"
    yield "restarts", str(options.max_restarts)


def _planned_commands(
    request: LaunchRequest, where: LaunchDeviceSelection, endpoint: RendezvousEndpoint
) -> Iterator[PlannedCommand]:
    program, processes = script_command(request), where.processes
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
    for local, variables in enumerate(_ranks_variables(request, world, processes, options.rdzv_id)):
        if not static:
            variables = {**variables, "RANK": "as they meet", "ROLE_RANK": "as they meet"}
        yield PlannedCommand(
            f"rank {variables['RANK']}" if static else f"local rank {local}", program, variables
        )


def _unused_settings(request: LaunchRequest) -> Iterator[tuple[str, str]]:
    """Yield the settings without use in this job; see ``LaunchPlan.unused_settings``."""
    options = request.values_of(ElasticLaunchSettings)
    yield "same_network", "machines are reached by their addresses, on one network or not"
    if options.rdzv_backend != STATIC:
        yield "machine_rank", f"{options.rdzv_backend} numbers the machines as they meet"


PLUGIN = ElasticLaunch()
