"""Command-line options made from declared settings, and their help, grouped by topic."""

from __future__ import annotations

import re
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from accelerate.core.errors import UnknownNameError
from accelerate.core.setting import Setting
from accelerate.core.value_types import plain_type
from accelerate.device import ProcessDeviceSettings
from accelerate.facade.launch_settings import (
    CompileSettings,
    GradientAccumulationSettings,
    PrecisionSettings,
    ResumeSettings,
    RunReportSettings,
)
from accelerate.launch.launch_request import all_settings
from accelerate.precision.recipes import RECIPES
from accelerate.strategy.launch_settings import SETTINGS

# What a launch hands on to the script, in the order of its help.
SCRIPT_SETTINGS: tuple[type[Any], ...] = (
    ProcessDeviceSettings,
    PrecisionSettings,
    *RECIPES,
    GradientAccumulationSettings,
    *(cls for classes in SETTINGS for cls in classes),
    CompileSettings,
    ResumeSettings,
    RunReportSettings,
)

_TYPED_FLAGS = "accelerate.cli.options.typed"
_COMMON = "Common flags"
_HELP_TOPIC = "accelerate.cli.options.topic"  # True: every topic
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
    """A command with the flags of a launch.

    ``--help`` shows the common ones and names the topics, ``--help TOPIC`` shows one, ``--help-all`` every
    flag with its environment variable and its key. A flag that was typed before shows its topic too:
    ``accelerate launch --use_fsdp --help``.

    Args:
        shows_common: ``--help`` shows the common flags of a launch, not only the command's own.
    """

    def __init__(self, *args: Any, shows_common: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shows_common = shows_common

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what was typed, for the help; drop the ``--`` between a script and its arguments.

        1.x and torchrun drop it too, unless another one stands before the script.
        """
        typed = list(args)  # click empties the list
        ctx.meta[_TYPED_FLAGS] = {arg.partition("=")[0] for arg in typed}
        rest = super().parse_args(ctx, args)
        program: tuple[str, ...] = ctx.params.get("program") or ()
        if program[1:2] == ("--",) and typed[: -len(program)][-1:] != ["--"]:
            ctx.params["program"] = (*program[:1], *program[2:])
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its parameters, those of the help last."""
        flags = {"expose_value": False, "is_eager": True, "callback": _show_help}
        every = click.Option(
            ["--help_all", "--help-all"], is_flag=True, flag_value=True, help="show every flag", **flags
        )
        text = "show this, the flags of a topic, or those with a word in their names"
        optional = {"is_flag": False, "flag_value": "", "default": None, "metavar": "[TOPIC]"}
        topic = click.Option(["-h", "--help"], help=text, **optional, **flags)
        return [*self.params, every, topic]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its flags, each in one spelling; what follows the script is the script's."""
        if ctx.params.get("program"):
            return []
        items = super().shell_complete(ctx, incomplete)
        dashed = "-" in incomplete.lstrip("-")
        return [item for item in items if dashed or "-" not in str(item.value).lstrip("-")]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the chosen flags, a section per topic, in order of first appearance; its own last."""
        topics: dict[str, list[click.Option]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and not param.hidden:
                topic = param.setting.topic if isinstance(param, SettingFlag) else ""
                topics.setdefault(topic, []).append(param)
        other_params = topics.pop("", [])
        chosen = self._choose_flags(ctx, topics)
        own = [param for param in other_params if ctx.meta.get(_HELP_TOPIC) is True or not param.is_eager]
        if own:
            chosen["Other" if chosen else "Flags"] = own
        for topic, params in chosen.items():
            records = [entry for param in params if (entry := param.get_help_record(ctx))]
            if topic == _COMMON:
                records = [(flag, re.split(r"; |  \[", text)[0]) for flag, text in records]
            longest = max(len(word) for _, text in records for word in text.split())
            with formatter.section(topic):
                # The column of texts is wide enough for each name in brackets.
                formatter.write_dl(records, col_max=max(1, min(28, formatter.width - 4 - longest)))
        if topics.keys() - chosen.keys():
            words = "Topics" if self.shows_common else "Every flag of `accelerate launch`, of the topics"
            formatter.write_paragraph()
            formatter.write_text(f"{words}: {'; '.join(topics)}.")
            formatter.write_text(
                "--help TOPIC shows one, --help WORD all flags with this word, --help-all every flag."
            )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Explain the brackets where there are any."""
        if ctx.meta.get(_HELP_TOPIC):
            formatter.write_paragraph()
            formatter.write_text(
                "Brackets name the environment variable and the key of a configuration file."
            )

    def _choose_flags(
        self, ctx: click.Context, topics: dict[str, list[click.Option]]
    ) -> dict[str, list[click.Option]]:
        """Return the flags of a launch that the help shows, by topic.

        Raises:
            UnknownNameError: neither a topic nor a flag has the word that was asked for.
        """
        word = ctx.meta.get(_HELP_TOPIC)
        if word is True:
            return dict(topics)
        if word:
            pattern = word.lower().strip("-").replace("-", "_")
            words = {topic: topic.lower().replace("-", "_").replace(" ", "_") for topic in topics}
            if named := [topic for topic in topics if pattern in words[topic]]:
                return {topic: topics[topic] for topic in named}
            matches = {
                topic: [each for each in params if any(pattern in name for name in each.opts)]
                for topic, params in topics.items()
            }
            if not any(matches.values()):
                raise UnknownNameError("topic", word, list(topics), where="in --help")
            return {topic: params for topic, params in matches.items() if params}
        typed = ctx.meta.get(_TYPED_FLAGS, set())
        opened = {
            topic: params
            for topic, params in topics.items()
            if typed & {name for param in params for name in param.opts}
        }
        if opened or not self.shows_common:
            return opened
        flags = [param for params in topics.values() for param in params if isinstance(param, SettingFlag)]
        return {_COMMON: [flag for flag in flags if flag.setting.is_common]}


def _show_help(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is None or value is False or ctx.resilient_parsing:
        return
    ctx.meta[_HELP_TOPIC] = value
    click.echo(ctx.get_help())
    ctx.exit()
