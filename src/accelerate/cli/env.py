"""``accelerate env``: print what a bug report needs, or where every setting comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.options import HANDED, TopicCommand, options, rows
from accelerate.core import environ
from accelerate.core.errors import AccelerateError
from accelerate.launch import files
from accelerate.launch.effects import shown
from accelerate.launch.job import Request, read

if TYPE_CHECKING:
    import argparse

_HELP = """Print what a bug report needs: versions, paths, devices, the configuration file.

\b
accelerate env --explain                          every setting, its value, where it comes from
accelerate env --explain -n 2 --cpu               the same for `accelerate launch -n 2 --cpu`
"""

# torch is imported by a process of its own: this one stays quick, and a broken torch is a line of the report.
_ASK_TORCH = """
import json
from accelerate import device
import torch
best = device.detect()
count = best.count() if best.type != "cpu" else 0
names = [best.name(index) for index in range(count)]
print(json.dumps({"version": torch.__version__, "type": best.type, "count": count, "names": names}))
"""


def _run(explain: bool, program: tuple[str, ...], **given: Any) -> None:
    if explain:
        _explain(read(given, program, HANDED))
        return
    named = given.pop("config_file")
    typed = [*program, *(f"--{name}" for name, value in given.items() if value is not None)]
    if typed:
        raise click.UsageError(f"{typed[0]} means something only with --explain")
    click.echo("\nCopy this into your report, and fill in what is missing:\n")
    for key, value in facts(named):
        click.echo(f"- `{key}`: {value}")


def facts(config_file: str | None = None) -> Iterator[tuple[str, str]]:
    """(what, value) of everything that a bug report needs.

    Args:
        config_file: the configuration file; the one that a launch here would use when None.
    """
    import platform
    import shutil
    from importlib import metadata

    import psutil

    from accelerate.core.units import show_bytes

    yield "accelerate version", metadata.version("accelerate")
    yield "platform", platform.platform()
    yield "accelerate bash location", shutil.which("accelerate") or "not on the PATH"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "numpy version", metadata.version("numpy")
    yield from _torch_facts()
    yield "system RAM", show_bytes(psutil.virtual_memory().total)
    yield "configuration file", _file_facts(config_file)
    set_here = {k: v for k, v in environ.snapshot().items() if k.startswith("ACCELERATE_")}
    yield "ACCELERATE_* variables", ", ".join(f"{k}={v}" for k, v in sorted(set_here.items())) or "none"


def _torch_facts() -> Iterator[tuple[str, str]]:
    import json
    import subprocess

    asked = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, env=environ.child({}), check=False
    )
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines()
        yield "PyTorch version", f"cannot be imported: {lines[-1] if lines else f'code {asked.returncode}'}"
        return
    told = json.loads(asked.stdout.strip().splitlines()[-1])
    yield "PyTorch version", told["version"]
    yield "PyTorch accelerator", told["type"] if told["count"] else "none"
    yield (
        "devices",
        f"{told['count']} x {', '.join(sorted(set(told['names'])))}" if told["count"] else "CPU only",
    )


def _file_facts(named: str | None) -> str:
    try:
        file = files.find(named)
    except AccelerateError as error:
        return str(error)
    if file is None:
        return f"none (looked for ./{files.WORKING_NAME} and {files.default_file()})"
    lines = [f"{key}: {value}" for key, value in file.values.items()]
    return "\n".join([str(file.path), *(f"\t- {line}" for line in lines)])


def _explain(request: Request) -> None:
    """Prints a table of every setting: value, origin, and all that it overrides."""
    lines = [
        (
            row.name,
            shown(row.name, first.value),
            first.where or "default",
            "; ".join(_other(row.name, each) for each in others),
        )
        for row in rows()
        for first, *others in [request.origins(row.name)]
    ]
    titles = ("setting", "value", "from", "overrides")
    if not sys.stdout.isatty():
        for line in (titles, *lines):
            click.echo("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, title="code > flag > environment > file > default")
    for line in lines:
        table.add_row(*line, style=None if line[2] != "default" else "dim")
    Console().print(table)


def _other(name: str, origin: Any) -> str:
    return f"{shown(name, origin.value)} ({origin.where or 'default'})"


PLUGIN = TopicCommand(
    "env",
    callback=_run,
    params=[
        click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, metavar=""),
        click.Option(["--explain"], is_flag=True, help="every setting, its value, and where it comes from"),
        *options(),
    ],
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
    help=_HELP,
    short_help="Print what a bug report needs, or where every setting comes from.",
    options_metavar="[--explain [FLAGS OF LAUNCH]]",
)


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """An argparse parser with the flag ``--config_file``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command ``env`` to it.
    """
    import argparse

    parser = argparse.ArgumentParser("accelerate env") if subparsers is None else subparsers.add_parser("env")
    parser.add_argument("--config_file", "--config-file", default=None, help="the configuration file to show")
    if subparsers is not None:
        parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Prints the facts, and returns them.

    Args:
        args: what ``env_command_parser().parse_args()`` returned.
    """
    found = dict(facts(args.config_file))
    print("\n".join(f"- `{key}`: {value}" for key, value in found.items()))
    return found


def main() -> int:
    """``python -m accelerate.commands.env``."""
    env_command(env_command_parser().parse_args())
    return 0
