"""``python -m benchmarks.scaling``: what calls cost on 2 to 32 processes, as a table and as a picture.

With ``--latency 500`` the ranks are on four machines, a frame takes 500 us from one to another, and only
8 ranks are measured; that needs root on Linux.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import __main__ as bench
from benchmarks import report
from benchmarks.case import ROOT, Case
from benchmarks.journal import Journal
from benchmarks.scaling import launches, machines, picture, ranks
from benchmarks.scaling.calls import CALLS

PICTURE = ROOT / "docs" / "scaling.png"
SIZES = (2, 4, 8, 16, 32)
ON_MACHINES = 8


@dataclass(frozen=True)
class Point:
    """One call on one number of ranks: a row of the table, and a point of each curve."""

    call: str
    size: int
    case: Case


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that the calls work")
    parser.add_argument(
        "--only", action="append", choices=[*CALLS, launches.NAME], help="this call; may be given again"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument(
        "--latency", type=float, metavar="US", help="microseconds from one of four machines to another"
    )
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the picture is written")
    return parser.parse_args()


def points(names: list[str], sizes: list[int], latency: float | None) -> list[Point]:
    """What is measured, call by call."""
    if latency is not None:
        where = f"{machines.MACHINES} machines, {latency:g} us apart"
        measure = partial(machines.measure, latency / 1e6)
        cases = {name: ranks.case(name, ON_MACHINES, measure, rounds=1, peer_rounds=1) for name in names}
        return [
            Point(name, ON_MACHINES, replace(case, title=f"{name} on {ON_MACHINES} processes of {where}"))
            for name, case in cases.items()
        ]
    return [
        Point(
            name,
            size,
            launches.case(size) if name == launches.NAME else ranks.case(name, size, ranks.measure, rounds=1),
        )
        for name in names
        for size in sizes
    ]


def draw(rows: list[tuple[Point, report.Row]], about: list[str], path: Path) -> None:
    """The curves of all calls."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for point, row in rows:
        for subject, time in picture.times_of(row.ours, row.peer).items():
            scale = 1e6 if row.case.unit == "s" else 1.0
            curves.setdefault(point.call, {}).setdefault(subject, {})[point.size] = time * scale
    picture.draw(curves, "; ".join(about), path)


def main() -> int:
    args = parse_args()
    console = Console()
    subjects = bench.subjects_here(console)
    about = report.facts(subjects[0])
    if report.is_busy():
        console.print("[yellow]the machine is busy: times will be longer, and spread wider, than they are[/]")
    names = args.only or [*CALLS, *([launches.NAME] if args.latency is None else [])]
    rows: list[tuple[Point, report.Row]] = []
    for point in points(names, list(args.sizes), args.latency):
        taken = bench.measure(point.case, subjects, args.quick, console, Journal(None, about))
        rows.append((point, report.Row(point.case, taken["ours"], taken.get("peer", ""))))
        console.print(
            f"  {point.case.title}: {rows[-1][1].figure(taken['ours'])}", highlight=False, markup=False
        )
    table = [row for _, row in rows]
    report.show(table, console)
    if args.latency is None and len(args.sizes) > 1:
        draw(rows, about, args.picture)
        console.print(f"drawn in {args.picture}")
    if not (args.quick or args.only):
        sizes = f"{min(args.sizes)} to {max(args.sizes)} processes"
        on_machines = f"{ON_MACHINES} processes on {machines.MACHINES} machines, {args.latency} us apart"
        report.record(report.section(table, about, sizes if args.latency is None else on_machines))
        console.print(f"recorded in {report.RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
