"""``python -m benchmarks``: measure every case for every subject in turn, print the table, record it."""

from __future__ import annotations

import argparse
import datetime
import importlib
import pkgutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import cases as folder
from benchmarks import report
from benchmarks.case import ROOT, BenchError, Case, Sample, Subject
from benchmarks.journal import Journal, path_for_this_code

PEER = ROOT / ".venv-peer" / "bin" / "python"


def find(only: Sequence[str]) -> list[Case]:
    """The cases of the files in cases/, in the order of their names, or of the files in ``only``."""
    names = only or [module.name for module in pkgutil.iter_modules(folder.__path__)]
    return [case for name in names for case in importlib.import_module(f"benchmarks.cases.{name}").CASES]


def measure(
    case: Case, subjects: Sequence[Subject], quick: bool, console: Console, journal: Journal
) -> dict[str, list[Sample] | str]:
    """The rounds of one case: every subject once per round, first in one order and then in the other.

    A first round fills caches and is dropped. A subject that fails once is not asked again. The public
    package leaves out some rounds when the case says so. What the journal knows is not measured again.
    """
    if case.raw_is_peer:
        subjects = [subject for subject in subjects if subject.name != "peer"]
    taken: dict[str, list[Sample] | str] = {subject.name: [] for subject in subjects}
    rounds = 1 if quick else case.rounds
    for turn in range(rounds + 1):
        for subject in subjects if turn % 2 == 0 else subjects[::-1]:
            samples = taken[subject.name]
            if isinstance(samples, str) or (subject.name == "peer" and not peer_takes_part(case, turn)):
                continue
            known = journal.get(case, subject.name, turn)
            if known is None:
                with console.status(f"{case.title}: round {turn} of {rounds}, {subject.name}"):
                    known = one_round(case, subject, quick or turn == 0)
                journal.put(case, subject.name, turn, known)
            if isinstance(known, str):
                taken[subject.name] = known
            else:
                samples.append(known)
    return {name: samples[1:] if isinstance(samples, list) else samples for name, samples in taken.items()}


def one_round(case: Case, subject: Subject, quick: bool) -> Sample | str:
    """One sample, or why there is none."""
    try:
        return case.measure(subject, quick)
    except BenchError as error:
        return str(error)


def peer_takes_part(case: Case, turn: int) -> bool:
    """Whether this is one of its rounds: the dropped one, and as many as the case says, spread evenly."""
    if turn == 0 or case.peer_rounds >= case.rounds:
        return True
    return (turn - 1) * case.peer_rounds % case.rounds < case.peer_rounds


def parse_args() -> argparse.Namespace:
    names = [module.name for module in pkgutil.iter_modules(folder.__path__)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that the cases work")
    parser.add_argument("--only", action="append", choices=names, help="this case; may be given again")
    return parser.parse_args()


def subjects_here(console: Console) -> list[Subject]:
    """This environment, and that of the public package where there is one."""
    subjects = [Subject("ours", Path(sys.executable))]
    if PEER.exists():
        return [*subjects, Subject("peer", PEER)]
    console.print("the public package is left out: `make bench-peer` makes its environment")
    return subjects


def open_journal(about: list[str], whole: bool, console: Console) -> Journal:
    """The journal of a run; that of an interrupted one when the code is still the same."""
    journal = Journal(path_for_this_code() if whole else None, about)
    if journal.known:
        console.print(f"going on with an interrupted run: {len(journal.known)} samples are there already")
        journal.about.append(f"interrupted, and continued at {datetime.datetime.now():%Y-%m-%d %H:%M}")
    return journal


def main() -> int:
    args = parse_args()
    console = Console()
    subjects = subjects_here(console)
    whole = not (args.quick or args.only)
    journal = open_journal(report.facts(subjects[0]), whole, console)
    for line in journal.about:
        console.print(line, highlight=False)
    if report.is_busy():
        console.print("[yellow]the machine is busy: times will be longer, and spread wider, than they are[/]")

    # A run that is asked to end ends as one that is broken off by Ctrl-C: with the rows it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[report.Row] = []
    try:
        for case in find(args.only or []):
            taken = measure(case, subjects, args.quick, console, journal)
            rows.append(report.Row(case, taken["ours"], taken.get("peer", "")))
            console.print(f"  {case.title}: {rows[-1].figure(rows[-1].ours)}", highlight=False, markup=False)
    except KeyboardInterrupt:
        report.show(rows, console)
        console.print("interrupted" + ("; the same command goes on from here" if whole else ""))
        return 130
    report.show(rows, console)
    if not whole:
        console.print("not recorded: only a run of all cases that is not --quick is")
        return 0
    report.record(report.section(rows, journal.about))
    journal.done()
    console.print(f"recorded in {report.RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
