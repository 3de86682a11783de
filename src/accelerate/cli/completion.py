"""``accelerate completion``: print the script by which a shell completes commands and flags."""

from __future__ import annotations

from pathlib import PurePath

import click
from click.shell_completion import ShellComplete, get_completion_class

from accelerate.core import environ
from accelerate.core.errors import SettingError

# Where each shell looks for such scripts, which it reads when they are first needed.
_HOMES = {
    "bash": "~/.local/share/bash-completion/completions/accelerate",
    "fish": "~/.config/fish/completions/accelerate.fish",
    "zsh": '"${fpath[1]}/_accelerate"',
}
_HELP = """Print the script by which a shell completes commands, flags, their values and file names.

\b
accelerate completion bash > ~/.local/share/bash-completion/completions/accelerate
accelerate completion fish > ~/.config/fish/completions/accelerate.fish
accelerate completion zsh > "${fpath[1]}/_accelerate"
Without a name it is the shell that $SHELL names. New shells then know it.
"""


@click.command(
    "completion",
    help=_HELP,
    short_help="Print the script by which a shell completes commands and flags.",
)
@click.argument("shell", type=click.Choice(sorted(_HOMES)), required=False)
def _completion(shell: str | None) -> None:
    name = shell or PurePath(environ.get("SHELL") or "").name
    kind = get_completion_class(name) if name in _HOMES else None
    if kind is None:
        raise SettingError(
            f"there is no completion for the shell {name!r} ($SHELL)",
            fix=f"name one of {', '.join(sorted(_HOMES))}",
        )
    root = click.get_current_context().find_root()
    maker = kind(root.command, {}, "accelerate", "_ACCELERATE_COMPLETE")
    # Of the base class: that of bash starts one to ask for its version, which may not be here at all.
    click.echo(ShellComplete.source(maker).strip())
    click.echo(f"# to install: accelerate completion {name} > {_HOMES[name]}")


PLUGIN = _completion
