"""``python -m benchmarks``: measure every case for every subject in turn, print the table, record it."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import cases as folder
from benchmarks import report
from benchmarks.case import ROOT, BenchError, Case, Sample, Subject

PEER = ROOT / ".venv-peer" / "bin" / "python"


def find(only: Sequence[str]) -> list[Case]:
    """The cases of the files in cases/, in the order of their names, or of the files in ``only``."""
    names = only or [module.name for module in pkgutil.iter_modules(folder.__path__)]
    return [case for name in names for case in importlib.import_module(f"benchmarks.cases.{name}").CASES]


def measure(
    case: Case, subjects: Sequence[Subject], quick: bool, console: Console
) -> dict[str, list[Sample] | str]:
    """The rounds of one case: every subject once per round, first in one order and then in the other.

    A first round fills caches and is dropped. A subject that fails once is not asked again.
    """
    taken: dict[str, list[Sample] | str] = {subject.name: [] for subject in subjects}
    rounds = 1 if quick else case.rounds
    for turn in range(rounds + 1):
        for subject in subjects if turn % 2 == 0 else subjects[::-1]:
            samples = taken[subject.name]
            if isinstance(samples, str):
                continue
            with console.status(f"{case.title}: round {turn} of {rounds}, {subject.name}"):
                try:
                    sample = case.measure(subject, quick or turn == 0)
                except BenchError as error:
                    taken[subject.name] = str(error)
                else:
                    samples.append(sample)
    return {name: samples[1:] if isinstance(samples, list) else samples for name, samples in taken.items()}


def parse_args() -> argparse.Namespace:
    names = [module.name for module in pkgutil.iter_modules(folder.__path__)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that the cases work")
    parser.add_argument("--only", action="append", choices=names, help="this case; may be given again")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    console = Console()
    subjects = [Subject("ours", Path(sys.executable))]
    if not PEER.exists():
        console.print("the public package is left out: `make bench-peer` makes its environment")
    else:
        subjects.append(Subject("peer", PEER))
    about = report.facts(subjects[0])
    for line in about:
        console.print(line, highlight=False)
    if report.is_busy():
        console.print("[yellow]the machine is busy: times will be longer, and spread wider, than they are[/]")

    rows = []
    for case in find(args.only or []):
        taken = measure(case, subjects, args.quick, console)
        rows.append(report.Row(case, taken["ours"], taken.get("peer", "")))
        console.print(f"  {case.title}: {rows[-1].figure(rows[-1].ours)}", highlight=False, markup=False)
    console.print(report.on_screen(rows))
    for row in rows:
        for note in row.notes():
            console.print(note, highlight=False)

    if args.quick or args.only:
        console.print("not recorded: only a run of all cases that is not --quick is")
    else:
        report.record(report.section(rows, about))
        console.print(f"recorded in {report.RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
