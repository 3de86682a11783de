"""Command-line options made from declared settings, and their help, grouped by topic."""

from __future__ import annotations

from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from accelerate.core.setting import Setting, declared_settings
from accelerate.core.value_types import plain_type
from accelerate.facade.launch_settings import (
    CompileSettings,
    GradientAccumulationSettings,
    OptionReportSettings,
    PrecisionSettings,
    ResumeSettings,
)
from accelerate.launch.kinds import KINDS
from accelerate.launch.launch_request import JobSettings, all_settings
from accelerate.precision.recipes import RECIPES
from accelerate.strategy.launch_settings import SETTINGS
from accelerate.world.settings import ProcessDeviceSettings

# What a launch hands on to the script, in the order of its help.
SCRIPT_SETTINGS: tuple[type[Any], ...] = (
    ProcessDeviceSettings,
    PrecisionSettings,
    *RECIPES,
    GradientAccumulationSettings,
    *(cls for classes in SETTINGS for cls in classes),
    CompileSettings,
    ResumeSettings,
    OptionReportSettings,
)

_TYPED_FLAGS = "accelerate.cli.options.typed"
_UNFOLDED_FLAGS = 4  # as many flags are shown without being asked for
_SHOWN_CHOICES = 5  # more of them are a NAME in the help
_METAVARS = {str: "TEXT", int: "N", float: "X"}


class SettingFlag(click.Option):
    """The flag of one setting. Values stay text: the setting checks them, whatever source they come from."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        kinds = [plain_type(kind) for kind in setting.types]
        metavar = next((sign for kind, sign in _METAVARS.items() if kind in kinds), "TEXT")
        if setting.choices:
            words = "|".join(str(choice).lower() for choice in setting.choices)
            metavar = words if len(setting.choices) <= _SHOWN_CHOICES else "NAME"
        super().__init__(
            [setting.name, *setting.spellings],
            **({"is_flag": True, "flag_value": True} if setting.switch else {}),
            default=None,
            type=click.UNPROCESSED,
            multiple=tuple[str, ...] in kinds,
            metavar=None if setting.switch else metavar,
            help=setting.help,
        )

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The text that was typed; of a flag that may be repeated all texts, with commas."""
        text = super().type_cast_value(ctx, value)
        return (",".join(text) or None) if self.multiple else text

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The values that it can have, or file names."""
        if self.setting.name.endswith(("_file", "_path", "_dir", "hostfile")):
            return [CompletionItem(incomplete, type="dir" if self.setting.name.endswith("_dir") else "file")]
        values = [str(choice).lower() for choice in self.setting.choices]
        if not values and bool in get_args(self.setting.type):
            values = ["true", "false"]
        return [CompletionItem(value) for value in values if value.startswith(incomplete.lower())]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """(flags, text): the long spelling and a short one; the text tells variable and key."""
        short = [flag for flag in self.setting.flags if len(flag) == 2]
        names = ", ".join([*short, self.setting.flags[0]])
        left = names if self.setting.switch else f"{names} {self.metavar}"
        places = [self.setting.variable] if self.setting.variable else []
        places += [f"{self.setting.path}:"] if self.setting.in_file else []
        return left, f"{self.setting.help}" + (f"  [{', '.join(places)}]" if places else "")


def launch_settings() -> tuple[Setting, ...]:
    """Every setting of a launch."""
    return all_settings(SCRIPT_SETTINGS)


def options() -> list[click.Parameter]:
    """The flags of a launch."""
    return [SettingFlag(row) for row in all_settings(SCRIPT_SETTINGS) if row.flags]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """File names, which the shell knows best."""
    return [CompletionItem(incomplete, type="file")]


class GroupedOptionsCommand(click.Command):
    """A command whose options stand under the topics of their settings.

    A topic of one way of training or of launching is folded: its switch is shown, and how many more flags
    there are. It is unfolded when one of its flags is typed: ``accelerate launch --use_fsdp --help``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keeps what was typed, for the help, which comes before everything else is parsed."""
        ctx.meta[_TYPED_FLAGS] = {arg.partition("=")[0] for arg in args}
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its flags, each in one spelling; what follows the script is the script's."""
        if ctx.params.get("program"):
            return []
        items = super().shell_complete(ctx, incomplete)
        dashed = "-" in incomplete.lstrip("-")
        return [item for item in items if dashed or "-" not in str(item.value).lstrip("-")]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section per topic, in order of first appearance, the command's own flags last."""
        topics: dict[str, list[click.Option]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and not param.hidden:
                topic = param.setting.topic if isinstance(param, SettingFlag) else ""
                topics.setdefault(topic, []).append(param)
        other_params = topics.pop("", [])
        foldable = folded_topics()
        for topic, params in (*topics.items(), ("Other", other_params)):
            entries = [entry for param in params if (entry := param.get_help_record(ctx))]
            typed = ctx.meta.get(_TYPED_FLAGS, set()) & {name for param in params for name in param.opts}
            if topic in foldable and params[0].is_flag and not typed:
                shows = f"{ctx.command_path} {params[0].opts[0]} --help shows them"
                entries = [entries[0], (f"... {len(entries) - 1} more", shows)]
            with formatter.section(topic):
                formatter.write_dl(entries, col_max=30)


def folded_topics() -> set[str]:
    """The topics that belong to one way of training or of launching alone."""
    switches = {switch for cls in SCRIPT_SETTINGS if (switch := getattr(cls, "__switch__", ""))}
    classes = [
        cls
        for cls in SCRIPT_SETTINGS
        if hasattr(cls, "__switch__") or switches & {r.name for r in declared_settings(cls)}
    ]
    classes += [cls for kind in KINDS for cls in kind.settings]
    common = {
        row.topic
        for cls in (JobSettings, *SCRIPT_SETTINGS)
        if cls not in classes
        for row in declared_settings(cls)
    }
    topics = [row.topic for cls in classes for row in declared_settings(cls) if row.flags]
    return {topic for topic in topics if topic not in common and topics.count(topic) > _UNFOLDED_FLAGS}
