"""What is asked of a launch: the settings of the job, and those that are handed on to the script.

``Job`` says how to start processes and stays with the launcher, as do the settings of the kinds of launch
(``launch/kinds``). Handed settings are declared next to the code
that uses them; whoever calls the launcher says which they are. It reads them from flags and files, and hands
those that were given to the script by their environment variables, which is where a script looks when its
code says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from accelerate.core import environ
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.frozen import frozen
from accelerate.core.setting import SOURCES, Loaded, Origin, Setting, declared, load, setting
from accelerate.launch import files, sections
from accelerate.launch.around import Around, around
from accelerate.launch.files import ConfigFile
from accelerate.launch.kinds import KINDS
from accelerate.launch.several import SEVERAL

S = TypeVar("S")


@frozen
class Job:
    """How to start the processes of one script."""

    __topic__ = "Processes"

    num_processes: int | Literal["auto", "gpu", "cpu"] | None = setting(
        None,
        flags=("-n",),
        help="how many processes to start, on all machines together; by default one per device, one on a CPU",
        question="How many processes in all?",
    )
    nproc_per_node: int | Literal["auto", "gpu", "cpu"] | None = setting(
        None, variable=None, in_file=False, help="how many processes to start on each machine"
    )
    num_machines: int | str = setting(
        1,
        flags=("--nnodes",),
        help="how many machines take part: a number, or from 1 to 4 as 1:4",
        question="How many machines take part?",
    )
    standalone: bool = setting(
        False, variable=None, in_file=False, help="the job is on one machine and waits for no other"
    )
    machine_rank: int = setting(
        0,
        flags=("--node_rank",),
        help="the number of this machine, from 0",
        question="Which number has this machine?",
        when=SEVERAL,
    )
    main_process_ip: str | None = setting(
        None,
        flags=("--master_addr",),
        help="the address of rank 0",
        question="At which address is machine 0?",
        when=SEVERAL,
    )
    main_process_port: int | None = setting(
        None,
        flags=("--master_port",),
        help="the port of rank 0; by default, and with 0, a free one",
        question="At which port of machine 0 do they meet?",
        when=SEVERAL,
    )
    num_cpu_threads_per_process: int | None = setting(
        None, help="threads of each process's CPU kernels; by default the cores are shared out"
    )
    stop_timeout: float = setting(
        3.0, help="seconds that processes which are asked to stop have before they are killed"
    )
    preemption_grace: float | None = setting(
        None,
        help="seconds that processes have which stop in good order on a signal (accelerator.should_stop), "
        "before they are killed; by default as long as they need, or until a second signal",
    )
    multi_gpu: bool = setting(
        False, variable=None, in_file=False, topic="Hardware", help="insist on accelerators: fail without"
    )
    gpu_ids: str | int | None = setting(
        None, topic="Hardware", help="which devices to use: 'all', or their numbers like 0,2"
    )
    distributed_type: str | None = setting(
        None,
        flag=None,
        variable=None,
        topic="Hardware",
        help="one name for the devices and the way of training, as `accelerate config` writes it",
    )
    compute_environment: Literal["LOCAL_MACHINE", "AMAZON_SAGEMAKER"] = setting(
        "LOCAL_MACHINE", flag=None, variable=None, help="where the job runs"
    )
    module: bool = setting(
        False,
        flags=("-m",),
        variable=None,
        in_file=False,
        topic="Script",
        help="the script is a module, started like python -m",
    )
    no_python: bool = setting(
        False, variable=None, in_file=False, topic="Script", help="the script is a program, started as it is"
    )
    config_file: str | None = setting(
        None, in_file=False, topic="Script", help="a YAML or JSON file with any of these settings"
    )
    log_dir: str | None = setting(
        None, topic="Output", help="a folder for the output of each rank: rank_0.log, ... (--tee says which)"
    )
    tee: str | None = setting(
        None,
        flags=("-t",),
        topic="Output",
        help="which output to mark with its rank and to log: 0 none, 1 stdout, 2 stderr, 3 both; "
        "or by rank: 0:3,1:2",
    )
    role: str = setting("default", variable=None, topic="Output", help="a name that the processes are told")
    dry_run: bool = setting(
        False,
        variable=None,
        in_file=False,
        topic="Output",
        help="print what would be started, with what each option does and where it came from; start nothing",
    )
    dry_run_model: str | None = setting(
        None,
        variable=None,
        in_file=False,
        topic="Output",
        help="with --dry_run: spread this model on empty tensors and show what ranks hold; a folder with "
        "config.json, a name on the hub, or module:factory",
    )
    quiet: bool = setting(
        False, flags=("-q",), variable=None, in_file=False, topic="Output", help="say nothing but errors"
    )


def _names(cls: type[Any]) -> set[str]:
    return {row.name for row in declared(cls)}


def kept() -> tuple[type[Any], ...]:
    """The classes of settings that stay with the launcher."""
    return (Job, *(cls for kind in KINDS for cls in kind.settings))


def declarations(handed: Sequence[type[Any]]) -> tuple[Setting, ...]:
    """Every setting that a launch with these handed settings knows."""
    return tuple(row for cls in (*kept(), *handed) for row in declared(cls))


@frozen
class Request:
    """Everything that was asked, with where it came from.

    Attributes:
        settings: the job.
        loaded: every class of settings with its values and origins.
        program: the script, module or program, and its arguments, untouched.
        file: the configuration file in use.
        around: what a scheduler around the launcher says of the job.
    """

    settings: Job
    loaded: Mapping[type[Any], Loaded[Any]]
    program: tuple[str, ...]
    file: ConfigFile | None = None
    around: Around | None = None

    def __contains__(self, name: str) -> bool:
        """Whether there is a setting of that name."""
        return any(name in loaded.origins for loaded in self.loaded.values())

    def origins(self, name: str) -> tuple[Origin, ...]:
        """Every source that gave a value for a setting, the winner first."""
        for loaded in self.loaded.values():
            if name in loaded.origins:
                return loaded.origins[name]
        raise KeyError(name)

    def origin(self, name: str) -> Origin:
        """Where a setting's value came from."""
        return self.origins(name)[0]

    def of(self, cls: type[S]) -> S:
        """The values of one class of settings."""
        found: S = self.loaded[cls].value
        return found

    def get(self, name: str) -> Any:
        """The value of any setting, the job's or a handed one."""
        return self.origin(name).value

    @property
    def machines(self) -> tuple[int, int]:
        """The fewest and the most machines that take part: 2 is ``(2, 2)``, ``"1:4"`` is ``(1, 4)``.

        Raises:
            SettingError: it is neither a number nor a range.
        """
        origin = self.origin("num_machines")
        ends = str(origin.value).split(":")
        if not 1 <= len(ends) <= 2 or not all(end.strip().lstrip("-").isdecimal() for end in ends):
            raise SettingError(
                f"{origin.where} is {origin.value!r}, which says nothing about machines",
                fix="write a number, 2, or the fewest and the most, 1:4",
            )
        least, most = int(ends[0]), int(ends[-1])
        if not 1 <= least <= most:
            where = origin.where or "num_machines"
            raise SettingError(f"{where} is {origin.value}, but it is at least 1, and the fewest come first")
        return least, most

    @property
    def local_processes(self) -> Origin:
        """How many processes each machine starts, and who says so: a number, a word, or None.

        ``num_processes`` counts those of all machines, ``nproc_per_node`` those of each. Of two sources the
        stronger one wins, as for any setting.

        Raises:
            SettingError: the two disagree, or the processes cannot be shared out evenly.
        """
        total, each = self.origin("num_processes"), self.origin("nproc_per_node")
        least, most = self.machines
        if each.value is not None and SOURCES.index(each.source) < SOURCES.index(total.source):
            return each
        if each.value is not None and (least != most or total.value != each.value * most):
            raise SettingError(
                f"{total.where} is {total.value}, but {each.where} is {each.value}",
                why=f"the first counts the processes of all machines together, and there are {most}",
                fix="keep one of them",
            )
        if most == 1 or not isinstance(total.value, int):
            return total
        if least != most or total.value % most:
            raise SettingError(
                f"{total.where} is {total.value} on {self.settings.num_machines} machines "
                f"({self.origin('num_machines').where})",
                why="it counts the processes of all machines together, and each starts as many as the others",
                fix="say how many each of them starts: --nproc_per_node",
            )
        return Origin(total.source, f"{total.where} {total.value} on {most} machines", total.value // most)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the group that ask for a strategy."""
        return tuple(found for cls in self.loaded if (found := getattr(cls, "__distributed_type__", "")))

    @property
    def engines(self) -> dict[str, Origin]:
        """The switches of strategies that are on, each with the place that turns it on."""
        found: dict[str, Origin] = {}
        for cls, loaded in self.loaded.items():
            if getattr(cls, "__distributed_type__", ""):
                (switch,) = (row.name for row in declared(cls))
                if loaded.origin(switch).value:
                    found[switch] = loaded.origin(switch)
                elif self._typed(cls):
                    found[switch] = self.origin("distributed_type")
        return found

    def _typed(self, cls: type[Any]) -> bool:
        """Whether the type of the group turns this switch on."""
        kind = getattr(cls, "__distributed_type__", "")
        return bool(kind) and str(self.get("distributed_type")).upper() == kind

    def check_switches(self) -> None:
        """Refuses options of a strategy that nobody asked for: they would do nothing.

        Raises:
            SettingError: there are some.
        """
        for cls, loaded in self.loaded.items():
            for name in loaded.origins if self.missing(cls) else ():
                if loaded.origin(name).source in ("flag", "file"):
                    switch, kind = cls.__switch__, self.origin("distributed_type")
                    instead = f"{kind.where} is {kind.value}" if kind.value else f"--{switch} is not"
                    raise SettingError(
                        f"{loaded.origin(name).where} is given, but {instead}",
                        why="nothing asks for the way of training that this is an option of",
                        fix=self._way_to(switch),
                    )

    def missing(self, cls: type[Any]) -> str:
        """The switch that nobody turned on, without which the settings of a class do nothing; or ""."""
        switch: str = getattr(cls, "__switch__", "")
        return "" if not switch or self.get(switch) or switch in self.engines else switch

    def _way_to(self, switch: str) -> str:
        types = (getattr(cls, "__distributed_type__", "") for cls in self.loaded if switch in _names(cls))
        kind = next(types, "")
        in_file = f"distributed_type: {kind}" if kind else f"{switch}: true"
        return f"add --{switch}, or {in_file} in the configuration file"

    def handed(self) -> dict[str, str]:
        """The environment variables by which the script learns what was given.

        What was given is told even where it is the default, but a switch that is off only against a variable
        that is set. A class of settings may tell more (``told``), if it is asked for.
        """
        told: dict[str, str] = {}
        here = kept()
        for cls, loaded in self.loaded.items():
            for row in declared(cls) if cls not in here else ():
                value = self._typed(cls) or loaded.origin(row.name).value
                sources = {origin.source for origin in loaded.origins[row.name]}
                given = "environment" in sources if row.switch else sources != {"default"}
                if row.variable and value is not None and (given or value != row.default):
                    told[row.variable] = as_text(value)
            if hasattr(cls, "told") and not self.missing(cls):
                told.update(cls.told(self.origins))
        return told

    def check_options(self) -> None:
        """Lets each class of settings that is asked for refuse what contradicts itself (its ``check``).

        Raises:
            SettingError: something does; the error names both places.
        """
        for cls in self.loaded:
            if hasattr(cls, "check") and not self.missing(cls):
                cls.check(self.origins)


def as_text(value: Any) -> str:
    """A value as the environment holds it: yes and no as ``true`` and ``false``, lists with commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def read(flags: Mapping[str, Any], program: Sequence[str], handed: Sequence[type[Any]]) -> Request:
    """Reads all sources of all settings.

    Args:
        flags: what was typed, by name; None for "not given".
        program: the script and its arguments.
        handed: the classes of settings that are handed on to the script.

    Raises:
        SettingError: a value is wrong; the error names its place.
        UnknownNameError: a key of the configuration file is unknown at any depth.
    """
    named = flags.get("config_file") or environ.get("ACCELERATE_CONFIG_FILE")
    # `--cpu` is how one says "never mind how this machine is set up": it leaves the default file alone.
    file = files.find(named, use_default=not flags.get("use_cpu"))
    return of(file, flags, program, handed)


def of(
    file: ConfigFile | None,
    flags: Mapping[str, Any],
    program: Sequence[str],
    handed: Sequence[type[Any]],
    env: Mapping[str, str] | None = None,
) -> Request:
    """What ``read`` makes of a file that was read already.

    Args:
        file: the file; None for none.
        flags: as for ``read``.
        program: as for ``read``.
        handed: as for ``read``.
        env: the environment to read; the process's own when None.

    Raises:
        SettingError: as for ``read``.
    """
    if file is not None:
        file = sections.settled(file, (*kept(), *handed))
        _check_keys(file, handed)
    env = environ.snapshot() if env is None else env
    scheduler = around(env)
    loaded = {cls: _load(cls, flags, file, env, scheduler) for cls in (*kept(), *handed)}
    request = Request(loaded[Job].value, loaded, tuple(program), file, scheduler)
    request.check_switches()
    return request


def _load(
    cls: type[Any],
    flags: Mapping[str, Any],
    file: ConfigFile | None,
    env: Mapping[str, str],
    scheduler: Around | None,
) -> Loaded[Any]:
    told = scheduler.tells(file.values if file else {}) if scheduler and cls is Job else None
    if file is None:
        return load(cls, flags=flags, env=env, told=told)
    section: str = getattr(cls, "__section__", "")
    names = {row.name for row in declared(cls) if row.in_file}
    part = file.section(section) if section else {k: v for k, v in file.values.items() if k in names}
    lines = file.section_lines(section)
    return load(cls, flags=flags, env=env, told=told, file=part, file_name=str(file.path), lines=lines)


def _check_keys(file: ConfigFile, handed: Sequence[type[Any]]) -> None:
    """Refuses unknown keys at the top level; each section checks its own."""
    rows = [row for row in declarations(handed) if row.in_file]
    known = {row.section or row.name for row in rows}
    for cls in kept():
        # Some keys exist only in files that are for such a job: {"compute_environment": "AMAZON_..."}.
        needs: Mapping[str, str] = getattr(cls, "__only_with__", {})
        if any(str(file.values.get(key)).upper() != value for key, value in needs.items()):
            known -= _names(cls)
    for key in file.values:
        if key not in known:
            raise UnknownNameError("key", key, known, where=f"in {file.at(key)}")
