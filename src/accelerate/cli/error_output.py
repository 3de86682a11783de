"""How errors look on a terminal: what, why, and what to type; never a traceback of ours."""

from __future__ import annotations

import sys

import click

from accelerate.core.errors import AccelerateError, SettingError, UnknownNameError

USAGE_EXIT_CODE = 2  # exit code of what was typed wrongly, as in every Unix tool


def print_error(error: AccelerateError, command: str) -> None:
    """Prints an error on stderr; colours only on a terminal."""
    lines = [f"{click.style(command, bold=True)}: {click.style(error.what, fg='red')}"]
    lines += [f"  {click.style('why:', bold=True)} {error.why}"] if error.why else []
    lines += [f"  {click.style('fix:', fg='green', bold=True)} {error.fix}"] if error.fix else []
    click.echo("\n".join(lines), file=sys.stderr)


def convert_usage_error(error: click.UsageError, command: str) -> AccelerateError:
    """A mistake that click found on the command line ``command``."""
    if isinstance(error, click.NoSuchOption):
        flags = [name for param in _params(error) for name in param.opts]
        return UnknownNameError("flag", error.option_name, flags, why=_help_hint(command))
    return SettingError(error.format_message().rstrip("."), fix=_help_hint(command))


def _params(error: click.UsageError) -> list[click.Parameter]:
    return error.ctx.command.get_params(error.ctx) if error.ctx else []


def _help_hint(command: str) -> str:
    return f"{command} --help lists all flags"
