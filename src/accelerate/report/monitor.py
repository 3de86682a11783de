"""A recorded run in a terminal: the steps, the loss, the throughput and the ranks of a job that goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from accelerate.core.units import show_bytes, show_seconds
from accelerate.report.records import RankSteps, RunRecord, find_stragglers
from accelerate.report.run_reader import RunReader

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Times and throughput are those of the last steps; a straggler is looked for in more of them.
RECENT, COMPARED = 50, 200
_SHOWN_SERIES = 8
COLUMNS = ("rank", "step", "median step", "waiting for data", "own time", "peak memory", "last record")


@dataclass
class RunSummary:
    """The texts that show a run.

    Attributes:
        title: its name and status.
        facts: name -> text: step, throughput, and the last value of what was logged.
        rows: of each rank the texts of ``COLUMNS``.
        slowest: index of the row whose own time is the longest, None where there is one rank.
        notes: slow ranks, and what ``--check_numerics`` noticed last.
    """

    title: str
    facts: dict[str, str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    slowest: int | None = None
    notes: list[str] = field(default_factory=list)


def summarize(run: RunRecord, now: float) -> RunSummary:
    """Return what is shown of a run.

    Args:
        run: as far as it is recorded.
        now: seconds since 1970.
    """
    ranks = dict(sorted(run.ranks.items()))
    facts = {"lasted": show_seconds(max((now if run.status == "not ended" else run.end) - run.start, 0))}
    if ranks:
        facts["step"] = f"{min(steps.steps[-1] for steps in ranks.values()):g}"
        seconds = max(sum(steps.seconds[-RECENT:]) for steps in ranks.values())
        samples = max(sum(steps.samples[-RECENT:]) for steps in ranks.values())
        facts["throughput"] = f"{samples / seconds:.4g} samples/s" if seconds > 0 and samples else "-"
        tokens = sum(sum(steps.tokens[-RECENT:]) for steps in ranks.values())
        if seconds > 0 and not math.isnan(tokens):
            facts["throughput"] += f", {tokens / seconds:.4g} tokens/s"
    # The loss first: there may be more numbers than lines.
    names = sorted(run.series, key=lambda name: "loss" not in name.lower())
    for name in islice(names, _SHOWN_SERIES):
        series = run.series[name]
        facts[name] = f"{series.values[-1]:.6g} (step {series.steps[-1]:g})"
    summary = RunSummary(f"{run.name}: {run.status}", facts)
    medians = {rank: median(times) for rank, times in run.own_seconds(slice(-RECENT, None)).items()}
    if len(medians) > 1:
        summary.slowest = list(ranks).index(max(medians, key=lambda rank: medians[rank]))
    for rank, steps in ranks.items():
        summary.rows.append(_describe_rank(rank, steps, medians[rank], now - run.start))
    summary.notes = _find_notes(run)
    return summary


def _describe_rank(rank: int, steps: RankSteps, own: float, now: float) -> tuple[str, ...]:
    return (
        str(rank),
        f"{steps.steps[-1]:g}",
        show_seconds(median(steps.seconds[-RECENT:])),
        steps.data_wait_share(slice(-RECENT, None)),
        show_seconds(own),
        show_bytes(round(steps.peak_memory)),
        f"{show_seconds(max(now - steps.times[-1], 0))} ago",
    )


def _find_notes(run: RunRecord) -> list[str]:
    count = min((len(steps.steps) for steps in run.ranks.values()), default=0)
    start = max(count - COMPARED, 0)
    notes = [
        f"rank {rank} is slow: {straggler.describe(run.ranks[rank].steps[start + straggler.first])}"
        for rank, straggler in find_stragglers(run.own_seconds(slice(start, count))).items()
    ]
    for event in run.events[-3:]:
        where = f"; {event['where']}" if event.get("where") else ""
        notes.append(f"step {event['step']}, rank {event['rank']}: {event['what']}{where}")
    return notes


def choose_run(runs: Sequence[RunRecord]) -> RunRecord:
    """Return the run that began last."""
    return max(runs, key=lambda run: run.start)


def draw_summary(summary: RunSummary) -> RenderableType:
    """Return what rich prints of a summary; the slowest rank is in bold."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for name, text in summary.facts.items():
        facts.add_row(Text(name, style="dim"), Text(text))
    parts: list[RenderableType] = [Text(summary.title, style="bold"), facts]
    if summary.rows:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for index, row in enumerate(summary.rows):
            table.add_row(*row, style="bold" if index == summary.slowest else None)
        parts += [Text(""), table]
    if summary.slowest is not None:
        parts.append(Text(f"slowest: rank {summary.rows[summary.slowest][0]}", style="bold"))
    parts += [Text(note, style="yellow") for note in summary.notes]
    return Group(*parts)


def watch_run(folder: str, seconds: float, console: Console, *, once: bool) -> None:
    """Show a run until it has ended, or Ctrl-C.

    Args:
        folder: of ``accelerate launch --record``, or of several such; the run that began last is shown.
        seconds: between two looks; each reads what was appended since.
        console: where it is shown.
        once: show it as it is now, and return.

    Raises:
        SettingError: there is no such folder, or nothing is recorded in it.
    """
    from rich.live import Live

    reader = RunReader([folder])
    run = choose_run(reader.update())
    if once:
        console.print(draw_summary(summarize(run, time.time())))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(draw_summary(summarize(run, time.time())), refresh=True)
            if run.status != "not ended":
                return
            time.sleep(seconds)
            run = choose_run(reader.update())
