"""``accelerate config``: write the file that launches take settings from, by questions or key by key."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from accelerate.cli.main import CommandGroup, command_parser, flag_spellings
from accelerate.core.errors import SettingError
from accelerate.launch import config_files

_HELP = """Write the file that `accelerate launch` reads its settings from.

\b
accelerate config                                 asks, with arrow keys
accelerate config --set num_processes=4           changes one key and leaves the others; repeatable
accelerate config --set fsdp_config.fsdp_version=2
accelerate config default                         a file for all devices of this machine
accelerate config update                          brings an old file up to date
`accelerate launch --help-all` names every key. KEY= and KEY=none take a key out.
"""
PRECISIONS = ("no", "fp16", "bf16")
CONFIG = "Asks questions and writes the answers to the file that `accelerate launch` reads its settings from."
DEFAULT = "Writes a file for all devices of this machine; one that exists stays as it is."
UPDATE = "Brings an old file up to date: what it says stays, in today's keys and types."
_PARSER_FILE_HELP = "the configuration file; by default default_config.yaml in the cache folder"
_FILE_HELP = "the file to write; by default the one that a launch uses when none is named"


def _file_option(help: str = _FILE_HELP) -> Any:
    return click.option(*flag_spellings("config_file"), metavar="FILE", help=help)


@click.group("config", cls=CommandGroup, invoke_without_command=True, help=_HELP)
@_file_option()
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="change one key; repeatable")
@click.pass_context
def _config(ctx: click.Context, config_file: str | None, pairs: tuple[str, ...]) -> None:
    if ctx.invoked_subcommand is not None:
        if pairs:
            raise click.UsageError(f"--set and {ctx.invoked_subcommand} do not go together")
        ctx.obj = config_file
    elif pairs:
        change_keys(config_file, pairs)
    else:
        ask_all(config_file)


def change_keys(config_file: str | None, pairs: tuple[str, ...]) -> None:
    """Set keys of a file and say which, and where.

    Raises:
        SettingError: a pair is wrong, or ``accelerate launch`` would refuse the file; it stays as it is.
    """
    from accelerate.cli.wizard import config_editor

    path = config_editor.config_path(config_file)
    changes = config_editor.set_keys(path, pairs)
    click.echo(f"{path}:" if changes else f"{path} says so already")
    for each in changes:
        click.echo(f"  {each}")
    _warn_about_file(path)


def ask_all(config_file: str | None) -> Path | None:
    """Ask for all settings and write the file; None if it was thrown away.

    Raises:
        SettingError: nobody is there to answer.
    """
    if not sys.stdin.isatty():
        raise SettingError(
            "accelerate config asks questions, and nobody can answer: this is no terminal",
            fix="accelerate config --set num_processes=2 --set mixed_precision=bf16, or "
            "accelerate config default",
        )
    from accelerate.cli.wizard import config_editor, terminal

    path = config_editor.config_path(config_file)
    before = config_files.read_raw(path)[0] if os.path.exists(path) else {}
    upgraded = config_files.upgrade_keys(before)
    values = terminal.run_wizard(path, upgraded)
    if values is None or (os.path.exists(path) and values == upgraded):
        click.echo("nothing was written" if values is None else f"{path} says so already")
        return None if values is None else path
    copy = config_editor.save_config(path, before, values)
    # Scripts read this line, as 1.x prints it.
    click.echo(f"accelerate configuration saved at {path}" + (f"\nthe old file is {copy}" if copy else ""))
    _warn_about_file(path)
    return path


def _warn_about_file(path: Path) -> None:
    """Say what stands in the way of a launch, here and without flags, with a file that was just written."""
    from accelerate.cli.wizard import config_editor

    values = config_files.read_raw(path)[0]
    problem = config_editor.find_refusal(values, path, on_this_machine=True)
    if problem is not None:
        click.echo(f"note: with this file alone, accelerate launch refuses here: {problem}", err=True)


@_config.command("default", short_help="Write a file for all devices of this machine.")
@_file_option()
@click.option(*flag_spellings("mixed_precision"), type=click.Choice(PRECISIONS), default="no")
@click.pass_obj
def _default(named: str | None, config_file: str | None, mixed_precision: str) -> None:
    """Write a file for all devices of this machine. One that exists stays as it is."""
    from accelerate.cli.wizard import config_editor

    _write_default(mixed_precision, config_editor.config_path(config_file or named))


def _write_default(mixed_precision: str, file: str | Path) -> None:
    from accelerate.cli.config_classes import write_basic_config

    if path := write_basic_config(mixed_precision, file):
        click.echo(f"accelerate configuration saved at {path}")


@_config.command("update", short_help="Bring an old file up to date.")
@_file_option("the file; by default the one that a launch uses when none is named")
@click.pass_obj
def _update(named: str | None, config_file: str | None) -> None:
    """Bring an old file up to date: its keys as they are called today, its values as they are typed today."""
    from accelerate.cli.wizard import config_editor

    path = config_editor.config_path(config_file or named)
    changes, copy = config_editor.update_file(path)
    if not changes:
        click.echo(f"{path} is up to date")
        return
    click.echo(f"{path} is up to date now; the old file is {copy}")
    for each in changes:
        click.echo(f"  {each}")


PLUGIN = _config


# --- as argparse parsers and functions, for programs that bring them along


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of a command inside of others: its usage leaves their placeholders, ``<...>``, out."""

    def __init__(self, prog: str, *args: Any, **kwargs: Any) -> None:
        words = (word for word in prog.split() if not word.startswith(("<", "[<")))
        super().__init__(" ".join(words), *args, **kwargs)


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of ``accelerate config`` with its commands ``default`` and ``update``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command to it.
    """
    parser = config_command_parser(subparsers)
    commands = parser.add_subparsers(dest="subcommand", title="subcommands")
    for add_command in (default_command_parser, update_command_parser):
        add_command(commands, parents=[])
    return parser


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of ``accelerate config`` alone; ``subparsers`` as for ``get_config_parser``."""
    return _with_config_file(command_parser("config", config_command, subparsers, description=CONFIG))


def default_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the command ``default``.

    Args:
        parser: what ``ArgumentParser.add_subparsers`` returned.
        parents: parsers whose flags it has too.
    """
    added = _with_config_file(
        _subcommand(parser, "default", DEFAULT, parents),
        default_config_command,
        dest="save_location",
        metavar="FILE",
        default=str(config_files.default_file()),
    )
    precision = {"choices": PRECISIONS, "default": "no", "help": "number format of the forward pass"}
    added.add_argument(*flag_spellings("mixed_precision"), **precision)
    return added


def update_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the command ``update``; the arguments are those of ``default_command_parser``."""
    return _with_config_file(_subcommand(parser, "update", UPDATE, parents), update_config_command)


def _subcommand(commands: Any, name: str, text: str, parents: Any) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, parents=parents, formatter_class=SubcommandHelpFormatter)


def _with_config_file(
    parser: argparse.ArgumentParser, run: Callable[..., None] | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Return the parser with the flag of the configuration file, and the function that runs its command."""
    parser.add_argument(*flag_spellings("config_file"), help=_PARSER_FILE_HELP, **options)
    if run is not None:
        parser.set_defaults(func=run)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask, and write the file.

    Raises:
        SettingError: there is no terminal, or the file cannot be written.
    """
    ask_all(args.config_file)


def default_config_command(args: argparse.Namespace) -> None:
    """Write a file for all devices of this machine."""
    _write_default(args.mixed_precision, args.save_location)


def update_config(args: argparse.Namespace) -> str:
    """Bring a file up to date and return its path.

    Raises:
        SettingError: there is none, or something in it is wrong.
    """
    from accelerate.cli.wizard import config_editor

    path = config_editor.config_path(args.config_file)
    config_editor.update_file(path)
    return str(path)


def update_config_command(args: argparse.Namespace) -> None:
    """Bring a file up to date and say so."""
    print(f"{update_config(args)} is up to date")


def main() -> None:
    """``python -m accelerate.commands.config``."""
    parser = get_config_parser()
    args = parser.parse_args()
    getattr(args, "func", config_command)(args)
