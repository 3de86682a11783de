"""Command-line options made from declared settings, and their help, grouped by topic."""

from __future__ import annotations

from typing import Any

import click

from accelerate.core.setting import Setting
from accelerate.facade.asked import EffectsSettings
from accelerate.facade.gradient import GradientSettings
from accelerate.facade.resume import ResumeSettings
from accelerate.launch import later
from accelerate.launch.job import declarations
from accelerate.precision.settings import CompileSettings, PrecisionSettings
from accelerate.strategy.settings import SETTINGS
from accelerate.world.world import WorldSettings

# What a launch hands on to the script, in the order of its help.
HANDED: tuple[type[Any], ...] = (
    WorldSettings,
    PrecisionSettings,
    GradientSettings,
    *(cls for classes in SETTINGS for cls in classes),
    CompileSettings,
    ResumeSettings,
    EffectsSettings,
)

_METAVARS = {"str": "TEXT", "int": "N", "float": "X"}


class SettingOption(click.Option):
    """The flag of one setting. Values stay text: the setting checks them, whatever source they come from."""

    def __init__(self, row: Setting) -> None:
        self.row = row
        super().__init__(
            [row.name, *row.spellings],
            **({"is_flag": True, "flag_value": True} if row.switch else {}),
            default=None,
            type=click.UNPROCESSED,
            metavar=None if row.switch else _metavar(row),
            help=row.help,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """(flags, text): the long spelling and a short one; the text tells variable and key."""
        short = [flag for flag in self.row.flags if len(flag) == 2]
        names = ", ".join([*short, self.row.flags[0]])
        left = names if self.row.switch else f"{names} {self.metavar}"
        places = [self.row.variable] if self.row.variable else []
        places += [f"{self.row.path}:"] if self.row.in_file else []
        return left, f"{self.row.help}" + (f"  [{', '.join(places)}]" if places else "")


def _metavar(row: Setting) -> str:
    if row.choices:
        return "|".join(str(choice).lower() for choice in row.choices) if len(row.choices) <= 5 else "NAME"
    return next((sign for kind, sign in _METAVARS.items() if kind in str(row.type)), "TEXT")


def rows() -> tuple[Setting, ...]:
    """Every setting of a launch."""
    return declarations(HANDED)


def options() -> list[click.Parameter]:
    """The flags of a launch, and hidden those that are promised and not built, to refuse them in words."""
    return [*(SettingOption(row) for row in rows() if row.flags), *_refused()]


def _refused() -> list[click.Parameter]:
    found: list[click.Parameter] = []
    for names, switch in ((later.switches(), True), (later.flags(), False)):
        for name in names:
            spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
            kind: dict[str, Any] = {"is_flag": True, "flag_value": True} if switch else {}
            kind |= {"default": None, "hidden": True, "type": click.UNPROCESSED}
            found.append(click.Option([name, *spellings], **kind))
    return found


class TopicCommand(click.Command):
    """A command whose options stand under the topics of their settings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section per topic, in order of first appearance, the command's own flags last."""
        topics: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            entry = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if entry is not None:
                topic = param.row.topic if isinstance(param, SettingOption) else ""
                topics.setdefault(topic, []).append(entry)
        own = topics.pop("", [])
        for topic, entries in (*topics.items(), ("Other", own)):
            with formatter.section(topic):
                formatter.write_dl(entries, col_max=30)
