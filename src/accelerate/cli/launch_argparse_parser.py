"""The flags of ``accelerate launch`` as an argparse parser, for programs that are launchers themselves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import click

from accelerate.cli.argument_parser import CustomArgumentParser
from accelerate.cli.options import SCRIPT_SETTINGS, SettingFlag
from accelerate.core.value_types import plain_type
from accelerate.launch.errors import RankError
from accelerate.launch.launch_request import LaunchRequest, format_value, read_request
from accelerate.launch.launcher import launch

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


class _JoinAction(argparse.Action):
    """Joins the values of a flag that may be repeated with commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def _flag_arguments(param: click.Option) -> dict[str, Any]:
    """The arguments of ``add_argument`` for a flag, beside its spellings."""
    dest = _namespace_key(param)
    if param.is_flag:
        return {"action": "store_true", "default": None if dest in _UNSET_SWITCHES else False}
    if param.multiple:
        return {"action": "append" if dest in _REPEATED else _JoinAction, "default": None}
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
        return text.lower() in ("1", "true", "yes", "on", "y", "t")
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


class LaunchParser(CustomArgumentParser):
    """The flags of ``accelerate launch`` as an argparse parser; its namespace goes to ``launch_command``."""

    def __init__(self, *, command: click.Command, **arguments: Any) -> None:
        defaults = {"prog": "accelerate launch", "allow_abbrev": False, "description": command.short_help}
        super().__init__(**defaults | arguments)
        for param in command.params:
            if not isinstance(param, click.Option):
                continue
            help = argparse.SUPPRESS if param.hidden else (param.help or "").replace("%", "%%")
            self.add_argument(*param.opts, dest=_namespace_key(param), help=help, **_flag_arguments(param))
        self.add_argument("training_script", nargs="?", help="the script, module or program")
        self.add_argument("training_script_args", nargs="*", help="its arguments, untouched")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the flags; the script and what follows it are kept as they are, also ``--`` and flags."""
        args = list(sys.argv[1:] if args is None else args)
        split = self._first_positional(args)
        parsed, unknown = super().parse_known_args(args[:split], namespace or argparse.Namespace())
        program = args[split:]
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
        """Exits with code 2, as the command does."""
        self.exit(2, f"accelerate launch: {message}\n  fix: accelerate launch --help lists all flags\n")


def _namespace_key(param: click.Parameter) -> str:
    """The attribute of the namespace that holds a flag: called like the flag, as in 1.x (``args.cpu``)."""
    return param.opts[0].lstrip("-").replace("-", "_")


def launch_command_parser(command: click.Command, subparsers: Any = None) -> argparse.ArgumentParser:
    """See ``accelerate.cli.launch.launch_command_parser``."""
    if subparsers is None:
        return LaunchParser(command=command)
    parser_class, subparsers._parser_class = subparsers._parser_class, partial(LaunchParser, command=command)
    parser: argparse.ArgumentParser = subparsers.add_parser("launch", help=command.short_help)
    subparsers._parser_class = parser_class
    parser.set_defaults(func=partial(launch_command, command))
    return parser


def launch_command(command: click.Command, args: argparse.Namespace) -> None:
    """See ``accelerate.cli.launch.launch_command``."""
    with print_rank_errors():
        launch(build_request(command, args))


@contextmanager
def print_rank_errors() -> Generator[None]:
    """Prints the traceback of a rank that failed before its error goes on."""
    try:
        yield
    except RankError as error:
        print(error.format_text(), file=sys.stderr, flush=True)
        raise


def build_request(command: click.Command, args: argparse.Namespace, **decided: Any) -> LaunchRequest:
    """Build the launch request of a namespace.

    Args:
        command: the command whose flags it holds.
        args: of our parser, or made by hand with the names and defaults of 1.x.
        decided: settings that are so whatever it says.

    Raises:
        AccelerateError: a value is wrong, or asks for what is not built yet.
    """
    script = getattr(args, "training_script", None)
    program = (script, *(getattr(args, "training_script_args", None) or ())) if script else ()
    return read_request({**typed_flags(command, args), **decided}, program, SCRIPT_SETTINGS)


def typed_flags(command: click.Command, args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were typed, by setting; what a namespace holds by default was not."""
    values: Mapping[str, Any] = vars(args)
    typed = values.get("nondefault") or ()
    flags: dict[str, Any] = {}
    for param in command.params:
        if not isinstance(param, click.Option) or param.name is None:
            continue
        for dest in dict.fromkeys((_namespace_key(param), param.name)):
            if dest in values and (dest in typed or _is_given(param, dest, values[dest])):
                flags[param.name] = values[dest]
    return flags


def _is_given(param: click.Option, dest: str, value: Any) -> bool:
    """Return whether a value, not known to be typed, differs from the default."""
    if value is None or value is False or value == "":
        return False
    only = len(param.setting.choices) == 1 if isinstance(param, SettingFlag) else False
    return not only and format_value(value).lower() != format_value(_DEFAULTS.get(dest, "")).lower()
