"""The settings of jobs with restarts or on several machines."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.core.errors import SettingError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting
from accelerate.launch.launch_request import MULTI_MACHINE, LaunchRequest

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
        question="How do they find each other?",
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
    max_restarts: int = setting(
        0, help="how often the processes are started again when one fails, on all machines together"
    )
    monitor_interval: float = setting(0.1, help="seconds between looks at the other machines")
    machine_timeout: float = setting(
        60.0, help="seconds without a word from a machine after which it is lost, and the job ends"
    )
    same_network: bool = setting(
        False,
        help="the machines share a network; they are reached by their addresses, shared or not",
        question="Do they share a network?",
        when=MULTI_MACHINE,
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


def parse_rdzv_conf(request: LaunchRequest) -> dict[str, str]:
    """``rdzv_conf`` as a table.

    Raises:
        SettingError: it is not written ``key=value,key=value``, or a number in it is none.
    """
    text, location = (
        request.values_of(ElasticLaunchSettings).rdzv_conf or "",
        request.origin("rdzv_conf").where,
    )
    conf: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise SettingError(f"{location} has the part {part!r}", fix="write key=value,key=value")
        conf[key.strip()] = value.strip()
    if request.values_of(ElasticLaunchSettings).rdzv_backend == STATIC:
        for key in conf:
            if key not in ("timeout", "join_timeout", "rank"):
                raise SettingError(
                    f"{location} sets {key}, which a static rendezvous does not read",
                    fix="it reads join_timeout; --rdzv_backend c10d reads more",
                )
    parse_join_timeout(conf, location)
    return conf


def parse_join_timeout(conf: Mapping[str, str], where: str = "--rdzv_conf") -> float:
    """Seconds that the machines wait for each other.

    Raises:
        SettingError: it is no number.
    """
    text = conf.get("join_timeout", conf.get("timeout", str(DEFAULT_JOIN_TIMEOUT)))
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
    if options.rdzv_endpoint is None and job.main_process_ip is None:
        raise SettingError(
            f"{job.num_machines} machines ({request.origin('num_machines').where}) need a place to meet",
            why="each of them must know where rank 0 is",
            fix="give all of them the same --main_process_ip and --main_process_port",
        )
    default = job.main_process_port or DEFAULT_PORTS.get(options.rdzv_backend, DEFAULT_PORTS[DYNAMIC])
    if options.rdzv_endpoint is None:
        return RendezvousEndpoint(job.main_process_ip or "", default, address.where)
    host, port = _split_endpoint(options.rdzv_endpoint, endpoint_origin.where)
    # Where a scheduler would have them meet does not contradict what somebody wrote.
    written = job.main_process_ip is not None and address.source != "scheduler"
    both = options.rdzv_backend == STATIC and written
    if both and (host != job.main_process_ip or port not in (None, job.main_process_port)):
        raise SettingError(
            f"{endpoint_origin.where} is {endpoint_origin.value}, but {address.where} is {address.value}",
            why="a static rendezvous meets at the address and port of rank 0",
            fix="keep one of them",
        )
    return RendezvousEndpoint(host, port or default, endpoint_origin.where)


def _split_endpoint(text: str, where: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    if port and not (port.isdecimal() and 0 < int(port) <= 65535):
        raise SettingError(f"{where} is {text}, but {port} is no port", fix="write HOST:PORT")
    if not host:
        raise SettingError(f"{where} is {text}, which names no host", fix="write HOST:PORT")
    return host.strip("[]"), int(port) if port else None


def refuse_contradictions(request: LaunchRequest) -> None:
    """Refuses what contradicts itself.

    Raises:
        SettingError: two settings do not go together, or a number is out of its range.
    """
    options = request.values_of(ElasticLaunchSettings)
    least, most = request.machines
    for name in ("max_restarts", "monitor_interval", "machine_timeout"):
        if request.get(name) < 0:
            raise SettingError(f"{request.origin(name).where} is {request.get(name)}, but it is at least 0")
    if request.settings.standalone and most > 1:
        raise SettingError(
            f"--standalone and {request.origin('num_machines').where} {request.settings.num_machines} do not "
            "go together",
            why="the first says that there is one machine",
            fix="keep one of them",
        )
    if options.rdzv_backend == STATIC and least != most:
        raise SettingError(
            f"{request.origin('num_machines').where} is {request.settings.num_machines}, but a static "
            "rendezvous has a fixed number of machines",
            why="each of them has its number from the start",
            fix="add --rdzv_backend c10d",
        )
