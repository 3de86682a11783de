"""The launch request: the settings of the job, and the settings that are passed on to the script.

``JobSettings`` says how to start processes and stays with the launcher, as do the settings of the kinds of
launch (``launch/kinds``). Settings for the script are declared next to the code that uses them; the caller
of the launcher lists them. The launcher reads them from flags and files, and passes those that were set to
the script as environment variables, which a script reads when its own code does not set the option.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from accelerate.core import environ, value_types
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.setting import (
    SOURCES,
    Setting,
    SettingOrigin,
    SettingsWithOrigins,
    declared_settings,
    load_settings,
    setting,
)
from accelerate.core.value_types import (
    Count,
    FilledPath,
    Index,
    LocalCount,
    Port,
    Seconds,
    ValueRule,
    frozen_dataclass,
)
from accelerate.launch import config_files
from accelerate.launch.config_files import CPU_GROUP, NOT_DISTRIBUTED, ConfigFile
from accelerate.launch.job_scheduler import JobSchedulerContext, detect_surrounding_job
from accelerate.launch.kinds import KINDS

S = TypeVar("S")
typed_setting = partial(setting, variable=None, in_file=False)  # a flag alone
file_setting = partial(setting, flag=None, variable=None)  # a key of a configuration file alone


def _is_machine_range(text: str) -> bool:
    """Return whether a text is a range of numbers of machines, ``"1:4"``."""
    ends = [value_types.convert_to(Count, end, "text") for end in text.split(":")]
    return len(ends) == 2 and all(fits for fits, _ in ends) and ends[0][1] <= ends[1][1]


MachineRange = Annotated[str, ValueRule(" as 1:4, the fewest first, both in that range", _is_machine_range)]


class _MachineCountAboveOne:
    """Holds every number of machines beyond one, ``"1:4"`` too."""

    def __contains__(self, value: object) -> bool:
        last = str(value).rpartition(":")[2]
        return last.isdigit() and int(last) > 1


MULTI_MACHINE = {"num_machines": _MachineCountAboveOne()}  # what a wizard asks about only then


@frozen_dataclass
class JobSettings:
    """How to start the processes of one script."""

    __topic__ = "Processes"
    __without_effect__: ClassVar[Mapping[str, str]] = {
        "ipex_config": "torch has by now what Intel's extension brought, and an XPU is found by itself",
    }
    __common__ = (
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "gpu_ids",
        "module",
        "config_file",
        "dry_run",
    )

    num_processes: Count | Literal["auto", "gpu", "cpu"] | None = setting(
        None,
        flags=("-n",),
        help="how many processes to start, on all machines together; by default one per device, one on a CPU",
        question="Number of processes on all machines?",
    )
    nproc_per_node: LocalCount | Literal["auto", "gpu", "cpu"] | None = typed_setting(
        None, help="how many processes to start on each machine"
    )
    num_machines: Count | MachineRange = setting(
        1,
        flags=("--nnodes",),
        help="how many machines take part: a number, or from 1 to 4 as 1:4",
        question="Number of machines?",
    )
    standalone: bool = typed_setting(False, help="the job is on one machine and waits for no other")
    machine_rank: Index = setting(
        0,
        flags=("--node_rank",),
        help="the number of this machine, from 0",
        question="Rank of this machine?",
        when=MULTI_MACHINE,
    )
    main_process_ip: str | None = setting(
        None,
        flags=("--master_addr",),
        help="the address of rank 0, where there are several machines",
        question="Address of the machine of rank 0?",
        when=MULTI_MACHINE,
    )
    main_process_port: Port | None = setting(
        None,
        flags=("--master_port",),
        help="the port of rank 0; by default, and with 0, a free one",
        question="Port of that machine for the rendezvous?",
        when=MULTI_MACHINE,
    )
    num_cpu_threads_per_process: Count | None = setting(
        None, help="threads of each process's CPU kernels; by default the cores are shared out"
    )
    stop_timeout: Seconds | None = setting(
        None,
        help="seconds that processes which are asked to stop have before they are killed; by default 30 when "
        "Ctrl-C or a signal such as SIGTERM ends the job, as with torchrun, and 3 when the job fails",
    )
    preemption_grace: Seconds | None = setting(
        None,
        help="seconds that processes have which stop in good order on a signal (accelerator.should_stop), "
        "before they are killed; by default as long as they need, or until a second signal",
    )
    multi_gpu: bool = typed_setting(False, topic="Hardware", help="insist on accelerators: fail without")
    gpu_ids: str | Index | None = setting(
        None, topic="Hardware", help="which devices to use: 'all', their numbers like 0,2, or their UUIDs"
    )
    distributed_type: str | None = file_setting(
        None,
        topic="Hardware",
        help="one name for the devices and the way of training, as `accelerate config` writes it",
    )
    compute_environment: Literal["LOCAL_MACHINE", "AMAZON_SAGEMAKER"] = file_setting(
        "LOCAL_MACHINE", help="where the job runs"
    )
    module: bool = typed_setting(
        False, flags=("-m",), topic="Script", help="the script is a module, started like python -m"
    )
    no_python: bool = typed_setting(False, topic="Script", help="the script is a program, started as it is")
    config_file: str | None = setting(
        None, in_file=False, topic="Script", help="a YAML or JSON file with any of these settings"
    )
    log_dir: FilledPath | None = setting(
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
    dry_run: bool = typed_setting(
        False,
        topic="Output",
        help="print what would be started, with what each option does and where it came from; start nothing",
    )
    dry_run_model: str | None = typed_setting(
        None,
        topic="Output",
        help="with --dry_run: spread this model on empty tensors and show what ranks hold; a folder with "
        "config.json, a name on the hub, or module:factory",
    )
    print_manifest: Literal["pytorchjob", "jobset", "skypilot"] | None = typed_setting(
        None,
        topic="Output",
        help="print the job for Kubernetes (a PyTorchJob of Kubeflow, or a JobSet) or as a SkyPilot task, "
        "and start nothing",
    )
    manifest_image: str | None = typed_setting(
        None,
        topic="Output",
        help="with --print_manifest: the container image, with torch, this package and the script",
    )
    manifest_accelerator: str | None = typed_setting(
        None,
        topic="Output",
        help="with --print_manifest: the resource of which each process needs one, by default "
        "nvidia.com/gpu; for SkyPilot the name of the accelerator, such as H100",
    )
    quiet: bool = typed_setting(False, flags=("-q",), topic="Output", help="say nothing but errors")


def launcher_settings() -> tuple[type[Any], ...]:
    """The classes of settings that stay with the launcher."""
    return (JobSettings, *(cls for kind in KINDS for cls in kind.settings))


def all_settings(script_settings: Sequence[type[Any]]) -> tuple[Setting, ...]:
    """Every setting that a launch with these handed settings knows."""
    return tuple(row for cls in (*launcher_settings(), *script_settings) for row in declared_settings(cls))


@frozen_dataclass
class LaunchRequest:
    """All settings of a launch, each with its source.

    Attributes:
        settings: the job.
        loaded: every class of settings with its values and origins.
        program: the script, module or program, and its arguments, untouched.
        file: the configuration file in use.
        scheduler: what a scheduler around the launcher says of the job.
        notes: what is said on stderr when the launch begins, a line each.
    """

    settings: JobSettings
    loaded: dict[type[Any], SettingsWithOrigins[Any]]
    program: tuple[str, ...]
    file: ConfigFile | None = None
    scheduler: JobSchedulerContext | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def origins(self) -> dict[str, tuple[SettingOrigin, ...]]:
        """Every source that gave a value, by setting, the winner first."""
        return {
            name: each for cls in reversed(self.loaded) for name, each in self.loaded[cls].origins.items()
        }

    def origin(self, name: str) -> SettingOrigin:
        """Return the source of a setting's value."""
        return self.origins[name][0]

    def values_of(self, cls: type[S]) -> S:
        """The values of one class of settings."""
        value: S = self.loaded[cls].value
        return value

    def get(self, name: str) -> Any:
        """The value of any setting, the job's or a handed one."""
        return self.origins[name][0].value

    @property
    def machines(self) -> tuple[int, int]:
        """The fewest and the most machines that take part: 2 is ``(2, 2)``, ``"1:4"`` is ``(1, 4)``."""
        ends = str(self.get("num_machines")).split(":")
        return int(ends[0]), int(ends[-1])

    @property
    def local_processes(self) -> SettingOrigin:
        """The number of processes of each machine, and who says so: a number, a word, or None.

        ``num_processes`` counts those of all machines, ``nproc_per_node`` those of each. Of two sources the
        stronger one wins, as for any setting.

        Raises:
            SettingError: the two disagree, or the processes cannot be shared out evenly.
        """
        total, each = self.origin("num_processes"), self.origin("nproc_per_node")
        least, most = self.machines
        if each.value is not None and SOURCES.index(each.source) < SOURCES.index(total.source):
            return each
        is_contradicted = least != most or total.value != (each.value or 0) * most
        if each.value is not None and each.source == total.source and is_contradicted:
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
                fix=("" if least != most else f"make it a multiple of {most}, or ")
                + "say how many each of them starts: --nproc_per_node",
            )
        return SettingOrigin(
            total.source, f"{total.where} {total.value} on {most} machines", total.value // most
        )

    @property
    def distributed_type(self) -> str:
        """The type of the group in capitals, whatever a file writes; "" where nothing says one."""
        return str(self.get("distributed_type") or "").upper()

    @property
    def names_accelerators(self) -> bool:
        """Return whether the type of the group names accelerators, and so several processes."""
        return self.distributed_type.startswith("MULTI_") and self.distributed_type != CPU_GROUP

    @property
    def strategy_switches(self) -> dict[str, SettingOrigin]:
        """The switches of strategies that are on, each with the place that turns it on."""
        switches: dict[str, SettingOrigin] = {}
        for switch, kind in config_files.strategy_switches(self.loaded).items():
            if self.get(switch):
                switches[switch] = self.origin(switch)
            elif self.distributed_type == kind:
                switches[switch] = self.origin("distributed_type")
        return switches

    def check_switches(self) -> None:
        """Refuse options of a strategy that nobody asked for: they would do nothing.

        Raises:
            SettingError: there are some.
        """
        for cls, loaded in self.loaded.items():
            for origin, *_ in () if self.is_asked_for(cls) else loaded.origins.values():
                if origin.source == "flag":
                    switch, kind = cls.__switch__, self.origin("distributed_type")
                    instead = f"{kind.where} is {kind.value}" if kind.value else f"--{switch} is not"
                    raise SettingError(
                        f"{origin.where} is given, but {instead}",
                        why="nothing asks for the way of training that this is an option of",
                        fix=self._how_to_enable(switch),
                    )

    def find_leftovers(self, file: ConfigFile) -> dict[tuple[str, ...], str]:
        """Return the path of each key in the file that has no effect, with a sentence about it.

        Files of 1.x hold such keys: the options of a way of training that was chosen once, and a number of
        processes beside ``distributed_type: NO``, which starts one.
        """
        leftovers = dict[tuple[str, ...], str]()
        kind, processes = self.origin("distributed_type"), self.origin("num_processes")
        several = processes.source == "file" and processes.value not in (None, 1)
        if self.distributed_type == NOT_DISTRIBUTED and several:
            leftovers[("num_processes",)] = (
                f"{processes.where} is {processes.value}, which has no effect: {kind.where} is "
                f"{NOT_DISTRIBUTED}, which means one process"
            )
        for cls, loaded in self.loaded.items():
            for row in () if self.is_asked_for(cls) else declared_settings(cls):
                if loaded.origin(row.name).source == "file":
                    keys = (row.section or row.name,)
                    said = f"{kind.where} is {kind.value}" if kind.value else self._typed_training()
                    leftovers[keys] = (
                        f"{file.locate(*keys)}: {keys[0]} has no effect: {said}; to use it, "
                        f"{self._how_to_enable(cls.__switch__)}"
                    )
        return leftovers

    def _typed_training(self) -> str:
        """The flag that asks for another way of training, in words."""
        origins = (self.origin(name) for name in ("multi_gpu", *self.strategy_switches))
        typed = next((origin.where for origin in origins if origin.value and origin.source == "flag"), "")
        return f"{typed} is given" if typed else "nothing asks for it"

    def is_asked_for(self, cls: type[Any]) -> bool:
        """Return whether settings count: their switch is on; of a class without a switch, one is given."""
        switch: str = getattr(cls, "__switch__", "")
        if switch:
            return bool(self.get(switch)) or switch in self.strategy_switches
        return any(origin.source != "default" for origin, *_ in self.loaded[cls].origins.values())

    def _how_to_enable(self, switch: str) -> str:
        kind = config_files.strategy_switches(self.loaded).get(switch)
        in_file = f"distributed_type: {kind}" if kind else f"{switch}: true"
        return f"add --{switch}, or {in_file} in the configuration file"

    def script_variables(self) -> dict[str, str]:
        """The environment variables by which the script learns what was given.

        What was given is told even where it is the default, but a switch that is off only against a variable
        that is set. A class of settings may add more (``launch_variables``), if it is asked for.
        """
        variables: dict[str, str] = {}
        launcher_classes, switches = launcher_settings(), self.strategy_switches
        for cls, loaded in self.loaded.items():
            for row in declared_settings(cls) if cls not in launcher_classes else ():
                value = row.name in switches or loaded.origins[row.name][0].value
                sources = {origin.source for origin in loaded.origins[row.name]}
                is_explicit = "environment" in sources if row.switch else sources != {"default"}
                if row.variable and value is not None and (is_explicit or value != row.default):
                    variables[row.variable] = format_value(value)
            if hasattr(cls, "launch_variables") and self.is_asked_for(cls):
                variables.update(cls.launch_variables(self.origins.__getitem__))
        return variables


def format_value(value: Any) -> str:
    """A value as the environment holds it: yes and no as ``true`` and ``false``, lists with commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def read_request(
    flags: Mapping[str, Any], program: Sequence[str], script_settings: Sequence[type[Any]]
) -> LaunchRequest:
    """Read all sources of all settings.

    Args:
        flags: what was typed, by name; None for "not given".
        program: the script and its arguments.
        script_settings: the classes of settings that are handed on to the script.

    Raises:
        SettingError: a value is wrong; the error names its place.
        UnknownNameError: a key of the configuration file is unknown at any depth.
    """
    # `--cpu` is how one says "never mind how this machine is set up": it leaves the default file alone.
    file = find_config(flags.get("config_file"), use_default=not flags.get("use_cpu"))
    request = build_request(file, flags, program, script_settings)
    if (file is None or not file.is_explicit) and os.path.isfile("accelerate.yaml"):
        note = "accelerate.yaml lies here and is not used: --config_file accelerate.yaml uses it"
        request = replace(request, notes=(note, *request.notes))
    return request


def find_config(named: str | None, *, use_default: bool = True) -> ConfigFile | None:
    """Find the configuration file: the named one, else the default one; None without one.

    Args:
        named: what the user typed; None for the one that ``ACCELERATE_CONFIG_FILE`` names, if any.
        use_default: whether the file in the cache folder may be used.

    Raises:
        SettingError: the named file is missing, or the file cannot be read.
    """
    named = named or environ.get("ACCELERATE_CONFIG_FILE")
    if named is not None:
        return config_files.read_config(config_files.expand_home(named))
    default = config_files.default_file()
    # Not Path.is_file, which raises where a folder above may not be looked into: nobody has named this file.
    is_used = use_default and os.path.isfile(default)
    return config_files.read_config(default, is_explicit=False) if is_used else None


def build_request(
    file: ConfigFile | None,
    flags: Mapping[str, Any],
    program: Sequence[str],
    script_settings: Sequence[type[Any]],
    env: Mapping[str, str] | None = None,
) -> LaunchRequest:
    """Build a request from a configuration file that was read already.

    Args:
        file: the file; None for none.
        flags: as for ``read_request``.
        program: as for ``read_request``.
        script_settings: as for ``read_request``.
        env: the environment to read; the process's own when None.

    Raises:
        SettingError: as for ``read_request``.
    """
    env = environ.snapshot() if env is None else env
    classes = (*launcher_settings(), *script_settings)
    if file is not None:
        file = config_files.without_overruled_keys(file, flags, classes)
        switches = config_files.enabled_switches(file, flags, env, classes)
        file = config_files.normalize_sections(file, classes, switches)
        _check_keys(file, script_settings)
    values = {} if file is None else file.values
    scheduler, note = detect_surrounding_job(env, flags, values)
    loaded: dict[type[Any], SettingsWithOrigins[Any]] = {}
    for cls in classes:
        section: str = getattr(cls, "__section__", "")
        names = () if section else {row.name for row in declared_settings(cls) if row.in_file}
        loaded[cls] = load_settings(
            cls,
            flags=flags,
            env=env,
            scheduler=scheduler.settings_unless_in(values) if scheduler and cls is JobSettings else None,
            file=file.section(section) if file and section else {k: values[k] for k in values if k in names},
            file_name="" if file is None else str(file.path),
            lines=None if file is None else file.section_lines(section),
        )
    notes = (note,) if note else ()
    request = LaunchRequest(loaded[JobSettings].value, loaded, tuple(program), file, scheduler, notes)
    leftovers = {} if file is None else request.find_leftovers(file)
    if file is not None and leftovers:
        for keys, problem in leftovers.items():
            file = file.without(keys, problem)
        return build_request(file, flags, program, script_settings, env)
    request.check_switches()
    return request


def _check_keys(file: ConfigFile, script_settings: Sequence[type[Any]]) -> None:
    """Refuse unknown keys at the top level; each section checks its own."""
    rows = [row for row in all_settings(script_settings) if row.in_file]
    valid_keys = {row.section or row.name for row in rows}
    for cls in launcher_settings():
        # Some keys exist only in files that are for such a job: {"compute_environment": "AMAZON_..."}.
        needs: Mapping[str, str] = getattr(cls, "__only_with__", {})
        if any(str(file.values.get(key)).upper() != value for key, value in needs.items()):
            valid_keys -= {row.name for row in declared_settings(cls)}
    for key in file.values:
        if key not in valid_keys:
            fix = config_files.place_of_setting(key, (*launcher_settings(), *script_settings))
            raise UnknownNameError("key", key, valid_keys, where=f"in {file.locate(key)}", fix=fix)
