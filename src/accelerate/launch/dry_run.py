"""A plan for people: what would be started, and what each option does. ``--dry_run`` prints it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set

from accelerate.core import environ
from accelerate.core.errors import LaunchError
from accelerate.core.setting import declared_settings
from accelerate.core.tables import print_table
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch.base import LaunchOptionOrigin, LaunchPlan, PlannedCommand, display_value
from accelerate.launch.kinds.local import NO_RANK_VARIABLES
from accelerate.launch.launch_request import LaunchRequest, launcher_settings
from accelerate.strategy.launch_settings import SETTINGS

Row = tuple[str, ...]


@frozen_dataclass
class DryRunSection:
    """A part of what is shown.

    Attributes:
        title: its heading.
        rows: its lines, cell by cell; all of one length.
        column_titles: the headings of the cells, if they need any.
    """

    title: str
    rows: tuple[Row, ...]
    column_titles: Row = ()


def print_plan(request: LaunchRequest, plan: LaunchPlan, asked: Sequence[LaunchOptionOrigin]) -> None:
    """Print a plan on stdout, a table for each section."""
    for number, part in enumerate(part for part in plan_sections(request, plan, asked) if part.rows):
        if number:
            print()
        print_table(part.column_titles, part.rows, heading=part.title)


def run_model_dry_run(request: LaunchRequest, plan: LaunchPlan) -> None:
    """Spread ``--dry_run_model`` over processes that are not there, in a process of its own.

    Raises:
        LaunchError: the model cannot be spread so.
    """
    model, own = str(request.settings.dry_run_model), plan.commands[0].variables if plan.commands else {}
    environment = environ.make_child_environment({**plan.variables, **own, **NO_RANK_VARIABLES})
    command = [sys.executable, "-m", "accelerate.facade.dry_run", model]
    command += [str(_world_size(request, plan)), str(request.machines[1])]
    print(flush=True)
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise LaunchError(f"{model} cannot be spread as asked: the lines above say why")


def _world_size(request: LaunchRequest, plan: LaunchPlan) -> int:
    """All of them, on all machines."""
    count = request.settings.num_processes
    return count if isinstance(count, int) else max(1, len(plan.commands)) * request.machines[1]


def plan_sections(
    request: LaunchRequest, plan: LaunchPlan, asked: Sequence[LaunchOptionOrigin]
) -> Iterator[DryRunSection]:
    """Yield the sections of a plan, in order; some may be empty."""
    yield DryRunSection("A dry run: nothing is started", tuple(_fact_rows(request, plan)))
    yield DryRunSection("Commands", tuple(_command_rows(plan.commands)))
    common, specific = split_common_variables([start.variables for start in plan.commands])
    shared = {**plan.variables, **common}
    yield DryRunSection(
        "Environment of all: what is added and what is taken away", tuple(_variable_rows(shared))
    )
    yield DryRunSection(
        f"Environment of each ({_join_names([start.name for start in plan.commands])})",
        tuple(
            (name, _join_names([_variable_text(name, value) for value in values]))
            for name, values in specific.items()
        ),
    )
    effects = dict(plan.setting_effects)
    script_classes = [cls for cls in request.loaded if cls not in launcher_settings()]
    of_script = {row.name for cls in script_classes for row in declared_settings(cls)}
    shown = [option for option in asked if not option.unused_reason and option.setting.name != "dry_run"]
    rows = tuple(_option_row(option, effects, of_script) for option in shown)
    titles = ("option", "value", "from", "what it does", "instead of")
    # Seldom does one place overrule another: then the last column says which.
    columns = len(titles) if any(row[-1] for row in rows) else len(titles) - 1
    yield DryRunSection("What was asked", tuple(row[:columns] for row in rows), titles[:columns])
    yield DryRunSection(
        "Without effect",
        tuple((option.origin.where, option.unused_reason) for option in asked if option.unused_reason),
    )
    yield DryRunSection("Notes", tuple((note,) for note in plan.notes))


def _fact_rows(request: LaunchRequest, plan: LaunchPlan) -> Iterator[Row]:
    facts = dict(plan.facts)
    yield "launch", plan.kind
    yield "machines", facts.pop("machines", str(request.settings.num_machines))
    yield from facts.items()
    yield "strategy", _strategy_text(request, alone=facts.get("processes") == "1")
    if "use_parallelism_config" in request.origins and request.get("use_parallelism_config"):
        yield "mesh", _mesh_text(request, _world_size(request, plan))
    precision = request.origin("mixed_precision")
    yield "precision", f"{precision.value} ({precision.where})" if precision.value else "as the weights are"
    other = "" if request.file is None or request.file.is_explicit else " (--config_file names another)"
    yield "settings", f"from {request.file.path}{other}" if request.file else "from no file"
    yield "script", shlex.join(request.program)


def _strategy_text(request: LaunchRequest, *, alone: bool) -> str:
    for switch, place in request.strategy_switches.items():
        for name in SETTINGS.names():
            if any(row.name == switch for cls in SETTINGS.get(name) for row in declared_settings(cls)):
                return f"{name} ({place.where})"
    if alone:
        return "none: one process"
    return "parallelism" if request.get("use_parallelism_config") else "data parallel"


def _mesh_text(request: LaunchRequest, processes: int) -> str:
    """The dimensions, outermost first; neighbouring ranks meet in the last one."""
    from accelerate.world.mesh_layout import DIMENSIONS, MeshLayout

    sizes = {name: request.get(f"parallelism_config_{name}_size") or 1 for name in DIMENSIONS.values()}
    layout = MeshLayout(**{degree: sizes[name] for degree, name in DIMENSIONS.items()}).check(processes)
    shown = [f"{name} {sizes[name]}" for name in layout.axes()]
    return f"{' x '.join(shown) or 1} = {layout.size()} processes"


def _command_rows(starts: Sequence[PlannedCommand]) -> Iterator[Row]:
    programs: dict[tuple[str, ...], list[str]] = {}
    for start in starts:
        programs.setdefault(start.program, []).append(start.name)
    for program, names in programs.items():
        yield _join_names(names), shlex.join(program)


def split_common_variables(
    environments: Sequence[Mapping[str, object | None]],
) -> tuple[dict[str, object | None], dict[str, list[object | None]]]:
    """(what all are told alike, the others by name with the value of each)."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    values = {name: [environment.get(name) for environment in environments] for name in names}
    common = {name: each[0] for name, each in values.items() if all(value == each[0] for value in each)}
    return common, {name: each for name, each in values.items() if name not in common}


def _variable_rows(told: Mapping[str, object | None]) -> Iterator[Row]:
    environment = environ.snapshot()
    for name, value in sorted(told.items()):
        if value is not None:
            yield name, _variable_text(name, value)
        elif name in environment:
            yield name, "taken away"


def _variable_text(name: str, value: object | None) -> str:
    if name == "ACCELERATE_ASKED":
        return "what was asked, as listed below"
    return "taken away" if value is None else display_value(name, value) or '""'


def _join_names(words: Sequence[str]) -> str:
    """``rank 0, rank 1``; numbers that only count up are ``rank 0 to rank 7``."""
    if len(words) > 3:
        heads = [name.rstrip("0123456789") for name in words]
        tails = [name[len(head) :] for name, head in zip(words, heads, strict=True)]
        if len(set(heads)) == 1 and all(tails):
            numbers = [int(tail) for tail in tails]
            if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
                return f"{words[0]} to {words[-1]}"
    return ", ".join(words)


def _option_row(one: LaunchOptionOrigin, effects: Mapping[str, str], of_script: Set[str]) -> Row:
    """The cells of one option: its name, value, origin, what it does, and what it overrides.

    Args:
        one: the option.
        effects: what settings do in this job, where that is more than their help says.
        of_script: the settings that the script is told.
    """
    name, variable = one.setting.name, one.setting.variable
    value = display_value(name, one.origin.value)
    told = f"; the script is told {variable}={value}" if variable and name in of_script else ""
    others = "; ".join(f"{display_value(name, other.value)} ({other.where})" for other in one.overridden)
    return name, value, one.origin.where, effects.get(name) or one.setting.help + told, others
