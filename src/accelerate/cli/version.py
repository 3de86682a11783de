"""``accelerate version``: print the version of this package."""

from __future__ import annotations

import click


@click.command("version", short_help="Print the version of this package.")
def _version() -> None:
    """Print the version of this package, as `accelerate --version` does."""
    from importlib.metadata import version

    click.echo(f"accelerate, version {version('accelerate')}")


PLUGIN = _version
