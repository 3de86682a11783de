"""``accelerate monitor``: show a recorded run in the terminal, while it goes on."""

from __future__ import annotations

import contextlib
import sys

import click


@click.command("monitor", short_help="Show a recorded run in the terminal, while it goes on.")
@click.argument("folder", metavar="FOLDER")
@click.option(
    "--every",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="between two looks",
)
@click.option("--once", is_flag=True, help="show the run as it is now, and end")
def _monitor(folder: str, every: float, once: bool) -> None:
    """Show steps, loss, throughput, and of each rank the time of its steps, waiting for data and memory.

    FOLDER is that of accelerate launch --record, on this machine; of several runs in it the one that began
    last is shown. It ends with the run, or with Ctrl-C, which does not touch the run. Where the output is no
    terminal, the run is shown once.
    """
    from rich.console import Console

    from accelerate.report.monitor import watch_run

    # A file or a pipe has no width: nothing is cut there.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with contextlib.suppress(KeyboardInterrupt):
        watch_run(folder, every, console, once=once or not sys.stdout.isatty())


PLUGIN = _monitor
