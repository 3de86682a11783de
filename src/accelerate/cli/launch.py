"""``accelerate launch``: start a script with one process per device, or as many as you say."""

from __future__ import annotations

import sys
from typing import Any

import click

from accelerate.cli.options import SCRIPT_SETTINGS, GroupedOptionsCommand, complete_files, options
from accelerate.launch.launch_request import read_request

_HELP = """Start a script with one process per device, or as many as you say.

\b
accelerate launch train.py --epochs 3   one process per device
accelerate launch -n 4 --cpu train.py   four processes on the CPU
accelerate launch -m package.train      a module
accelerate launch --dry-run train.py    what this would start, and why
What follows the script, or a -- behind it, is its own. --a_b is also --a-b.
The order of precedence: the script's own code, flag, environment, file.
"""


def _run(**given: Any) -> None:
    from accelerate.launch.launcher import launch, leave_outer_launch

    program = given.pop("program")
    with leave_outer_launch():
        launch(read_request(given, program, SCRIPT_SETTINGS), replace=True)


PLUGIN = GroupedOptionsCommand(
    "launch",
    callback=_run,
    shows_common=True,
    params=[
        click.Argument(
            ["program"],
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="SCRIPT [ARGUMENTS OF SCRIPT]...",
            shell_complete=complete_files,
        ),
        *options(),
    ],
    # What follows the script is not ours, whatever it looks like.
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
    help=_HELP,
    short_help="Start a script with one process per device, or as many as you say.",
)


def main() -> None:
    """``accelerate-launch``."""
    from accelerate.cli.main import launch as command

    sys.exit(command())
