"""``accelerate test``: try ranks, collectives, data, precision and checkpoints of a set-up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.main import command_parser, flag_spellings
from accelerate.cli.options import SCRIPT_SETTINGS, GroupedOptionsCommand, options
from accelerate.core.errors import RankError, SettingError
from accelerate.launch.launch_request import read_request

if TYPE_CHECKING:
    import argparse

SCRIPT = Path(__file__).resolve().parents[1] / "test_utils" / "scripts" / "test_script.py"
# Scripts read this line, as 1.x prints it.
SUCCESS = "Test is a success! You are ready for your distributed training!"

_HELP = """Launch a quick check of the configured set-up, and print a table of what works.

\b
accelerate test                    what `accelerate launch` would use here
accelerate test -n 2 --cpu         any flags of a launch

The processes are started as for any script. They look at ranks and devices, collectives, data,
precision, training and checkpoints. The exit code is 0 if nothing failed.
"""


def _launch_checks(given: dict[str, Any]) -> None:
    """Launch the checks.

    Raises:
        RankError: a check failed, after the table was printed; or a process did.
    """
    from accelerate.launch.launcher import launch

    wrong = next((name for name in ("module", "no_python") if given.get(name)), None)
    if wrong:
        raise SettingError(f"--{wrong} says what kind of script is launched, but the script is a fixed one")
    # The checks make many an Accelerator, and the table says what came of the options.
    launch(
        read_request({**given, "effects": given.get("effects") or "none"}, (str(SCRIPT),), SCRIPT_SETTINGS)
    )
    click.echo(f"\n{SUCCESS}")


def _run(**given: Any) -> None:
    try:
        _launch_checks(given)
    except RankError as error:
        if error.traceback:
            raise
        # The table has said what failed; that its process left with code 1 is no news.
        click.echo("\nTest failed: the table says which checks, and on which ranks.", file=sys.stderr)
        sys.exit(error.code)


PLUGIN = GroupedOptionsCommand(
    "test",
    callback=_run,
    params=[*options()],
    context_settings={"max_content_width": 110},
    help=_HELP,
    short_help="Check ranks, collectives, data, precision and checkpoints of a set-up.",
)


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028
    """An argparse parser with the flag ``--config_file``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command ``test`` to it.
    """
    parser = command_parser("test", test_command, subparsers)
    parser.add_argument(*flag_spellings("config_file"), help="the configuration file of the set-up to check")
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Launch the checks and print what they saw.

    Args:
        args: what ``test_command_parser().parse_args()`` returned.

    Raises:
        RankError: a check failed.
    """
    _launch_checks({"config_file": args.config_file})


def main() -> None:
    """``python -m accelerate.commands.test``."""
    test_command(test_command_parser().parse_args())
