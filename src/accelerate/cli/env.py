"""``accelerate env``: print what a bug report needs, or where every setting comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.main import command_parser, flag_spellings
from accelerate.cli.options import SCRIPT_SETTINGS, GroupedOptionsCommand, launch_settings, options
from accelerate.core import environ
from accelerate.core.errors import AccelerateError
from accelerate.core.tables import print_table
from accelerate.device import DeviceProbeHost, accelerators
from accelerate.launch import config_files
from accelerate.launch.base import display_value
from accelerate.launch.launch_request import LaunchRequest, find_config, read_request

if TYPE_CHECKING:
    import argparse

_HELP = """Print what a bug report needs: versions, paths, devices, the configuration file.

\b
accelerate env --config_file job.yaml   with another configuration file
accelerate env --explain                every setting and its origin
accelerate env --explain -n 2 --cpu     the same for a launch with flags
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
        _print_origins(read_request(given, program, SCRIPT_SETTINGS))
        return
    named = given.pop("config_file")
    typed = [*program, *(f"--{name}" for name, value in given.items() if value is not None)]
    if typed:
        raise click.UsageError(f"{typed[0]} means something only with --explain")
    click.echo("\nCopy this into your report, and fill in what is missing:\n")
    for key, value in report_facts(named):
        click.echo(f"- `{key}`: {value}")


def report_facts(config_file: str | None = None) -> Iterator[tuple[str, str]]:
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
    yield "devices of this machine", _count_machine_devices(DeviceProbeHost())
    yield "system RAM", show_bytes(psutil.virtual_memory().total)
    yield "configuration file", _config_file_text(config_file)
    set_here = {k: v for k, v in environ.snapshot().items() if k.startswith("ACCELERATE_")}
    yield "ACCELERATE_* variables", ", ".join(f"{k}={v}" for k, v in sorted(set_here.items())) or "none"


def _torch_facts() -> Iterator[tuple[str, str]]:
    import json
    import subprocess

    process = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH],
        capture_output=True,
        text=True,
        env=environ.make_child_environment({}),
        check=False,
    )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        yield "PyTorch version", f"cannot be imported: {lines[-1] if lines else f'code {process.returncode}'}"
        return
    facts = json.loads(process.stdout.strip().splitlines()[-1])
    yield "PyTorch version", facts["version"]
    yield "PyTorch accelerator", facts["type"] if facts["count"] else "none"
    names = ", ".join(sorted(set(facts["names"])))
    yield "devices", f"{facts['count']} x {names}" if facts["count"] else "CPU only"


def _count_machine_devices(machine: DeviceProbeHost) -> str:
    """Count the devices by their nodes, also those that the build of torch, or a variable, hides."""
    counts = {device.type: device.count_physical(machine) for device in accelerators()}
    return ", ".join(f"{count} {type}" for type, count in counts.items() if count) or "none found"


def _config_file_text(named: str | None) -> str:
    try:
        file = find_config(named)
    except AccelerateError as error:
        return str(error)
    if file is None:
        return f"none (looked for {config_files.default_file()})"
    lines = [f"{key}: {value}" for key, value in file.values.items()]
    return "\n".join([str(file.path), *(f"    - {line}" for line in lines)])


def _print_origins(request: LaunchRequest) -> None:
    """Print a table of every setting: value, origin, and all that it overrides."""
    lines = [
        (
            row.name,
            display_value(row.name, first.value),
            first.where or "default",
            "; ".join(
                f"{display_value(row.name, each.value)} ({each.where or 'default'})" for each in others
            ),
        )
        for row in launch_settings()
        for first, *others in [request.origins[row.name]]
    ]
    defaults = {number for number, line in enumerate(lines) if line[2] == "default"}
    print_table(("setting", "value", "from", "overrides"), lines, dim=defaults)


PLUGIN = GroupedOptionsCommand(
    "env",
    callback=_run,
    params=[
        click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, metavar=""),
        click.Option(["--explain"], is_flag=True, help="every setting, its value, and where it comes from"),
        # Of a launch it is another flag.
        *(option for option in options() if "--explain" not in option.opts),
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
    parser = command_parser("env", env_command, subparsers)
    parser.add_argument(*flag_spellings("config_file"), help="the configuration file to show")
    return parser


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Print the facts, and return them.

    Args:
        args: what ``env_command_parser().parse_args()`` returned.
    """
    facts = dict(report_facts(args.config_file))
    print("\n".join(f"- `{key}`: {value}" for key, value in facts.items()))
    return facts


def main() -> int:
    """``python -m accelerate.commands.env``."""
    env_command(env_command_parser().parse_args())
    return 0
