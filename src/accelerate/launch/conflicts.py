"""What does not go together, whatever the machine. Every error names the two places that say so."""

from __future__ import annotations

from itertools import combinations

from accelerate.core.errors import SettingError
from accelerate.core.frozen import frozen
from accelerate.launch.job import Request

ALONE = "NO"


@frozen
class Clash:
    """Two settings of which only one can be on.

    Attributes:
        one: a setting.
        other: another one.
        why: what they ask for.
        typed: only where both were typed: files describe more than one job needs.
    """

    one: str
    other: str
    why: str
    typed: bool = False


CLASHES = (
    Clash("use_cpu", "multi_gpu", "one asks for the CPU, the other insists on accelerators"),
    Clash("use_cpu", "tpu", "each asks for another device"),
    Clash("multi_gpu", "tpu", "each asks for another device"),
    Clash("use_cpu", "gpu_ids", "a CPU has no device numbers", typed=True),
    Clash("module", "no_python", "a module is started by Python, a program by itself"),
)


def refuse(request: Request) -> None:
    """Refuses settings that contradict each other.

    Raises:
        SettingError: there are some; the error names both places.
    """
    for clash in CLASHES:
        if _on(request, clash.one, clash.typed) and _on(request, clash.other, clash.typed):
            raise _refusal(request.origin(clash.one).where, request.origin(clash.other).where, clash.why)
    engines = request.engines
    for one, other in combinations(engines, 2):
        raise _refusal(engines[one].where, engines[other].where, "one training is spread in one way")
    for engine, place in engines.items():
        if _on(request, "tpu"):
            raise _refusal(place.where, request.origin("tpu").where, "a TPU has a way of training of its own")
        _version_of_mesh(request, engine)
    _type_of_one(request)
    _rehearsal_alone(request)


def _rehearsal_alone(request: Request) -> None:
    """A model that is only to be tried is not taken by a run."""
    if request.settings.dry_run_model and not request.settings.dry_run:
        raise SettingError(
            f"{request.origin('dry_run_model').where} is given, but --dry_run is not",
            why="it says which model a dry run spreads; a script that is run has its own",
            fix="add --dry_run, or leave it out",
        )


def _version_of_mesh(request: Request, engine: str) -> None:
    """A mesh of several dimensions is cut by ``fully_shard`` only, version 2 of this engine."""
    mesh, version = "use_parallelism_config", "fsdp_version"
    if engine == "use_fsdp" and _on(request, mesh) and request.get(version) == 1:
        raise SettingError(
            f"{said(request, mesh)}, but {said(request, version)}",
            why="only version 2 shards over a mesh of several dimensions",
            fix=f"leave out {version}, or make it 2",
        )


def _type_of_one(request: Request) -> None:
    kind, processes = request.origin("distributed_type"), request.origin("num_processes")
    several = processes.source == "file" and processes.value not in (None, 1)
    if str(kind.value).upper() == ALONE and several:
        raise SettingError(
            f"{processes.where} is {processes.value}, but {kind.where} is {ALONE}",
            why=f"{ALONE} means one process",
            fix="leave distributed_type out: it follows from the devices and the number of processes",
        )


def _on(request: Request, name: str, typed: bool = False) -> bool:
    if name not in request:
        return False
    origin = request.origin(name)
    return bool(origin.value) and (origin.source == "flag" or not typed)


def _refusal(one: str, other: str, why: str) -> SettingError:
    return SettingError(f"{one} and {other} do not go together", why=why, fix="keep one of them")


def said(request: Request, name: str) -> str:
    """``"--num_machines is 2"``, ``"num_machines is 1 (the default)"``."""
    origin = request.origin(name)
    if origin.source == "default":
        return f"{name} is {origin.value} (the default)"
    return f"{origin.where} is {origin.value}"
