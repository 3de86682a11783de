"""What became of an option that somebody asked for: applied, not applied and why, or not to be seen yet.

A part that owns options looks at the objects that are there, not at what it meant to do, and says for each
option what it found. The facade collects this (``facade/effects.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from accelerate.core.frozen import frozen
from accelerate.core.setting import Loaded


@frozen
class Effect:
    """What became of one option.

    Attributes:
        option: its name, as settings and arguments call it.
        value: what was asked.
        where: who asked, in the user's words: ``"--mixed_precision"``, ``"the argument mixed_precision"``,
            ``"config.yaml, line 3: mixed_precision"``, ``"DistributedDataParallelKwargs"``.
        applied: whether it is seen in what is there; None while there is nothing to see it on.
        why: why it was not applied or cannot be seen yet; of an applied one, what is worth knowing.
        matters: whether not being applied makes a difference here, so that it is warned of and is an error
            in a strict run.
    """

    option: str
    value: Any
    where: str
    applied: bool | None
    why: str = ""
    matters: bool = True

    @property
    def asked(self) -> str:
        """The option as it was asked for: ``--dynamo_backend inductor``."""
        return f"{self.where} {self.text}".rstrip() if self.where.startswith("--") else self.short

    @property
    def text(self) -> str:
        """The value, as short as it may be; a switch of the command line has none."""
        if self.value is True and self.where.startswith("--"):
            return ""
        shown = str(self.value) if isinstance(self.value, int | float | str) else _plain(self.value)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."

    @property
    def short(self) -> str:
        """``mixed_precision=bf16``."""
        return f"{self.option}={self.text or self.value}"

    @property
    def failed(self) -> bool:
        """Whether it is known not to be applied."""
        return self.applied is False

    @property
    def wrong(self) -> bool:
        """Whether it is not applied, and that makes a difference."""
        return self.failed and self.matters

    def __str__(self) -> str:
        verb = {True: "was applied", False: "was not applied", None: "is not applied yet"}[self.applied]
        source = "" if self.where.startswith("--") else f" ({self.where})"
        return f"{self.asked}{source} {verb}{f': {self.why}' if self.why else ''}"


@frozen
class Option:
    """An option that somebody asked for; it becomes an ``Effect`` once somebody has looked."""

    name: str
    value: Any
    where: str

    def applied(self, note: str = "") -> Effect:
        """It is there."""
        return Effect(self.name, self.value, self.where, True, note)

    def failed(self, why: str, *, matters: bool = True) -> Effect:
        """It is not there."""
        return Effect(self.name, self.value, self.where, False, why, matters)

    def pending(self, why: str) -> Effect:
        """There is nothing to see it on."""
        return Effect(self.name, self.value, self.where, None, why)

    def seen(self, missing: str) -> Effect:
        """It is there, unless ``missing`` says why not."""
        return self.failed(missing) if missing else self.applied()

    def counted(self, done: int, of: int, what: str, why: str) -> Effect:
        """It is there in ``done`` of ``of`` parts; ``why`` others have been left out."""
        if not done:
            return self.failed(f"none of {of} {what}: {why}")
        return self.applied(f"{done} of {of} {what}" + (f": {why}" if done < of and why else ""))


class Ledger(list[Effect]):
    """The effects of one ``Accelerator``. Printed, a table."""

    def __str__(self) -> str:
        words = {True: "applied", False: "not applied", None: "not yet"}
        rows = [(e.short, words[e.applied], e.where, e.why) for e in self]
        if not rows:
            return "nothing was asked for"
        rows.insert(0, ("option", "effect", "asked by", "why"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """``applied: a=1, b=2; not applied: c=3``; empty when nothing is known."""
        names = {"applied": [e.short for e in self if e.applied]}
        names["not applied"] = [e.short for e in self if e.failed]
        return "; ".join(f"{word}: {', '.join(found)}" for word, found in names.items() if found)


def given(loaded: Loaded[Any]) -> Iterator[Option]:
    """The settings that some source gave another value than the default."""
    for name in loaded.origins:
        origin = loaded.origin(name)
        default = loaded.origins[name][-1]
        if origin.source != "default" and not (default.source == "default" and origin.value == default.value):
            yield Option(name, origin.value, origin.where)


def overridden(loaded: Loaded[Any]) -> Iterator[Effect]:
    """What a stronger source gave otherwise; the default, and what says no, ask for nothing."""
    for name, (winner, *others) in loaded.origins.items():
        for origin in others:
            weak = origin.source == "default" or origin.value in (winner.value, None, False)
            if not weak and str(origin.value).lower() != "no":
                option = Option(name, origin.value, origin.where)
                yield option.failed(f"{winner.where} says {winner.value!r}, and counts first")


def differing(options: Any, where: str = "") -> Iterator[Option]:
    """The fields of a dataclass of options that differ from their defaults; None gives nothing."""
    if options is None:
        return
    place = where or type(options).__name__
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        if value is not default and value != default:
            yield Option(item.name, value, place)


def by_name(options: Iterable[Option]) -> dict[str, Option]:
    """The options, by name."""
    return {option.name: option for option in options}


def judged(options: Iterable[Option], missing: Mapping[str, str]) -> Iterator[Effect]:
    """Each option of which ``missing`` has something to say: applied, or why not."""
    return (option.seen(missing[option.name]) for option in options if option.name in missing)


def _plain(value: Any) -> str:
    """What is no number and no text: lists by their items, objects by their class unless they show more."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("list[Any]", value)))
    return type(value).__name__ if " object at 0x" in repr(value) else str(value)
