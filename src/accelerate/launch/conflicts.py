"""Conflicts between settings, on any machine. Every error names the two places."""

from __future__ import annotations

from itertools import combinations

from accelerate.core.errors import SettingError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.launch.launch_request import LaunchRequest

NOT_DISTRIBUTED = "NO"


@frozen_dataclass
class SettingConflictRule:
    """Two settings of which only one can be on.

    Attributes:
        first: a setting.
        second: another one.
        why: what they ask for.
        flags_only: only where both were typed: files describe more than one job needs.
    """

    first: str
    second: str
    why: str
    flags_only: bool = False


CONFLICTS = (
    SettingConflictRule("use_cpu", "multi_gpu", "one asks for the CPU, the other insists on accelerators"),
    SettingConflictRule("use_cpu", "tpu", "each asks for another device"),
    SettingConflictRule("multi_gpu", "tpu", "each asks for another device"),
    SettingConflictRule("use_cpu", "gpu_ids", "a CPU has no device numbers", flags_only=True),
    SettingConflictRule("module", "no_python", "a module is started by Python, a program by itself"),
)


def refuse_conflicts(request: LaunchRequest) -> None:
    """Refuses settings that contradict each other.

    Raises:
        SettingError: there are some; the error names both places.
    """
    for clash in CONFLICTS:
        if _is_on(request, clash.first, clash.flags_only) and _is_on(request, clash.second, clash.flags_only):
            raise _conflict_error(
                request.origin(clash.first).where, request.origin(clash.second).where, clash.why
            )
    engines = request.strategy_switches
    for first, second in combinations(engines, 2):
        raise _conflict_error(
            engines[first].where, engines[second].where, "one training is spread in one way"
        )
    for engine, place in engines.items():
        if _is_on(request, "tpu"):
            raise _conflict_error(
                place.where, request.origin("tpu").where, "a TPU has a way of training of its own"
            )
        _refuse_fsdp1_mesh(request, engine)
    _refuse_several_processes_of_no(request)
    _refuse_model_without_dry_run(request)


def _refuse_model_without_dry_run(request: LaunchRequest) -> None:
    """A model that is only to be tried is not taken by a run."""
    if request.settings.dry_run_model and not request.settings.dry_run:
        raise SettingError(
            f"{request.origin('dry_run_model').where} is given, but --dry_run is not",
            why="it says which model a dry run spreads; a script that is run has its own",
            fix="add --dry_run, or leave it out",
        )


def _refuse_fsdp1_mesh(request: LaunchRequest, engine: str) -> None:
    """Refuse a device mesh with FSDP1: only FSDP2 (``fully_shard``) shards over one."""
    mesh, version = "use_parallelism_config", "fsdp_version"
    if engine == "use_fsdp" and _is_on(request, mesh) and request.get(version) == 1:
        raise SettingError(
            f"{describe_setting(request, mesh)}, but {describe_setting(request, version)}",
            why="only FSDP2 shards over a device mesh of several dimensions",
            fix=f"leave out {version}, or make it 2",
        )


def _refuse_several_processes_of_no(request: LaunchRequest) -> None:
    kind, processes = request.origin("distributed_type"), request.origin("num_processes")
    several = processes.source == "file" and processes.value not in (None, 1)
    if str(kind.value).upper() == NOT_DISTRIBUTED and several:
        raise SettingError(
            f"{processes.where} is {processes.value}, but {kind.where} is {NOT_DISTRIBUTED}",
            why=f"{NOT_DISTRIBUTED} means one process",
            fix="leave distributed_type out: it follows from the devices and the number of processes",
        )


def _is_on(request: LaunchRequest, name: str, flags_only: bool = False) -> bool:
    if name not in request:
        return False
    origin = request.origin(name)
    return bool(origin.value) and (origin.source == "flag" or not flags_only)


def _conflict_error(one: str, other: str, why: str) -> SettingError:
    return SettingError(f"{one} and {other} do not go together", why=why, fix="keep one of them")


def describe_setting(request: LaunchRequest, name: str) -> str:
    """``"--num_machines is 2"``, ``"num_machines is 1 (the default)"``."""
    origin = request.origin(name)
    if origin.source == "default":
        return f"{name} is {origin.value} (the default)"
    return f"{origin.where} is {origin.value}"
