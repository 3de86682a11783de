"""The status of each requested option: applied, not applied and why, or not known yet.

The code that owns an option inspects the objects that exist, not what it meant to do, and reports a status
for it. The facade collects the statuses (``facade/option_report.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from accelerate.core.setting import SettingsWithOrigins, declared_settings
from accelerate.core.tables import align_columns


@dataclass(frozen=True)
class OptionStatus:
    """The status of one requested option.

    Attributes:
        option: its name in settings and arguments.
        value: the requested value.
        where: the source of the request, in the user's words: ``"--mixed_precision"``,
            ``"the argument mixed_precision"``,
            ``"config.yaml, line 3: mixed_precision"``, ``"DistributedDataParallelKwargs"``.
        applied: whether the objects show it; None while there is no object that could show it.
        why: why it was not applied or is not known yet; a note where it was applied.
        matters: whether it makes a difference that it was not applied; if so, a warning is given, and a
            strict run raises an error.
    """

    option: str
    value: Any
    where: str
    applied: bool | None
    why: str = ""
    matters: bool = True

    @property
    def request_text(self) -> str:
        """The option as it was requested: ``--dynamo_backend inductor``."""
        return f"{self.where} {self.value_text}".rstrip() if self.where.startswith("--") else self.assignment

    @property
    def value_text(self) -> str:
        """The value in at most 60 characters; empty for a switch of the command line."""
        if self.value is True and self.where.startswith("--"):
            return ""
        shown = str(self.value) if isinstance(self.value, int | float | str) else _format_object(self.value)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."

    @property
    def assignment(self) -> str:
        """``mixed_precision=bf16``."""
        return f"{self.option}={self.value_text or self.value}"

    @property
    def not_applied(self) -> bool:
        """True when the option is known not to be applied."""
        return self.applied is False

    @property
    def is_failure(self) -> bool:
        """True when the option is not applied and that makes a difference."""
        return self.not_applied and self.matters

    def __str__(self) -> str:
        verb = {True: "was applied", False: "was not applied", None: "is not applied yet"}[self.applied]
        source = "" if self.where.startswith("--") else f" ({self.where})"
        return f"{self.request_text}{source} {verb}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True)
class RequestedOption:
    """An option that the user requested; its methods turn it into an ``OptionStatus``."""

    name: str
    value: Any
    where: str

    def report_applied(self, note: str = "") -> OptionStatus:
        """Return the status "applied"."""
        return OptionStatus(self.name, self.value, self.where, True, note)

    def report_not_applied(self, why: str, *, matters: bool = True) -> OptionStatus:
        """Return the status "not applied"."""
        return OptionStatus(self.name, self.value, self.where, False, why, matters)

    def report_pending(self, why: str) -> OptionStatus:
        """Return the status "not known yet"."""
        return OptionStatus(self.name, self.value, self.where, None, why)

    def report_unless(self, missing: str) -> OptionStatus:
        """Return "not applied" with the reason ``missing``, or "applied" when there is no reason."""
        return self.report_not_applied(missing) if missing else self.report_applied()

    def report_count(self, count: int, total: int, unit: str, why: str) -> OptionStatus:
        """Return the status of an option that holds for ``count`` of ``total`` units, ``why`` not for all."""
        if not count:
            return self.report_not_applied(f"none of {total} {unit}: {why}")
        return self.report_applied(
            f"{count} of {total} {unit}" + (f": {why}" if count < total and why else "")
        )


class OptionReport(list[OptionStatus]):
    """The statuses of all requested options of one ``Accelerator``; ``str`` gives a table."""

    def __str__(self) -> str:
        effects = {True: "applied", False: "not applied", None: "not yet"}
        rows = [(e.assignment, effects[e.applied], e.where, e.why) for e in self]
        if not rows:
            return "nothing was asked for"
        return "\n".join(align_columns([("option", "effect", "asked by", "why"), *rows]))

    @property
    def summary(self) -> str:
        """The report in one line: ``applied: a=1, b=2; not applied: c=3``; empty when nothing is known."""
        refused = {e.option for e in self if e.not_applied}
        names = {"applied": [e.assignment for e in self if e.applied and e.option not in refused]}
        names["not applied"] = [e.assignment for e in self if e.not_applied]
        return "; ".join(f"{effect}: {', '.join(options)}" for effect, options in names.items() if options)


def requested_options(loaded: SettingsWithOrigins[Any]) -> Iterator[RequestedOption]:
    """Yield the settings to which a source gave another value than the default."""
    for name, (origin, *others) in loaded.origins.items():
        default = others[-1] if others else origin
        if origin.source != "default" and not (default.source == "default" and origin.value == default.value):
            yield RequestedOption(name, origin.value, origin.where)


def keep_requests(instance: Any, loaded: SettingsWithOrigins[Any], *names: str) -> None:
    """Keep on ``instance`` which of its fields were requested, for the report, after fallbacks filled them.

    Args:
        instance: an object whose fields are settings.
        loaded: these settings, as ``load_fields`` returned them.
        names: fields that are no settings; one that is not None was requested.
    """
    owner = type(instance).__name__
    kind = cast("type[Any]", type(instance))
    fields = {row.name: row.field for row in declared_settings(kind)}
    requested = [
        RequestedOption(
            fields[option.name],
            option.value,
            owner if loaded.origins[option.name][0].source == "code" else option.where,
        )
        for option in requested_options(loaded)
    ]
    given = [(name, getattr(instance, name)) for name in names]
    requested += [RequestedOption(name, value, owner) for name, value in given if value is not None]
    vars(instance)["_requested_options"] = requested


def report_overridden(loaded: SettingsWithOrigins[Any]) -> Iterator[OptionStatus]:
    """Report values that lost to a stronger source; defaults and values that mean "no" are not requests."""
    for name, (winner, *others) in loaded.origins.items():
        for origin in others:
            weak = origin.source == "default" or origin.value in (winner.value, None, False)
            if not weak and str(origin.value).lower() != "no":
                option = RequestedOption(name, origin.value, origin.where)
                yield option.report_not_applied(f"{winner.where} says {winner.value!r}, and counts first")


def non_default_options(options: Any) -> Iterator[RequestedOption]:
    """Yield the fields of a dataclass that it kept as requested, or that differ from their defaults."""
    if options is None:
        return
    requested: list[RequestedOption] | None = getattr(options, "_requested_options", None)
    if requested is not None:
        yield from requested
        return
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        if value is not default and value != default:
            yield RequestedOption(item.name, value, type(options).__name__)


def _format_object(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("list[Any]", value)))
    return type(value).__name__ if " object at 0x" in repr(value) else str(value)
