"""``accelerate report``: the page of one or several runs."""

from __future__ import annotations

from pathlib import Path

import click

from accelerate.core.errors import SettingError
from accelerate.core.units import show_bytes


@click.command("report", short_help="Draw runs as one HTML page, without an account or a network.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option(
    "--output",
    "-o",
    default="report.html",
    show_default=True,
    type=click.Path(path_type=Path),
    help="the page",
)
@click.option(
    "--watch", is_flag=True, help="serve the page on this machine and refresh it while the run goes on"
)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="of --watch (default: a free one)")
def _report(runs: tuple[str, ...], output: Path, watch: bool, port: int) -> None:
    """Draw RUN, a .jsonl file of the jsonl tracker or a folder of such, as one HTML page.

    Several runs are compared: one curve each in every chart, one column each in the table of hyperparameters.
    The page opens without a network; each chart can be saved as a PNG.
    """
    from accelerate.report.page import render_page, serve_page
    from accelerate.report.run_reader import read_runs

    if watch:
        serve_page(runs, port)
        return
    read = read_runs(runs)
    page = render_page(read)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SettingError(
            f"cannot write {output}", why=error.strerror or str(error), fix="give another --output"
        ) from error
    names = f"{len(read)} runs" if len(read) > 1 else read[0].name
    click.echo(f"{output}: {names}, {show_bytes(len(page.encode()))}; open it in a browser")


PLUGIN = _report
