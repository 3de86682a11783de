"""The configuration commands as argparse parsers and functions, for programs that bring them along."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate.cli import config
from accelerate.cli.config_classes import BaseConfig, ClusterConfig, SageMakerConfig, write_basic_config
from accelerate.cli.wizard import config_editor, questions, terminal
from accelerate.launch import config_files

C = TypeVar("C", bound=BaseConfig)
_FILE_HELP = "the configuration file; by default default_config.yaml in the cache folder"
CONFIG = "Asks questions and writes the answers to the file that `accelerate launch` reads its settings from."
DEFAULT = "Writes a file for all devices of this machine; one that exists stays as it is."
UPDATE = "Brings an old file up to date: what it says stays, in today's keys and types."


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
    if subparsers is None:
        return _with_config_file(argparse.ArgumentParser("accelerate config", description=CONFIG))
    return _with_config_file(subparsers.add_parser("config", description=CONFIG), config_command)


def default_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Adds the command ``default``.

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
    precision = {"choices": config.PRECISIONS, "default": "no", "help": "number format of the forward pass"}
    added.add_argument("--mixed_precision", "--mixed-precision", **precision)
    return added


def update_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Adds the command ``update``; the arguments are those of ``default_command_parser``."""
    return _with_config_file(_subcommand(parser, "update", UPDATE, parents), update_config_command)


def _subcommand(commands: Any, name: str, text: str, parents: Any) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, parents=parents, formatter_class=SubcommandHelpFormatter)


def _with_config_file(
    parser: argparse.ArgumentParser, run: Callable[..., None] | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Return the parser with the flag of the configuration file, and the function that runs its command."""
    parser.add_argument("--config_file", "--config-file", help=_FILE_HELP, **options)
    if run is not None:
        parser.set_defaults(func=run)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Asks, and writes the file.

    Raises:
        SettingError: there is no terminal, or the file cannot be written.
    """
    config.ask_all(args.config_file)


def default_config_command(args: argparse.Namespace) -> None:
    """Writes a file for all devices of this machine."""
    path = write_basic_config(args.mixed_precision, args.save_location)
    if path:
        print(f"written to {path}")


def update_config(args: argparse.Namespace) -> str:
    """Brings a file up to date and returns its path.

    Raises:
        SettingError: there is none, or something in it is wrong.
    """
    path = config_editor.config_path(args.config_file)
    config_editor.update_file(path)
    return str(path)


def update_config_command(args: argparse.Namespace) -> None:
    """Brings a file up to date and says so."""
    print(f"{update_config(args)} is up to date")


def get_cluster_input() -> ClusterConfig:
    """Asks about a job on machines of one's own; nothing is written."""
    return _ask_config(questions.ask_cluster, ClusterConfig, {("compute_environment",): "LOCAL_MACHINE"})


def get_sagemaker_input() -> SageMakerConfig:
    """Asks about a job on Amazon SageMaker; nothing is written."""
    return _ask_config(
        questions.ask_sagemaker, SageMakerConfig, {("compute_environment",): questions.SAGEMAKER}
    )


def get_user_input() -> ClusterConfig | SageMakerConfig:
    """Asks where the job runs, and then about it; nothing is written."""
    environment_number = terminal.ask_question(
        questions.environment_question(questions.WizardAnswers({})),
        0,
        questions.WizardAnswers({}),
        _placeholder_path(),
    )
    return get_sagemaker_input() if environment_number else get_cluster_input()


def _ask_config(way: Any, kind: type[C], known: dict[tuple[str, ...], Any]) -> C:
    _, answers = terminal.ask_questions(way, _placeholder_path(), {}, {}, known)
    return kind.of_values(answers.nested_values())


def _placeholder_path() -> Path:
    return Path("your answers")


def main() -> None:
    """``python -m accelerate.commands.config``."""
    parser = get_config_parser()
    args = parser.parse_args()
    getattr(args, "func", config_command)(args)
