"""The ``accelerate`` command. Its sub-commands are the files of this folder that define ``PLUGIN``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from accelerate.core import environ
from accelerate.core.errors import AccelerateError, RankError, SettingError, UnknownNameError
from accelerate.core.registry import Registry

if TYPE_CHECKING:
    import argparse

USAGE_EXIT_CODE = 2  # exit code of what was typed wrongly, as in every Unix tool

COMMANDS: Registry[click.Command] = Registry(
    "command",
    "accelerate.cli",
    "accelerate.commands",
    exclude=(
        "bar_charts",
        "config_classes",
        "main",
        "options",
        "v1_launcher",
    ),
)


class CommandGroup(click.Group):
    """Commands below one name; a name that is none of them is an error with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that ``args`` begins with.

        Raises:
            UnknownNameError: there is none of that name.
        """
        # A shell that completes a half-typed line asks here too, and gets no error.
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise UnknownNameError("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class LazyCommandRegistry(CommandGroup):
    """The commands that exist; each is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names as typed: a file's underscores are dashes."""
        return sorted(name.replace("_", "-") for name in COMMANDS.names())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        name = cmd_name.replace("-", "_")
        return COMMANDS.get(name) if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them. What a command says of itself is the first line of its file, which is not imported."""
        rows: list[tuple[str, str]] = []
        for typed in self.list_commands(ctx):
            summary = COMMANDS.summary(typed.replace("-", "_"))
            command = None if summary else self.get_command(ctx, typed)
            rows.append((typed, command.get_short_help_str() if command else summary))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    "accelerate",
    cls=LazyCommandRegistry,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # its commands take these over
)
@click.version_option(package_name="accelerate", prog_name="accelerate")
@click.pass_context
def accelerate(ctx: click.Context) -> None:
    """Launch, train and run PyTorch models on any hardware."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(1)


def run(args: Sequence[str], name: str = "accelerate") -> int:
    """Run the command line ``args`` and return the exit code."""
    try:
        result = accelerate.main(args=list(args), prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        _print_error(_convert_usage_error(error, _command_name(args, name)), _command_name(args, name))
    except AccelerateError as error:
        code = error.code if isinstance(error, RankError) else USAGE_EXIT_CODE
        if report := environ.get("ACCELERATE_ERROR_FILE"):
            _write_error(error, code, report)
        elif isinstance(error, RankError):
            click.echo(error.format_text(), file=sys.stderr)
        else:
            _print_error(error, _command_name(args, name))
        return code
    except (click.Abort, KeyboardInterrupt):
        return 130
    return USAGE_EXIT_CODE


def _command_name(args: Sequence[str], name: str) -> str:
    """``accelerate launch``, the command as the user typed it."""
    return f"{name} {args[0]}" if args and not args[0].startswith("-") else name


def _print_error(error: AccelerateError, command: str) -> None:
    """Print an error on stderr: what, why, and what to type, never a traceback; colours on a terminal."""
    lines = [f"{click.style(command, bold=True)}: {click.style(error.what, fg='red')}"]
    lines += [f"  {click.style('why:', bold=True)} {error.why}"] if error.why else []
    lines += [f"  {click.style('fix:', fg='green', bold=True)} {error.fix}"] if error.fix else []
    click.echo("\n".join(lines), file=sys.stderr)


def _write_error(error: AccelerateError, code: int, path: str) -> None:
    """Leave an error for the launcher around this one, which prints those of all machines once."""
    import json

    with open(path, "w", encoding="utf-8") as file:
        json.dump({**vars(error), "code": code}, file)


def _convert_usage_error(error: click.UsageError, command: str) -> AccelerateError:
    """A mistake that click found on the command line ``command``."""
    params = error.ctx.command.get_params(error.ctx) if error.ctx else []
    flags = [name for param in params for name in param.opts]
    hint = f"{command} {'--help-all' if '--help-all' in flags else '--help'} lists all flags"
    if isinstance(error, click.NoSuchOption):
        return UnknownNameError("flag", error.option_name, flags, why=hint)
    missing = error.param if isinstance(error, click.MissingParameter) else None
    if isinstance(missing, click.Option) and missing.metavar:
        hint = f"{missing.opts[0]} {missing.metavar}: {missing.help}; {hint}"
    return SettingError(error.format_message().rstrip("."), fix=hint)


def run_process(*words: str) -> int:
    """Run the command line of this process, which begins with ``words``, and return its exit code.

    What a command loads is in use until it ends. Looking for garbage in it, while it loads and when it ends,
    would take an eighth of the time of a help text.

    Debuggers and scripts that start ``python -m accelerate.commands.launch``, as 1.x has it, come here too.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000)
    try:
        return run([*words, *sys.argv[1:]])
    finally:
        gc.freeze()
        gc.set_threshold(*before)


# --- for the files of commands


def flag_spellings(name: str) -> list[str]:
    """Return both spellings of a flag, ``--a_b`` and ``--a-b``; the one of ``name`` first."""
    both = (f"--{name}", f"--{name.replace('-', '_')}", f"--{name.replace('_', '-')}")
    return list(dict.fromkeys(both))


class WordListCommand(click.Command):
    """A command that takes ``--flag a b`` as argparse does: the words up to the next flag.

    Args:
        word_flag: the flag.
        is_last_word: whether the last word of the command line may be one of the flag's.
    """

    def __init__(
        self,
        *args: Any,
        word_flag: str,
        is_last_word: Callable[[Sequence[str]], bool] = lambda args: True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.word_flag, self.is_last_word = word_flag, is_last_word

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell ``--flag a b`` as ``--flag a --flag b``; a word that begins with ``-`` is a flag."""
        words: list[str] = []
        in_list = False
        for index, arg in enumerate(args):
            if arg.startswith("-"):
                in_list = arg.partition("=")[0] == self.word_flag
            elif in_list and words[-1] != self.word_flag:
                words += [self.word_flag] if index < len(args) - 1 or self.is_last_word(args) else []
            words.append(arg)
        return super().parse_args(ctx, words)


def command_parser(
    name: str, run: Callable[..., Any], subparsers: Any = None, **options: Any
) -> argparse.ArgumentParser:
    """Return an argparse parser of a command, for programs that bring it along.

    Args:
        name: of the command.
        run: what the program calls with the parsed arguments, ``args.func(args)``, beside its own commands.
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command to it.
        options: of ``argparse.ArgumentParser``.
    """
    import argparse

    if subparsers is None:
        return argparse.ArgumentParser(f"accelerate {name}", **options)
    parser: argparse.ArgumentParser = subparsers.add_parser(name, **options)
    parser.set_defaults(func=run)
    return parser


# --- the console scripts


def main() -> int:
    """``accelerate``."""
    return run_process()


def launch() -> int:
    """``accelerate-launch``."""
    return run_process("launch")


def config() -> int:
    """``accelerate-config``."""
    return run_process("config")


def estimate_memory() -> int:
    """``accelerate-estimate-memory``."""
    return run_process("estimate-memory")


def merge_weights() -> int:
    """``accelerate-merge-weights``."""
    return run_process("merge-weights")
