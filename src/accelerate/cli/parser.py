"""The flags of ``accelerate launch`` as an argparse parser, for programs that are launchers themselves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import click

from accelerate.cli.options import HANDED
from accelerate.launch.base import launch
from accelerate.launch.errors import RankError
from accelerate.launch.job import read


class LaunchParser(argparse.ArgumentParser):
    """The flags of ``accelerate launch`` as an argparse parser; its namespace goes to ``launch_command``."""

    def __init__(self, *, command: click.Command, **arguments: Any) -> None:
        defaults = {"prog": "accelerate launch", "allow_abbrev": False, "description": command.short_help}
        super().__init__(**defaults | arguments)
        for param in command.params:
            if not isinstance(param, click.Option):
                continue
            kind: dict[str, Any] = {"action": "store_true", "default": None} if param.is_flag else {}
            kind |= {"action": "append", "default": None} if param.multiple else {}
            help = argparse.SUPPRESS if param.hidden else (param.help or "").replace("%", "%%")
            self.add_argument(*param.opts, dest=_dest(param), help=help, **kind)
        self.add_argument("training_script", nargs="?", help="the script, module or program")
        self.add_argument("training_script_args", nargs="*", help="its arguments, untouched")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the flags; the script and what follows it are kept as they are, also ``--`` and flags."""
        args = list(sys.argv[1:] if args is None else args)
        split = self._first_positional(args)
        known, unknown = super().parse_known_args(args[:split], namespace or argparse.Namespace())
        program = args[split:]
        known.training_script = program[0] if program else None
        known.training_script_args = program[1:]
        return known, unknown

    def _first_positional(self, args: Sequence[str]) -> int:
        """The index of the first word that is neither a flag nor a flag's value."""
        skip = False
        for index, word in enumerate(args):
            if skip:
                skip = False
            elif word == "--":
                return index + 1
            elif not word.startswith("-"):
                return index
            else:
                action = self._option_string_actions.get(word)
                skip = action is not None and action.nargs != 0
        return len(args)

    def error(self, message: str) -> NoReturn:
        """Exits with code 2, as the command does."""
        self.exit(2, f"accelerate launch: {message}\n  fix: accelerate launch --help lists all flags\n")


def _dest(param: click.Parameter) -> str:
    """The attribute of the namespace that holds a flag: called like the flag, as in 1.x (``args.cpu``)."""
    return param.opts[0].lstrip("-").replace("-", "_")


def launch_command_parser(command: click.Command, subparsers: Any = None) -> argparse.ArgumentParser:
    """See ``accelerate.cli.launch.launch_command_parser``."""
    if subparsers is None:
        return LaunchParser(command=command)
    theirs, subparsers._parser_class = subparsers._parser_class, partial(LaunchParser, command=command)
    parser: argparse.ArgumentParser = subparsers.add_parser("launch", help=command.short_help)
    subparsers._parser_class = theirs
    parser.set_defaults(func=partial(launch_command, command))
    return parser


def launch_command(command: click.Command, args: argparse.Namespace) -> None:
    """See ``accelerate.cli.launch.launch_command``."""
    given: Mapping[str, Any] = vars(args)
    names = {_dest(param): param.name for param in command.params}
    script = given.get("training_script")
    program = (script, *(given.get("training_script_args") or ())) if script else ()
    try:
        flags = {names[dest]: value for dest, value in given.items() if dest in names}
        launch(read(flags, program, HANDED))
    except RankError as error:
        print(error.shown(), file=sys.stderr, flush=True)
        raise
