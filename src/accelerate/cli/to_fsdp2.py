"""``accelerate to-fsdp2``: turn an FSDP1 configuration into an FSDP2 one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.main import command_parser, flag_spellings
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.setting import declared_settings
from accelerate.launch import config_files, config_writer
from accelerate.strategy.launch_settings.fsdp import FSDPSettings

if TYPE_CHECKING:
    import argparse

REPLICATE_SIZE, LOCAL_STATE_DICT = "fsdp_replicate_size", "LOCAL_STATE_DICT"
SECTION, PREFIX, VERSION = "fsdp_config", "fsdp_", "fsdp_version"
_HELP = {
    "config_file": "an FSDP1 configuration file",
    "output_file": "the new file",
    "overwrite": "replace a file that exists; without --output_file, the old one",
}


class ConversionStatus(Enum):
    """Why a key has no counterpart."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params": "fsdp_offload_params",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_state_dict_type": "fsdp_state_dict_type",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "fsdp_min_num_params",
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_activation_checkpointing": "fsdp_activation_checkpointing",
}
_RESHARD = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": dict(_RESHARD),
    "fsdp_reshard_after_forward": dict(_RESHARD),
}
# The numbers that torch's enumeration gives the strategies. Source: torch.distributed.fsdp.ShardingStrategy.
_NUMBERS = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}


class OutputExistsError(SettingError, FileExistsError):
    """The file to write exists."""


def load_config(config_file: str) -> dict[str, Any]:
    """The values of a configuration file, as they stand there.

    Raises:
        SettingError: it is missing or cannot be read.
    """
    values, _, _ = config_files.read_raw(config_files.expand_home(config_file))
    return {str(key): value for key, value in values.items()}


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as version 2 reads it; ``config`` itself stays as it is.

    One that does not shard, or is of version 2, is returned unchanged. Keys that have no counterpart are
    left out, unknown ones kept.

    Raises:
        UnknownNameError: a sharding strategy that does not exist.
        SettingError: ``fsdp_config`` is no table.
    """
    table = _fsdp_options(config)
    if not table or table.get(VERSION) == 2:
        return dict(config)
    new: dict[str, Any] = {VERSION: 2}
    for key, value in table.items():
        target = ARGUMENT_KEY_MAPPING.get(key, key)
        if key != VERSION and not isinstance(target, ConversionStatus) and value is not None:
            new[target] = _convert_value(key, value)
    machines = str(config.get("num_machines"))  # also in quotes; a range of them tells no number
    if _is_hybrid(table) and REPLICATE_SIZE not in new and machines.isdecimal() and int(machines) > 1:
        new[REPLICATE_SIZE] = int(machines)
    if str(new.get("fsdp_state_dict_type")).upper() == LOCAL_STATE_DICT:
        new["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    return {**config, SECTION: dict(sorted(new.items()))}


def _is_hybrid(table: Mapping[str, Any]) -> bool:
    """Return whether the sharding is HSDP: shards are replicated across machines."""
    return "HYBRID" in _strategy_name(table.get("fsdp_sharding_strategy"))


def _strategy_name(value: Any) -> str:
    """Return the name of a sharding strategy that a file gives by its name or its number, also in quotes."""
    text = str(value)
    return _NUMBERS.get(int(text), text) if text.isdecimal() else text.upper()


def _fsdp_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of sharding, those of FSDP with their prefix; others stay as they are."""
    table = config.get(SECTION) or {}
    if not isinstance(table, dict):
        raise SettingError(f"{SECTION} is {table!r}, but it is a table of keys")
    options: dict[str, Any] = {}
    known = {*ARGUMENT_KEY_MAPPING, *(each.name for each in declared_settings(FSDPSettings))}
    old_keys = config_files.old_section_keys(FSDPSettings)
    for key, value in table.items():
        name = old_keys.get(str(key), str(key))
        if f"{PREFIX}{name}" in known:
            name = f"{PREFIX}{name}"
        if name in options:
            raise SettingError(f"{SECTION} gives {name} twice", fix="keep one of them")
        options[name] = value
    return options


def _convert_value(key: str, value: Any) -> Any:
    choices = ARGUMENT_VALUE_MAPPING.get(key)
    if choices is None or isinstance(value, bool):
        return value
    text = _strategy_name(value)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text not in choices:
        raise UnknownNameError("value", str(value), choices, where=f"of {key}")
    return choices[text]


def _dropped_key_lines(config: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key that is left out of the new configuration, or gets another meaning there."""
    if _fsdp_options(config).get(VERSION) == 2:
        yield (
            "it is a configuration of FSDP2 already, and stays as it is; if its keys are those of FSDP1, "
            f"write {VERSION}: 1 there and run this again"
        )
        return
    for key in _fsdp_options(config):
        if isinstance(ARGUMENT_KEY_MAPPING.get(key), ConversionStatus):
            reason = "prefetches by itself" if key.endswith("_prefetch") else "has no such option"
            yield f"{key} is left out: FSDP2 {reason}"
    if _is_hybrid(_fsdp_options(config)):
        yield (
            f"{REPLICATE_SIZE} is the number of replicas (HSDP): one for each machine, as it was"
            if REPLICATE_SIZE in new[SECTION]
            else "the file tells of no second machine: if there are several, add "
            f"{REPLICATE_SIZE}: MACHINES to {SECTION} (HSDP), or weights are sharded over all of them"
        )
    if str(_fsdp_options(config).get("fsdp_state_dict_type")).upper() == LOCAL_STATE_DICT:
        yield f"{LOCAL_STATE_DICT} becomes SHARDED_STATE_DICT, which any number of processes reads"


def _refuse_other_files(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a file that is no configuration of FSDP."""
    kind = config.get("distributed_type")
    if not _fsdp_options(config):
        raise SettingError(
            f"{path} has no {SECTION}: there is nothing to convert",
            why=f"distributed_type is {kind}" if kind else "it says nothing about sharding",
            fix="name the file of a sharded training with --config_file",
        )
    if kind is not None and str(kind).upper() != "FSDP":
        raise SettingError(
            f"{path} has a {SECTION}, but its distributed_type is {kind}", fix="write distributed_type: FSDP"
        )


def _target_file(path: Path, output: str | None, overwrite: bool) -> Path:
    """Return the path of the new file."""
    if output is None and not overwrite:
        raise SettingError(
            "there is no place for the new file",
            fix=f"add --output_file new.yaml, or --overwrite to replace {path}",
        )
    target = path if output is None else config_files.expand_home(output)
    if os.path.exists(target) and not overwrite:
        raise OutputExistsError(f"{target} exists already", fix="add --overwrite, or name another file")
    return target


def convert_file(config_file: str, output_file: str | None = None, overwrite: bool = False) -> list[str]:
    """Convert a file and return what there is to say about it.

    Args:
        config_file: an FSDP1 configuration file.
        output_file: the new file; the old one is replaced when None.
        overwrite: whether a file that exists may be replaced.

    Raises:
        SettingError: the file is no FSDP1 configuration, or there is no place for the new one.
        FileNotFoundError: there is no such file; it is a ``SettingError`` too.
    """
    path = config_files.expand_home(config_file)
    config = load_config(config_file)
    target = _target_file(path, output_file, overwrite)
    try:
        _refuse_other_files(config, path)
        new = convert_config_to_fsdp2(config)
    except SettingError as error:
        if str(path) in error.what:
            raise
        raise SettingError(f"{path}: {error.what}", why=error.why, fix=error.fix) from error
    config_writer.write_file(target, config_writer.format_config(new, target))
    return [*_dropped_key_lines(config, new), f"written to {target}"]


@click.command("to-fsdp2", short_help="Turn an FSDP1 configuration into an FSDP2 one.")
@click.option(*flag_spellings("config_file"), required=True, metavar="FILE", help=_HELP["config_file"])
@click.option(*flag_spellings("output_file"), metavar="FILE", help=_HELP["output_file"])
@click.option("--overwrite", is_flag=True, help=_HELP["overwrite"])
def _to_fsdp2(config_file: str, output_file: str | None, overwrite: bool) -> None:
    """Turn an FSDP1 configuration (fsdp_version: 1, or none) into an FSDP2 one."""
    for line in convert_file(config_file, output_file, overwrite):
        click.echo(line)


PLUGIN = _to_fsdp2


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """An argparse parser with the flags of the command.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command to it.
    """
    parser = command_parser("to-fsdp2", to_fsdp2_command, subparsers)
    parser.add_argument(*flag_spellings("config_file"), required=True, help=_HELP["config_file"])
    parser.add_argument(*flag_spellings("output_file"), help=_HELP["output_file"])
    parser.add_argument("--overwrite", action="store_true", help=_HELP["overwrite"])
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert what ``to_fsdp2_command_parser().parse_args(...)`` names.

    Raises:
        SettingError: as ``convert_file``.
    """
    print("\n".join(convert_file(args.config_file, args.output_file, args.overwrite)))
