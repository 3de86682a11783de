"""From samples to a table on the screen and a dated section of RESULTS.md."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.case import ROOT, Case, Sample, Subject

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
KEPT = 20  # sections of history
HEAD = """# Results

Newest first; `make bench` writes the whole runs. *Raw* is the same work without the library, or 1.15.0 in
rows that are against it. Each figure is the median of several rounds, with the smallest and the largest in
brackets; *noise* is the same figure for raw against raw. How to read and to repeat this:
[README.md](README.md).
"""
ABSENT = "no accelerator"
SKIPPED = "all tests were skipped"
PEER = "1.15.0"
COLUMNS = ("what", "raw", "ours", PEER, "target", "noise", "verdict")


@dataclass(frozen=True)
class Row:
    """What the rounds of one case gave: samples per subject, or the reason why there are none."""

    case: Case
    ours: list[Sample] | str
    peer: list[Sample] | str

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of COLUMNS."""
        case, some = self.case, self.ours if isinstance(self.ours, list) else self.peer
        raw = noise = "-"
        if isinstance(some, list) and case.kind != "total":
            raw = f"{number(median(sample.base for sample in some))} {case.unit}"
            noise = f"±{number(median(sample.noise for sample in some))}"
        peer = "1x" if case.raw_is_peer and isinstance(self.ours, list) else self.figure(self.peer)
        target = "-" if case.target is None else f"≤ {number(case.target)}{self.sign}"
        return (case.title, raw, self.figure(self.ours), peer, target, noise, self.verdict)

    @property
    def sign(self) -> str:
        return "x" if self.case.kind == "ratio" else f" {self.case.unit}"

    @property
    def verdict(self) -> str:
        if isinstance(self.ours, str):
            return why(self.ours)
        if self.case.target is None:
            return "-"
        return "met" if median(sample.figure for sample in self.ours) <= self.case.target else "not met"

    def figure(self, samples: list[Sample] | str) -> str:
        if isinstance(samples, str):
            return why(samples) if samples else "-"
        figures = [sample.figure for sample in samples]
        lead = "+" if self.case.kind == "added" and median(figures) >= 0 else ""
        return f"{lead}{number(median(figures))}{self.sign} [{number(min(figures))}, {number(max(figures))}]"

    def notes(self) -> Iterable[str]:
        """What a figure does not say, one line per subject: facts, or why there is no figure."""
        for name, samples in (("ours", self.ours), (PEER, self.peer)):
            known = samples if isinstance(samples, str) else samples[-1].facts
            text = known if isinstance(known, str) else ", ".join(map(" ".join, known.items()))
            if text:
                yield f"{self.case.title}, {name}: {text}"


def why(text: str) -> str:
    """Why there is no figure, in a word or two."""
    if ABSENT in text:
        return ABSENT
    return "skipped" if text == SKIPPED else "has none" if text.startswith(f"{PEER} has no") else "failed"


def number(value: float) -> str:
    """Three digits or so: 5562, 17.2, 1.03, 0.054."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def facts(ours: Subject) -> list[str]:
    """The machine and the versions, one fact per line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    _, version = ours.run(
        [str(ours.python), "-c", "from importlib.metadata import version as v; print(v('torch'))"]
    )
    release = ".".join(platform.release().split(".")[:2])
    return [
        f"{os.cpu_count()} cores ({processor()}), {memory:.0f} GB, {platform.system()} {release}, "
        f"load before the run {os.getloadavg()[0]:.2f}",
        f"Python {platform.python_version()}, torch {version.strip()}, one thread per process",
        f"commit {commit()}",
    ]


def is_busy() -> bool:
    """Whether other work takes so much of the machine that two processes cannot have a core each."""
    return os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)


def processor() -> str:
    """The name of the CPU as the system knows it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The short name of the commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/cases")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def on_screen(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    colours = {"met": "green", "not met": "red", "failed": "red"}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("what", "verdict") else "right")
    for row in rows:
        *cells, verdict = (cell.replace("[", r"\[") for cell in row.cells())
        colour = colours.get(verdict)
        table.add_row(*cells, f"[{colour}]{verdict}[/]" if colour else verdict)
    return table


def show(rows: Sequence[Row], console: Console) -> None:
    """The rows and their notes on the screen."""
    console.print(on_screen(rows))
    for row in rows:
        for note in row.notes():
            console.print(note, highlight=False, markup=False)


def section(rows: Sequence[Row], about: Sequence[str], title: str = "") -> str:
    """The rows as one dated section of Markdown; ``title`` says what they are, if not of a whole run."""
    heading = f"## {datetime.datetime.now():%Y-%m-%d %H:%M}" + (f", {title}" if title else "")
    lines = [heading, "", *(f"- {line}" for line in about), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 2) + "---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row.cells())} |" for row in rows]
    notes = [f"- {note}" for row in rows for note in row.notes()]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def record(text: str, path: Path = RESULTS) -> None:
    """Puts a section on top of the history, of which the last ``KEPT`` stay."""
    before = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    older = [f"## {part.strip()}\n" for part in before][: KEPT - 1]
    path.write_text("\n".join([HEAD, text, *older]), encoding="utf-8")
