"""The launcher: refuses what contradicts itself, chooses the kind of launch, and has it plan and run the job.

Every error of two settings that do not go together names both places.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import LaunchError, SettingError, nearest
from accelerate.core.value_types import LocalCount, convert_to
from accelerate.launch.base import LaunchKind, origin_variables, print_line, requested_options
from accelerate.launch.config_files import list_names
from accelerate.launch.job_scheduler import OUTER_LAUNCH_VARIABLE, overridden_lines
from accelerate.launch.kinds import KINDS
from accelerate.launch.kinds.local import NO_RANK_VARIABLES
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import parse_tee
from accelerate.world.clusters import find_scheduler

STDIN = "-"  # the script is what stands on standard input, as in ``python -``


def choose_kind(request: LaunchRequest) -> LaunchKind[Any]:
    """The kind of launch for a request; between them, the kinds of this package take every one."""
    given = {name for name, (origin, *_) in request.origins.items() if origin.source != "default"}
    asked = [kind for kind in KINDS if not kind.asked_by or given.intersection(kind.asked_by)]
    return max((kind for kind in asked if kind.accepts(request)), key=lambda kind: kind.priority)


def launch(request: LaunchRequest, *, replace: bool = False) -> None:
    """Run a request: check it, choose the kind of launch, start it, and return when it has ended well.

    With ``--dry_run`` the plan is printed, with ``--print_manifest`` a manifest, and nothing is started.

    Args:
        request: what was asked.
        replace: this process may be replaced by the script.

    Raises:
        AccelerateError: it cannot be started as asked, or a rank failed (``RankError`` holds the exit code).
    """
    check_request(request)
    if request.settings.print_manifest:
        if request.program[0] == STDIN:
            _refuse_stdin(request)
        from accelerate.launch import manifest

        manifest.print_manifest(request)
        return
    kind = choose_kind(request)
    plan = kind.plan(request)
    becomes_script = replace and len(plan.commands) == 1
    if request.program[0] == STDIN and not (becomes_script and kind.passes_stdin(request)):
        _refuse_stdin(request)
    lines = overridden_lines(request.scheduler, request.origins) if request.scheduler else ()
    plan = dataclasses.replace(
        plan,
        notes=(*request.notes, *lines, *plan.notes),
        variables={**plan.variables, **origin_variables(request)},
    )
    options = requested_options(request, kind, plan)
    problems = () if request.file is None else request.file.problems
    fix = f"accelerate config update --config_file {request.file.path}" if problems and request.file else ""
    unused_texts = [option.unused_text for option in options if option.unused_reason and option.is_explicit]
    unused = [*problems, *unused_texts]
    if request.settings.dry_run:
        from accelerate.launch import dry_run

        dry_run.print_plan(request, plan, options)
    if unused and "strict" in request.origins and request.get("strict"):
        raise SettingError(
            unused[0],
            why="; ".join([f"{request.origin('strict').where} asks for an error", *unused[1:]]),
            fix=fix or ("leave it out" if len(unused) == 1 else "leave them out"),
        )
    if request.settings.dry_run:
        for problem in problems:  # the tables have the options of the file without them
            print_line(request, problem)
        if request.settings.dry_run_model:
            from accelerate.launch import dry_run

            dry_run.run_model_dry_run(request, plan)
        return
    if request.file is not None and not request.file.is_explicit:
        print_line(request, f"settings from {request.file.path} (--config_file names another)")
    for note in (*plan.notes, *unused):
        print_line(request, note)
    handed_on = {**request.script_variables(), **origin_variables(request)}
    record = {OUTER_LAUNCH_VARIABLE: record_variables(handed_on)}
    if (scheduler := find_scheduler(environ.snapshot())) is not None:
        record |= scheduler.mark_task()
    plan = dataclasses.replace(plan, variables={**plan.variables, **record})
    kind.run(request, plan, replace=replace)


# --- a launch inside another one
#
# A script that a launcher has started starts a launcher, say for an evaluation. It inherits what the outer
# launcher told its script: rank and address, precision, the way of training. It is no rank of that job, and
# its own flags and files count. So every launcher records the settings that it hands on, and one that finds
# such a record takes them back before it reads its own. Devices and threads are no such settings: an inner
# launch stays within those of the outer one.


def record_variables(variables: Mapping[str, object | None]) -> str:
    """Return the record of the settings that a launcher hands on, each with what the variable was before."""
    values = {name: None if value is None else str(value) for name, value in variables.items()}
    return json.dumps({name: (value, environ.get(name)) for name, value in values.items()})


@contextmanager
def leave_outer_launch() -> Generator[None]:
    """Take back what an outer launch has set, while a launch is read and run; what its script set stays."""
    env = environ.snapshot()
    if OUTER_LAUNCH_VARIABLE not in env:
        yield
        return
    record: dict[str, tuple[str | None, str | None]] = json.loads(env[OUTER_LAUNCH_VARIABLE])
    former = {name: before for name, (value, before) in record.items() if env.get(name) == value}
    place = f"rank {env['RANK']} of {env['WORLD_SIZE']}" if env.get("RANK") and env.get("WORLD_SIZE") else ""
    with environ.patch_environment({**former, **NO_RANK_VARIABLES, OUTER_LAUNCH_VARIABLE: place}):
        yield


# --- what contradicts itself, whatever the machine


# Two settings of which only one can be on, and what they ask for.
CONFLICTS = (
    ("use_cpu", "multi_gpu", "one asks for the CPU, the other insists on accelerators"),
    ("use_cpu", "tpu", "each asks for another device"),
    ("multi_gpu", "tpu", "each asks for another device"),
    ("ray", "tpu", "each starts the processes in its own way"),
    ("ray", "print_manifest", "Ray starts the processes, a manifest has a cluster start them"),
    ("module", "no_python", "a module is started by Python, a program by itself"),
)


def check_request(request: LaunchRequest) -> None:
    """Refuse what contradicts itself, whatever the machine.

    Raises:
        SettingError: two settings do not go together.
        LaunchError: there is no script.
    """
    job = request.settings
    if job.tee is not None:
        parse_tee(job.tee)
    _, machines = request.machines
    if job.machine_rank >= machines:
        raise SettingError(
            f"{_describe_setting(request, 'machine_rank')}, but {_describe_setting(request, 'num_machines')}",
            why=f"machines are counted from 0: the last of {machines} is {machines - 1}",
        )
    for name, sharers in (("num_processes", machines), ("nproc_per_node", 1)):
        origin = request.origin(name)
        local = -(-origin.value // sharers) if isinstance(origin.value, int) else 1
        if not convert_to(LocalCount, local, "file")[0]:
            raise SettingError(
                f"{origin.where} asks for {local} processes on this machine",
                why="more than 10000 on one machine are a slip, and would take all its memory",
                fix="say how many processes all machines start together (-n), and how many there are",
            )
    _refuse_conflicts(request)
    if job.dry_run_model and not job.dry_run:
        raise SettingError(
            f"{request.origin('dry_run_model').where} is given, but --dry_run is not",
            why="it says which model a dry run spreads; a script that is run has its own",
            fix="add --dry_run, or leave it out",
        )
    for cls in request.loaded:  # what asks for it refuses what contradicts itself
        if hasattr(cls, "check") and request.is_asked_for(cls):
            cls.check(request.origins.__getitem__)
    _check_program(request)


def _refuse_conflicts(request: LaunchRequest) -> None:
    """Refuse settings that exclude each other.

    Raises:
        SettingError: there are some; the error names both places.
    """
    enabled = {name for name, (origin, *_) in request.origins.items() if origin.value}
    for first, second, why in CONFLICTS:
        if {first, second} <= enabled:
            raise _conflict_error(request.origin(first).where, request.origin(second).where, why)
    engines = request.strategy_switches
    for first, second in combinations(engines, 2):
        raise _conflict_error(
            engines[first].where, engines[second].where, "one training is spread in one way"
        )
    for engine, place in engines.items():
        if "tpu" in enabled:
            raise _conflict_error(
                place.where, request.origin("tpu").where, "a TPU has a way of training of its own"
            )
        mesh, version = "use_parallelism_config", "fsdp_version"
        if engine == "use_fsdp" and mesh in enabled and request.get(version) == 1:
            raise SettingError(
                f"{_describe_setting(request, mesh)}, but {_describe_setting(request, version)}",
                why="only FSDP2 shards over a device mesh of several dimensions",
                fix=f"leave out {version}, or make it 2",
            )


def _conflict_error(one: str, other: str, why: str) -> SettingError:
    return SettingError(f"{one} and {other} do not go together", why=why, fix="keep one of them")


def _describe_setting(request: LaunchRequest, name: str) -> str:
    """``"--num_machines is 2"``, ``"num_machines is 1 (the default)"``."""
    origin = request.origin(name)
    if origin.source == "default":
        return f"{name} is {origin.value} (the default)"
    return f"{origin.where} is {origin.value}"


def _refuse_stdin(request: LaunchRequest) -> None:
    """Refuse a script on standard input that this process does not become.

    Raises:
        LaunchError: several processes would read it, or it would have to be passed on.
    """
    if not (request.settings.module or request.settings.no_python):
        raise LaunchError(
            "the script is read from standard input (-), which only a lone process on this machine can do",
            fix="save it to a file; or start one process, -n 1, without --tee and --log_dir",
        )


def _check_program(request: LaunchRequest) -> None:
    """Refuse a script that is not there; modules are looked for by the Python that runs them.

    Raises:
        LaunchError: no script, one that may not be looked at, or no such file; a similar name in its folder
            is suggested.
    """
    if not request.program:
        raise LaunchError(
            "there is nothing to launch",
            why="no script was given",
            fix="accelerate launch [flags] train.py [arguments of train.py]",
        )
    if request.settings.module or request.settings.no_python or request.program[0] == STDIN:
        return
    script = Path(request.program[0])
    try:
        is_folder = stat.S_ISDIR(os.stat(script).st_mode)
        if not is_folder or os.path.isfile(script / "__main__.py"):
            return
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL character
        is_folder = False
    except OSError as error:
        raise LaunchError(f"the script {script} cannot be read", why=error.strerror or str(error)) from error
    if is_folder:
        raise LaunchError(f"{script} is a folder without a __main__.py", fix="name the script inside it")
    folder = script.parent
    if not os.path.isdir(folder):
        raise LaunchError(f"there is no script {script}", why=f"there is no folder {folder}")
    try:
        searched = folder.resolve()
    except FileNotFoundError:
        raise LaunchError(
            f"there is no script {script}",
            why="the working folder does not exist any more",
            fix="change to another one: cd $HOME, or cd $PWD if the folder was made anew",
        ) from None
    fix = ""
    if re.fullmatch(r"python[\d.]*", script.name) and len(request.program) > 1:
        fix = f"leave out {script}: accelerate launch [flags] {request.program[1]}"
    elif near := nearest(script.name, list_names(folder)):
        fix = f"did you mean {folder / near}?"
    raise LaunchError(f"there is no script {script}", why=f"looked for it in {searched}", fix=fix)
