"""The launcher of 1.x for programs that are launchers themselves: its argparse parser and its functions.

``args`` is a namespace of the parser, or one made by hand. Each function is our launcher with one thing
decided. What ``prepare_...`` functions return describes the plan of a launch, that which ``--dry_run`` shows;
nothing has been started by then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from accelerate.cli.config_classes import BaseConfig, load_config_from_file
from accelerate.cli.launch import PLUGIN
from accelerate.cli.main import flag_spellings
from accelerate.cli.options import SCRIPT_SETTINGS, SettingFlag
from accelerate.core import environ
from accelerate.core.errors import RankError
from accelerate.core.value_types import plain_type
from accelerate.launch.base import LaunchPlan
from accelerate.launch.config_files import ConfigFile
from accelerate.launch.job_scheduler import OUTER_LAUNCH_VARIABLE
from accelerate.launch.kinds.local import script_command
from accelerate.launch.launch_request import LaunchRequest, build_request, format_value, read_request
from accelerate.launch.launcher import choose_kind, launch, leave_outer_launch

# --- flags and namespaces

# The switch of a way of training -> the title of the group of its options, in the public parser's words.
options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}


def clean_option(option: str) -> str | None:
    """The setting that a flag names, ``--num-processes`` -> ``num_processes``; None for anything else."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


def _record_when_typed(action: argparse.Action) -> argparse.Action:
    """Let an action add its setting to ``nondefault`` of the namespace when it is typed."""
    kind: type[argparse.Action] = type(action)
    if action.dest == argparse.SUPPRESS:
        return action

    def note(self: Any, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        kind.__call__(self, parser, namespace, values, option_string)
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}

    action.__class__ = type(kind.__name__, (kind,), {"__call__": note})
    return action


class _FlagContainer(argparse._ActionsContainer):
    """A parser, or a group of one, that takes each flag in both spellings."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add a flag in both spellings."""
        long = (each for name in args if name.startswith("--") for each in flag_spellings(name[2:]))
        return super().add_argument(*dict.fromkeys((*args, *long)), **kwargs)

    def _add_action(self, action: argparse.Action) -> argparse.Action:
        return _record_when_typed(super()._add_action(action))


class CustomArgumentGroup(_FlagContainer, argparse._ArgumentGroup):
    """A group of a ``CustomArgumentParser``."""


class CustomArgumentParser(_FlagContainer, argparse.ArgumentParser):
    """Takes ``--a_b`` also as ``--a-b``; the namespace holds in ``nondefault`` what was typed."""

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """A group whose flags have both spellings too."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


class CustomHelpFormatter(argparse.HelpFormatter):
    """Leaves out the groups of those ways of training that the command line does not ask for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        typed = {clean_option(arg.partition("=")[0]) for arg in sys.argv}
        self.titles = [title for switch, title in options_to_group.items() if switch not in typed]

    def add_argument(self, action: argparse.Action) -> None:
        """Add a flag, unless its group is left out; a group without flags is not shown."""
        if getattr(self._current_section, "heading", None) not in self.titles:
            super().add_argument(action)


# What flags have in namespaces of 1.x when nobody typed them, where that is no None and they take a value.
# The type of a value that is typed is that of the default, else of the setting.
_DEFAULTS: dict[str, Any] = {
    "dynamo_mode": "default",
    "tee": "0",
    "role": "default",
    "rdzv_backend": "static",
    "rdzv_conf": "",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "fsdp_version": "1",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100_000_000,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
    "megatron_lm_tp_degree": 1,
    "megatron_lm_pp_degree": 1,
    "megatron_lm_gradient_clipping": 1.0,
    "megatron_lm_eod_mask_loss": False,
    "megatron_lm_no_load_optim": False,
    "megatron_lm_no_save_optim": False,
    "megatron_lm_optimizer_cpu_offload": False,
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": False,
    "megatron_lm_use_custom_fsdp": False,
    "megatron_lm_use_precision_aware_optimizer": False,
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_override_linear_precision": (False, False, False),
    "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_pad_inner_dim": True,
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_dp_shard_size": 1,
    "parallelism_config_tp_size": 1,
    "parallelism_config_cp_size": 1,
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": "sdpa",
}
# Switches that have None there.
_UNSET_SWITCHES = frozenset({"debug", "module", "no_python", "quiet"})
_REPEATED = frozenset({"env", "vm"})
_UNREAD = frozenset({"nproc_per_node"})  # 1.x writes it into namespaces, and has no such flag


class _StoreAction(argparse._StoreAction):
    """Joins the values of a flag that may be repeated with commas.

    Launchers give a value to the flags whose action has this name.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def _flag_arguments(param: click.Option) -> dict[str, Any]:
    """The arguments of ``add_argument`` for a flag, beside its spellings."""
    dest = _namespace_key(param)
    if param.is_flag:
        return {"action": "store_true", "default": None if dest in _UNSET_SWITCHES else False}
    if param.multiple:
        return {"action": "append" if dest in _REPEATED else _StoreAction, "default": None}
    default = _DEFAULTS.get(dest)
    kind = str
    if default is not None:
        kind = type(default)
    elif isinstance(param, SettingFlag):
        types = [plain_type(each) for each in param.setting.types]
        kind = next((kind for kind in (int, float) if kind in types), str)
    return {"type": partial(_convert_value, kind), "default": default}


def _convert_value(kind: type, text: str) -> Any:
    """Convert a typed value; one that cannot be stays text, for the setting to refuse by its name."""
    if kind is bool:
        return text.lower() in environ.TRUE
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


class LaunchParser(CustomArgumentParser):
    """The flags of ``accelerate launch`` as an argparse parser; its namespace goes to ``launch_command``."""

    def __init__(self, **arguments: Any) -> None:
        defaults = {"prog": "accelerate launch", "allow_abbrev": False, "description": PLUGIN.short_help}
        super().__init__(**defaults | arguments)
        for param in PLUGIN.params:
            if not isinstance(param, click.Option):
                continue
            help = argparse.SUPPRESS if param.hidden else (param.help or "").replace("%", "%%")
            self.add_argument(*param.opts, dest=_namespace_key(param), help=help, **_flag_arguments(param))
        self.add_argument("training_script", nargs="?", help="the script, module or program")
        self.add_argument("training_script_args", nargs="*", help="its arguments, untouched")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the flags; what follows the script is kept as it is, but for a ``--`` right behind it."""
        args = list(sys.argv[1:] if args is None else args)
        split = self._first_positional(args)
        parsed, unknown = super().parse_known_args(args[:split], namespace or argparse.Namespace())
        program = args[split:]
        if program[1:2] == ["--"] and args[max(split - 1, 0) : split] != ["--"]:
            del program[1]
        parsed.training_script = program[0] if program else None
        parsed.training_script_args = program[1:]
        return parsed, unknown

    def _first_positional(self, args: Sequence[str]) -> int:
        """The index of the first word that is neither a flag nor a flag's value."""
        skip = False
        for index, arg in enumerate(args):
            if skip:
                skip = False
            elif arg == "--":
                return index + 1
            elif not arg.startswith("-"):
                return index
            else:
                action = self._option_string_actions.get(arg)
                skip = action is not None and action.nargs != 0
        return len(args)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2, as the command does."""
        self.exit(2, f"accelerate launch: {message}\n  fix: accelerate launch --help-all lists all flags\n")


def _namespace_key(param: click.Parameter) -> str:
    """The attribute of the namespace that holds a flag: called like the flag, as in 1.x (``args.cpu``)."""
    return param.opts[0].lstrip("-").replace("-", "_")


def read_namespace(args: argparse.Namespace, **decided: Any) -> LaunchRequest:
    """Build the launch request of a namespace.

    Args:
        args: of our parser, or made by hand with the names and defaults of 1.x.
        decided: settings that are so whatever it says.

    Raises:
        AccelerateError: a value is wrong, or asks for what is not built yet.
    """
    script = getattr(args, "training_script", None)
    program = (script, *(getattr(args, "training_script_args", None) or ())) if script else ()
    return read_request({**typed_flags(args), **decided}, program, SCRIPT_SETTINGS)


def typed_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were typed, by setting; what a namespace holds by default was not.

    A namespace made by hand may hold a float for a whole number, as ``1e8``.
    """
    values: Mapping[str, Any] = {
        dest: int(value) if isinstance(value, float) and value.is_integer() else value
        for dest, value in vars(args).items()
    }
    typed = values.get("nondefault") or ()
    flags: dict[str, Any] = {}
    for param in PLUGIN.params:
        if not isinstance(param, click.Option) or param.name is None:
            continue
        for dest in dict.fromkeys((_namespace_key(param), param.name)):
            if dest in values and (dest in typed or _is_given(param, dest, values[dest])):
                flags[param.name] = values[dest]
    return flags


def _is_given(param: click.Option, dest: str, value: Any) -> bool:
    """Return whether a value, not known to be typed, differs from the default."""
    if value is None or value is False or value == "" or dest in _UNREAD:
        return False
    only = len(param.setting.choices) == 1 if isinstance(param, SettingFlag) else False
    default = _DEFAULTS.get(dest, "")
    return not only and value != default and format_value(value).lower() != format_value(default).lower()


# --- the functions


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of the flags of ``accelerate launch`` for programs that are launchers themselves.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command ``launch`` to it.
    """
    if subparsers is None:
        return LaunchParser()
    parser_class, subparsers._parser_class = subparsers._parser_class, LaunchParser
    parser: argparse.ArgumentParser = subparsers.add_parser("launch", help=PLUGIN.short_help)
    subparsers._parser_class = parser_class
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run what ``launch_command_parser().parse_args(...)`` describes, and return when it has ended.

    Raises:
        AccelerateError: it cannot be started as asked.
        RankProcessError: a rank failed; its traceback has been printed. It is a ``RankError``, and a
            ``subprocess.CalledProcessError`` too.
    """
    _launch_namespace(args)


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, BaseConfig | None, bool]:
    """Set in ``args`` what its flags leave to the configuration file and to defaults.

    Ray's ``AccelerateTrainer`` calls it before the functions whose names begin with ``prepare_``.

    Returns:
        ``args``; the file's values, None without a file; whether the precision is the file's or the default.

    Raises:
        AccelerateError: a value is wrong.
    """
    request, typed = _describe(args), typed_flags(args)
    defaults: dict[str, Any] = {"num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    defaults |= {"debug": False, "use_cpu": False}
    if request.get("num_processes") is None:
        defaults["num_processes"] = len(choose_kind(request).plan(request).commands) * request.machines[1]
    values = defaults | {
        name: origin.value
        for name, (origin, *_) in request.origins.items()
        if origin.value is not None and (name in defaults or origin.source != "default")
    }
    values |= dict.fromkeys(request.strategy_switches, True)
    values["multi_gpu"] = "MULTI_GPU" in request.distributed_type or args.multi_gpu
    for param in PLUGIN.params:
        if isinstance(param, click.Option) and param.name in values and param.name not in typed:
            for dest in (_namespace_key(param), param.name):
                setattr(args, dest, values[param.name])
    config = None if request.file is None else load_config_from_file(str(request.file.path))
    return args, config, request.origin("mixed_precision").source == "file"


class RankProcessError(RankError, subprocess.CalledProcessError):
    """A rank failed; programs of 1.x catch it as an error of ``subprocess``.

    Attributes:
        cmd: the command of the script.
        output, stderr: None; what ranks print is not kept.
    """

    cmd: Any = ()
    output: Any = None
    stderr: Any = None

    @property
    def returncode(self) -> int:  # type: ignore[override]
        """The exit code of the rank that failed first."""
        return self.code

    def __reduce__(self) -> tuple[object, ...]:
        return *super().__reduce__(), vars(self)


def _launch_namespace(args: argparse.Namespace, **decided: Any) -> None:
    """Launch what a namespace describes, as a job of its own also inside of another one."""
    with leave_outer_launch():
        _launch(read_namespace(args, **decided))


def _launch(request: LaunchRequest) -> None:
    """Launch, and print the traceback of a rank that failed before its error goes on."""
    try:
        launch(request)
    except RankError as error:
        print(error.format_text(), file=sys.stderr, flush=True)
        raised = RankProcessError(error.what, why=error.why, fix=error.fix)
        vars(raised).update({**vars(error), "cmd": [*script_command(request)]})
        raise raised.with_traceback(error.__traceback__) from error.__cause__


def _is_one_of_others(args: argparse.Namespace, **decided: Any) -> bool:
    """Return whether a namespace has fewer processes than machines: it is of one process among others.

    Ray's ``AccelerateTrainer`` makes one in each of its processes, and tells them their places itself.
    """
    flags = typed_flags(args) | decided
    processes, machines = flags.get("num_processes"), flags.get("num_machines")
    return isinstance(processes, int) and isinstance(machines, int) and processes < machines


def _describe(args: argparse.Namespace, **decided: Any) -> LaunchRequest:
    """Build the launch request of a namespace for a function that starts nothing."""
    if not _is_one_of_others(args, **decided):
        return read_namespace(args, **decided)
    decided |= {"num_processes": 1, "num_machines": 1, "machine_rank": None}
    with environ.patch_environment({OUTER_LAUNCH_VARIABLE: ""}):  # whatever ranks the variables tell
        return read_namespace(args, **decided)


def _plan_with(args: argparse.Namespace, **decided: Any) -> LaunchPlan:
    request = _describe(args, **decided)
    plan: LaunchPlan = choose_kind(request).plan(request)
    if not _is_one_of_others(args, **decided):
        return plan
    address = {"MASTER_ADDR": "main_process_ip", "MASTER_PORT": "main_process_port"}
    variables = {name: value for name in address if (value := request.get(address[name])) is not None}
    return replace(plan, commands=(replace(plan.commands[0], variables=variables),))


def _single_process(args: argparse.Namespace) -> dict[str, Any]:
    """One process; several where their own launcher starts them from one command."""
    return {} if getattr(args, "mpirun_hostfile", None) else {"num_processes": 1}


def simple_launcher(args: argparse.Namespace) -> None:
    """Run the script in one process, or under mpirun if there is a file of hosts; see ``launch_command``."""
    _launch_namespace(args, **_single_process(args))


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run the script in one process per device, or as many as asked; see ``launch_command``."""
    _launch_namespace(args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Run the script under DeepSpeed; see ``launch_command``."""
    _launch_namespace(args, use_deepspeed=True)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Run the script on the TPU of this machine; see ``launch_command``."""
    _launch_namespace(args, tpu=True)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Run the script on all machines of a TPU pod; see ``launch_command``."""
    _launch_namespace(args, tpu=True, tpu_use_cluster=True)


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Run the script as a job of Amazon SageMaker; see ``launch_command``.

    Args:
        sagemaker_config: a ``SageMakerConfig``; its keys stand in for those of a configuration file.
        args: flags, script and its arguments.
    """
    values = {key: value for key, value in sagemaker_config.to_dict().items() if value is not None}
    file = ConfigFile(Path(type(sagemaker_config).__name__), values)
    _launch(build_request(file, typed_flags(args), read_namespace(args).program, SCRIPT_SETTINGS))


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command of ``simple_launcher`` and its whole environment."""
    return _single_command(_plan_with(args, **_single_process(args)))


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the whole environment of a process of ``multi_gpu_launcher``, without rank and address.

    ``args.nproc_per_node`` becomes how many of them there are on this machine, as text.
    """
    plan = _plan_with(args)
    args.nproc_per_node = str(len(plan.commands))
    return environ.make_child_environment(plan.variables)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """One command that starts all processes of ``deepspeed_launcher``, and its whole environment."""
    return _single_command(_plan_with(args, use_deepspeed=True))


def _single_command(plan: LaunchPlan) -> tuple[list[str], dict[str, str]]:
    """The one command of a plan; torchrun, where it has one for each rank of this machine."""
    first, *others = plan.commands
    if not others:
        return list(first.program), environ.make_child_environment({**plan.variables, **first.variables})
    python, *script = first.program
    interpreter = [] if python == sys.executable else ["--no-python", python]
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(plan.commands))]
    return [*starter, *interpreter, *script], environ.make_child_environment(plan.variables)


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add to ``current_env`` what a process on a TPU is told.

    Args:
        args: flags, script and its arguments; returned as they are.
        current_env: an environment; changed and returned.
        pod: for all machines of a pod.
    """
    plan = _plan_with(args, tpu=True, **({"tpu_use_cluster": True} if pod else {}))
    environ.set_variables(plan.variables, current_env)
    return args, current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add to ``current_env`` what the script is told about 8-bit floats, and return it."""
    return _add_script_variables(args, current_env, "ACCELERATE_FP8_")


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Add to ``current_env`` what the script is told about its mesh of devices, and return it."""
    return _add_script_variables(
        args, current_env, "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"
    )


def _add_script_variables(
    args: argparse.Namespace, current_env: dict[str, str], *heads: str
) -> dict[str, str]:
    variables = _describe(args).script_variables()
    environ.set_variables({name: v for name, v in variables.items() if name.startswith(heads)}, current_env)
    return current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The value of a variable that holds paths, with one more at its end; the variable is left as it is."""
    before = environ.get(env_var_name)
    return path_to_add if before is None else f"{before}{os.pathsep}{path_to_add}"
