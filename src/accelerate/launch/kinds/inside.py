"""A launcher that somebody has started once for each process: it becomes the script, as that rank.

``srun -n4 accelerate launch train.py``, ``mpirun -np 4 accelerate launch train.py`` and a launcher under
torchrun start nothing more. Where one launcher was started on each of several machines (``srun
--ntasks-per-node=1``, a pod of a container cluster), it is a rank too if its machine has one process to
start: without more than one device, and unless restarts, or more processes than machines, are asked for.
Otherwise it is a launcher of several machines, whose place the scheduler tells.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError, SettingError
from accelerate.core.frozen import frozen
from accelerate.device.machine import Machine
from accelerate.launch.around import Around
from accelerate.launch.base import Kind
from accelerate.launch.check import Place, chosen, cores
from accelerate.launch.job import Request
from accelerate.launch.kinds.local import become, program_of, shared_variables, startable
from accelerate.launch.logs import Logs
from accelerate.launch.plan import Plan, Start, Variables
from accelerate.world.variables import DEFAULT_PORT


@frozen
class InsidePlan(Plan):
    """One process, which this one becomes.

    Attributes:
        rank: its rank.
    """

    rank: int


class Inside(Kind[InsidePlan]):
    """A rank that a scheduler, mpirun or torchrun has started."""

    name: ClassVar[str] = "one rank of a job that is started already"
    priority: ClassVar[int] = 100

    def takes(self, request: Request) -> bool:
        """Every launcher that is a rank itself; see the rule above."""
        around = request.around
        return around is not None and (around.is_rank or _is_all(request, around))

    def plan(self, request: Request) -> InsidePlan:
        """Finds the place of the rank; see ``Kind.plan``."""
        around, machine = request.around, Machine()
        assert around is not None
        _agree(request, around)
        device, count, ids = chosen(request, machine)
        visible = ",".join(map(str, ids)) if ids is not None else None
        where = Place(device, count, visible, around.local_size)
        own = place_variables(request, around)
        note = (
            f"the ranks of this job are the {around.size} processes that {around.name} has started; "
            "nothing more is started here"
        )
        return InsidePlan(
            kind=self.name,
            facts=(
                ("rank", f"{around.rank} of {around.size}, started by {around.name}"),
                ("machine", f"{around.node} of {around.nodes}"),
                ("devices", device.type),
            ),
            variables={**shared_variables(request, where, machine), **_threads(request, around, machine)},
            starts=(Start(f"rank {around.rank}", program_of(request), own),),
            notes=() if around.rank else (note,),
            rank=around.rank,
            effects=tuple(_effects(request, around)),
        )

    def run(self, request: Request, plan: InsidePlan, *, replace: bool) -> None:
        """Becomes the rank; see ``Kind.run``."""
        logs = Logs(request.settings.tee, request.settings.log_dir)
        own: Variables = {**plan.variables, **plan.starts[0].variables, "ACCELERATE_STOP_FOLDER": None}
        if replace and not logs.active:
            become(request, environ.child(own))
        else:
            _supervise(request, plan.rank, own, logs)


def _is_all(request: Request, around: Around) -> bool:
    """Whether the one launcher of a machine has no more than one process to start there."""
    if request.machines != (around.nodes, around.nodes):
        return False
    if "max_restarts" in request and request.get("max_restarts"):
        return False
    wanted = request.local_processes.value
    if isinstance(wanted, int):
        return wanted == 1
    return wanted != "cpu" and chosen(request, Machine())[1] <= 1


def place_variables(request: Request, around: Around) -> dict[str, object | None]:
    """torchrun's protocol for one rank.

    Raises:
        LaunchError: nobody says where rank 0 is.
    """
    address = request.settings.main_process_ip
    if address is None:
        raise LaunchError(
            f"{around.size} processes on {around.nodes} machines were started by {around.name}, which does "
            "not say where rank 0 runs",
            why="MASTER_ADDR is not set",
            fix="add --main_process_ip HOST with the name of the machine of rank 0, the same for all",
        )
    return {
        "RANK": around.rank,
        "LOCAL_RANK": around.local_rank,
        "WORLD_SIZE": around.size,
        "LOCAL_WORLD_SIZE": around.local_size,
        "GROUP_RANK": around.node,
        "GROUP_WORLD_SIZE": around.nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": request.settings.main_process_port or DEFAULT_PORT,
    }


def _agree(request: Request, around: Around) -> None:
    """Refuses numbers that are not those of the job around.

    Raises:
        SettingError: there is one; the error names both places.
    """
    place = {
        "num_processes": (around.size, "processes were started"),
        "nproc_per_node": (around.local_size, "processes were started on this machine"),
        "num_machines": (around.nodes, "machines take part"),
        "machine_rank": (around.node, "is the number of this machine"),
    }
    for name, (value, means) in place.items():
        given = request.origin(name)
        if given.source not in ("code", "flag", "environment") or str(given.value) == str(value):
            continue
        if str(given.value).isdecimal():
            said = around.told[name].where if name in around.told else around.name
            raise SettingError(
                f"{given.where} is {given.value}, but {value} {means} ({said})",
                why=f"{around.name} has started this launcher as rank {around.rank} of {around.size}, "
                "and it starts nothing more",
                fix=f"leave {given.where.split()[-1]} out; for a job of its own, unset {around.mark}",
            )
    _keep_store(request, around)


def _keep_store(request: Request, around: Around) -> None:
    """The ranks of torchrun meet at a store that it has opened already.

    Raises:
        SettingError: another address or port is given.
    """
    for name in (
        ("main_process_ip", "main_process_port") if environ.flag("TORCHELASTIC_USE_AGENT_STORE") else ()
    ):
        given, told = request.origin(name), around.told.get(name)
        if told is not None and str(given.value) != str(told.value):
            raise SettingError(
                f"{given.where} is {given.value}, but {told.where} is {told.value}",
                why=f"{around.name} has started this process, and its ranks meet there",
                fix=f"leave {given.where.split()[-1]} out",
            )


def _threads(request: Request, around: Around, machine: Machine) -> Variables:
    """A process that is bound to some of the cores has its share already."""
    if request.settings.num_cpu_threads_per_process is not None or environ.get("OMP_NUM_THREADS"):
        return {}
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if bound and bound < (os.cpu_count() or 1) and around.local_size > 1:
        return {"OMP_NUM_THREADS": cores(machine)}
    return {}


def _effects(request: Request, around: Around) -> Iterator[tuple[str, str]]:
    yield "num_processes", f"the {around.size} processes that {around.name} has started"
    yield "main_process_ip", f"MASTER_ADDR={request.settings.main_process_ip}"
    yield "main_process_port", f"MASTER_PORT={request.settings.main_process_port or DEFAULT_PORT}"


def _supervise(request: Request, rank: int, variables: Variables, logs: Logs) -> None:
    """Runs the rank below this process, which reads its output or outlives it."""
    from accelerate.launch import report
    from accelerate.launch.ranks import Command, Ranks
    from accelerate.launch.watched import own_folder, watched

    with own_folder() as folder:
        env = environ.child({**variables, "ACCELERATE_STOP_FOLDER": folder})
        command = Command(watched(request, folder, rank), env, *logs.pipes(rank))
        ranks = Ranks(
            [command],
            stop_timeout=request.settings.stop_timeout,
            raised=lambda _, pid: report.raised(folder, rank, pid),
            armed=lambda pid: report.armed(folder, pid),
            grace=request.settings.preemption_grace,
            started=lambda _, process: logs.read(rank, process),
        )
        with startable(command.program[0]):
            outcome = ranks.run()
        logs.finish()
        ends = [dataclasses.replace(end, rank=rank) for end in outcome.ends]
        error = report.failure(
            dataclasses.replace(outcome, ends=ends), folder, request.around.size if request.around else None
        )
    if error is not None:
        raise error


PLUGIN = Inside()
