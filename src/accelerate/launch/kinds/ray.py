"""Launching on a Ray cluster: Ray places the processes, launchers on its machines start and watch them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from accelerate.core.errors import SettingError
from accelerate.core.setting import setting
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand, print_line
from accelerate.launch.kinds.elastic import parse_join_timeout, parse_rdzv_conf
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.manifest import iterate_flags

_PLACED = "Ray places the processes"


@frozen_dataclass
class RaySettings:
    """Starting the processes on a Ray cluster."""

    __topic__ = "Several machines, Ray"

    ray: bool = setting(
        False, variable=None, help="start the processes on a Ray cluster, in a placement group"
    )
    ray_address: str | None = setting(
        None,
        variable=None,
        help="the address of the cluster; by default that of RAY_ADDRESS or of a cluster that runs here, "
        "else Ray is started on this machine",
    )
    ray_resources: str | None = setting(
        None,
        variable=None,
        help="what Ray gives each process, like CPU=4,GPU=1; by default CPU=1, and GPU=1 where the cluster "
        "has GPUs",
    )
    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = setting(
        "PACK", variable=None, help="Ray's strategy of placement: on few machines, or one process on each"
    )


class RayLaunch(LaunchKind[LaunchPlan]):
    """Processes on the machines of a Ray cluster."""

    name: ClassVar[str] = "Ray"
    priority: ClassVar[int] = 60
    asked_by: ClassVar[tuple[str, ...]] = ("ray",)
    settings: ClassVar[tuple[type[Any], ...]] = (RaySettings,)
    reads: ClassVar[tuple[str, ...]] = ("max_restarts", "monitor_interval", "machine_timeout", "rdzv_conf")

    def accepts(self, request: LaunchRequest) -> bool:
        """Every job that asks for Ray."""
        return request.values_of(RaySettings).ray

    def check(self, request: LaunchRequest) -> None:
        """Refuse resources that are none; see ``LaunchKind.check``."""
        parse_resources(request)

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Describe the job; which machines take part, Ray decides. See ``LaunchKind.plan``."""
        self.check(request)
        options, resources = request.values_of(RaySettings), parse_resources(request)
        count = _count_processes(request)
        place = ("--num_machines", "as placed", "--nproc_per_node", "as placed")
        return LaunchPlan(
            kind=self.name,
            facts=(
                ("processes", str(count) if count else "one for each GPU of the cluster"),
                ("cluster", options.ray_address or "RAY_ADDRESS, one that runs here, or a new one"),
                ("each process", ", ".join(f"{k}={v:g}" for k, v in resources.items()) or "CPU=1, a GPU=1"),
                ("placement", options.ray_placement),
            ),
            variables={},
            commands=(
                PlannedCommand(
                    "each machine",
                    ("accelerate", "launch", *place, *iterate_flags(request), *request.program),
                ),
            ),
            unused_settings=tuple(_unused_settings()),
        )

    def run(self, request: LaunchRequest, plan: LaunchPlan, *, replace: bool) -> None:
        """Start the job; see ``LaunchKind.run``."""
        from accelerate.launch.ray_job import RayJob

        options = request.values_of(RaySettings)
        # Lines of several machines meet in one console.
        marks = () if request.settings.tee is not None else ("--tee", "3")
        RayJob(
            processes=_count_processes(request),
            resources=parse_resources(request),
            placement=options.ray_placement,
            address=options.ray_address,
            uses_cpu=bool(request.get("use_cpu")),
            max_restarts=request.get("max_restarts"),
            join_timeout=parse_join_timeout(request, parse_rdzv_conf(request)),
            print_line=lambda line: print_line(request, line),
        ).run_script((*marks, *iterate_flags(request)), request.program, plan.variables)


def parse_resources(request: LaunchRequest) -> Mapping[str, float]:
    """Return what Ray gives each process, by name; empty for the default.

    Raises:
        SettingError: it is not written ``NAME=COUNT,NAME=COUNT``.
    """
    origin = request.origin("ray_resources")
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in str(origin.value or "").split(","))):
        name, _, count = part.partition("=")
        try:
            resources[name.strip()] = float(count)
        except ValueError as error:
            raise SettingError(
                f"{origin.where} has the part {part!r}, which names no resource", fix="write CPU=4,GPU=1"
            ) from error
    return resources


def _count_processes(request: LaunchRequest) -> int | None:
    """Return the number of processes; None for one for each GPU of the cluster."""
    count = request.settings.num_processes
    return count if isinstance(count, int) else None


def _unused_settings() -> Iterator[tuple[str, str]]:
    """Yield the settings without use on Ray; see ``LaunchPlan.unused_settings``."""
    for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "nproc_per_node"):
        yield name, f"{_PLACED}; -n counts all of them"
    yield "gpu_ids", f"{_PLACED}, each on a device of its own"


PLUGIN = RayLaunch()
