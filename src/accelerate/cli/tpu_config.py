"""``accelerate tpu-config``: run commands on the machines of a TPU pod, to set them up."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.main import WordListCommand, command_parser, flag_spellings
from accelerate.core.errors import SettingError
from accelerate.launch.config_files import expand_home
from accelerate.launch.kinds.tpu import check_gcloud_installed, worker_command
from accelerate.launch.launch_request import find_config

if TYPE_CHECKING:
    import argparse

_description = "Prepare the machines of a TPU pod: run shell commands on all of them before a launch."
_FOLDER = "/usr/share"
_HELP = {
    "config_file": "the configuration file with tpu_name, tpu_zone and commands",
    "tpu_name": "what the pod is called; by default as the file says",
    "tpu_zone": "the zone in which it is; by default as the file says",
    "use_alpha": "use gcloud's alpha commands",
    "command_file": "a file with a command a line",
    "command": "a command to run, or several; may be given again",
    "install_accelerate": "first install accelerate on the machines",
    "accelerate_version": "the version to install; 'latest' for the newest",
    "debug": "print what would be run, and run nothing",
}
_SWITCHES = ("use_alpha", "install_accelerate", "debug")


def build_program(given: dict[str, Any]) -> tuple[str, ...]:
    """The program that runs the commands on all machines.

    Args:
        given: the flags by name; None for "not given".

    Raises:
        SettingError: there is nothing to run, or no TPU is named, or a file cannot be read.
    """
    file = find_config(given["config_file"])
    file_values = dict(file.values) if file is not None else {}
    commands = _read_commands(given, file_values)
    if given["install_accelerate"]:
        version = given["accelerate_version"]
        package = "-U accelerate" if version == "latest" else f"accelerate=={version}"
        commands = [f"pip install {package}", *commands]
    if not commands:
        raise SettingError(
            "there is nothing to run",
            why="neither a flag nor the configuration file names a command",
            fix="add --command '...', or commands: [...] in the configuration file",
        )
    return worker_command(
        "; ".join([f"cd {_FOLDER}", *commands]),
        name=given["tpu_name"] or file_values.get("tpu_name"),
        zone=given["tpu_zone"] or file_values.get("tpu_zone"),
        alpha=given["use_alpha"],
    )


def _read_commands(given: dict[str, Any], said: dict[str, Any]) -> list[str]:
    """Read the commands: those typed, else those of a named file, else those of the configuration."""
    for source in (given, said):
        commands = source.get("command") or source.get("commands") or ()
        if commands:
            return list(_flatten_commands(commands))
        if source.get("command_file"):
            return _read_lines(source["command_file"])
    return []


def _flatten_commands(commands: str | Sequence[Any]) -> list[str]:
    """A list of commands, of which some may be lists: argparse makes one for each flag."""
    if isinstance(commands, str):
        return [commands]
    return [line for each in commands for line in _flatten_commands(each)]


def _read_lines(name: str) -> list[str]:
    try:
        text = expand_home(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the file of commands {name} cannot be read", why=str(error)) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _run(**given: Any) -> int:
    command = build_program(given)
    if given["debug"]:
        click.echo(f"Running {shlex.join(command)}")
        return 0
    check_gcloud_installed()
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        click.echo("The commands have run on all machines of the pod.")
    return code


def _option(name: str) -> click.Option:
    kind: dict[str, Any] = {"is_flag": True} if name in _SWITCHES else {"default": None}
    kind |= {"multiple": True} if name == "command" else {}
    kind |= {"default": "latest", "show_default": True} if name == "accelerate_version" else {}
    return click.Option([*flag_spellings(name), name], help=_HELP[name], **kind)


PLUGIN = WordListCommand(
    "tpu-config",
    word_flag="--command",
    callback=_run,
    params=[_option(name) for name in _HELP],
    help=f"{_description}\n\nNot run on a TPU: tested with a fake gcloud.",
    short_help="Run commands on every machine of a TPU pod.",
)


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """An argparse parser with the flags of ``accelerate tpu-config``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command to it.
    """
    parser = command_parser("tpu-config", tpu_command_launcher, subparsers, description=_description)
    for flag, text in _HELP.items():
        kind: dict[str, Any] = {"action": "store_true"} if flag in _SWITCHES else {"default": None}
        kind |= {"action": "append", "nargs": "+"} if flag == "command" else {}
        kind |= {"default": "latest"} if flag == "accelerate_version" else {}
        parser.add_argument(*flag_spellings(flag), help=text, **kind)
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands, or print them.

    Args:
        args: what ``tpu_command_parser().parse_args()`` returned.

    Raises:
        SystemExit: gcloud failed; it has its exit code.
    """
    code = _run(**{name: getattr(args, name) for name in _HELP})
    if code:
        sys.exit(code)


def main() -> None:
    """``python -m accelerate.commands.tpu``."""
    tpu_command_launcher(tpu_command_parser().parse_args())
