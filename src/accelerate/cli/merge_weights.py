"""``accelerate merge-weights``: join the parts of a sharded model into files that every library reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.main import command_parser, flag_spellings
from accelerate.core import environ
from accelerate.core.errors import list_first
from accelerate.core.units import QUIET_VARIABLE, show_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from accelerate.checkpoint.model_tensors import LazyTensor

description = "Joins the parts of a model that was saved sharded: model.safetensors, or shards with an index."
_HELP = {
    "checkpoint_directory": "a checkpoint in parts (ZeRO's too), or the folder of its model",
    "output_path": "the folder to write to",
    "unsafe_serialization": "write torch files (pytorch_model.bin) instead of safetensors",
    "remove_checkpoint_dir": "remove CHECKPOINT_DIRECTORY afterwards, with all that is in it",
}


def _merge(
    checkpoint_directory: str,
    output_path: str,
    unsafe_serialization: bool,
    remove_checkpoint_dir: bool,
    quiet: bool = False,
) -> None:
    from accelerate.checkpoint.dcp_files import lazy_tensors
    from accelerate.checkpoint.weight_files import merge
    from accelerate.facade.engine_checkpoint_import import engine_weights

    def find(folder: Path) -> Mapping[str, LazyTensor]:
        located_weights = engine_weights(folder)
        return lazy_tensors(folder) if located_weights is None else located_weights[1]

    if quiet:
        environ.set_variables({QUIET_VARIABLE: "1"})
    done = merge(find, checkpoint_directory, output_path, not unsafe_serialization, remove_checkpoint_dir)
    if not quiet:
        click.echo(
            f"{done.tensors} tensors, {show_bytes(done.size)}, from {done.source} in {output_path}: "
            f"{list_first(done.files)}"
        )


PLUGIN = click.Command(
    "merge-weights",
    callback=_merge,
    params=[
        click.Argument(["checkpoint_directory"]),
        click.Argument(["output_path"]),
        *(
            click.Option([*flag_spellings(name), name], is_flag=True, help=_HELP[name])
            for name in ("unsafe_serialization", "remove_checkpoint_dir")
        ),
        click.Option(["--quiet", "-q"], is_flag=True, help="show no progress and no result"),
    ],
    help=f"{description}\n\nCHECKPOINT_DIRECTORY is {_HELP['checkpoint_directory']}, "
    f"OUTPUT_PATH {_HELP['output_path']}.",
    short_help="Join the parts of a sharded model into files of weights.",
)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """An argparse parser with the arguments and flags of ``accelerate merge-weights``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command to it.
    """
    parser = command_parser("merge-weights", merge_command, subparsers, description=description)
    for argument in ("checkpoint_directory", "output_path"):
        parser.add_argument(argument, help=_HELP[argument])
    for flag in ("unsafe_serialization", "remove_checkpoint_dir"):
        parser.add_argument(*flag_spellings(flag), action="store_true", help=_HELP[flag])
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge.

    Args:
        args: what ``merge_command_parser().parse_args()`` returned.
    """
    _merge(args.checkpoint_directory, args.output_path, args.unsafe_serialization, args.remove_checkpoint_dir)


def main() -> None:
    """``python -m accelerate.commands.merge``."""
    merge_command(merge_command_parser().parse_args())
