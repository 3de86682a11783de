"""``python -m benchmarks.gpu``: the tests and benchmarks of a machine with an accelerator, in one run.

The rows that tell most come first. Each runs in processes of its own, with a time limit; a row that fails
is noted and the next one begins. After each row the results are on the disk: the same command goes on from
there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.__main__ import PEER
from benchmarks.case import ROOT, BenchError, Sample
from benchmarks.gpu.fork_server import ForkedSubject
from benchmarks.gpu.results import Results
from benchmarks.gpu.rows import DeviceCase, all_rows
from benchmarks.journal import MEASURED, digest_of_code

LEAST = 10.0  # seconds; with less left a row is not begun
CODE = (*MEASURED, "tests/gpu", "tests/support")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [case.name for case in all_rows()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--device",
        choices=("auto", "sim"),
        default="auto",
        help="sim: rehearse the rows, at small sizes, on the simulated accelerator of the tests",
    )
    parser.add_argument("--budget", type=float, default=25, metavar="MINUTES", help="of the whole run (25)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each row, below its own limit")
    parser.add_argument("--only", action="append", choices=names, metavar="ROW", help="may be given again")
    parser.add_argument("--retry", action="store_true", help="measure again what failed before")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, in order")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()
    args.cases = [case for case in all_rows() if not args.only or case.name in args.only]
    return args


# ----------------------------------------------------------------------------------- where it runs


def use_simulation() -> None:
    """Give the simulated accelerator to this run's processes, building it first where need be.

    Raises:
        BenchError: it cannot be built here.
    """
    from tests.support import sim

    if why := sim.missing():
        raise BenchError(why)
    os.environ.update(sim.environment())


def find_facts(subject: ForkedSubject) -> dict[str, Any]:
    """The device and the versions of an environment.

    Raises:
        BenchError: its torch finds no accelerator.
    """
    try:
        facts = _ask_facts(subject)
    except BenchError:
        # What is imported ahead may have touched the device, and no fork can use it then.
        subject.server.close()
        subject.server.preloaded = ()
        facts = _ask_facts(subject)
    if not facts["count"]:
        raise BenchError(f"torch finds no accelerator in the environment of {subject.python}")
    subject.server.devices = facts["count"]
    return facts


def _ask_facts(subject: ForkedSubject) -> dict[str, Any]:
    subject.server.deadline = time.monotonic() + 120
    return json.loads(subject.run_module("benchmarks.gpu.facts").splitlines()[-1])


def find_peer(args: argparse.Namespace) -> tuple[list[ForkedSubject], str]:
    """The environment of the public package if it can be compared with here, and a line that says so."""
    if args.device == "sim":
        return [], "1.15.0 is left out: it does not know the simulated accelerator"
    if not PEER.exists():
        return [], "1.15.0 is left out: `make bench-peer` makes its environment"
    subject = ForkedSubject("peer", PEER, args.output)
    try:
        packages = find_facts(subject)["packages"]
    except BenchError as error:
        subject.server.close()
        return [], f"1.15.0 is left out: {error}"
    return [subject], f"beside it accelerate {packages['accelerate']} with torch {packages['torch']}"


def describe(facts: dict[str, Any], peer: str) -> list[str]:
    """The facts of a run, one per line."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return [
        f"{facts['count']} x {facts['name']}, {facts['memory'] / 2**30:.0f} GiB; {os.cpu_count()} cores "
        f"({report.processor()})",
        f"Python {sys.version.split()[0]}, {packages}, one thread per process",
        f"commit {report.commit()}",
        peer,
    ]


# ---------------------------------------------------------------------------------------- the run


class Run:
    """One run over the rows.

    Args:
        subjects: this environment, and that of the public package where there is one.
        results: what is known, and where to keep more.
        args: the command's.
    """

    def __init__(self, subjects: Sequence[ForkedSubject], results: Results, args: argparse.Namespace) -> None:
        self.subjects, self.results, self.args = subjects, results, args
        self.cases: list[DeviceCase] = args.cases
        self.console = Console(soft_wrap=True, highlight=False, markup=False)
        self.end = time.monotonic() + 60 * args.budget

    def measure_all(self) -> None:
        """Measure what is not known yet, until the time is over."""
        results = self.results
        results.not_reached = {case.name: "the run was interrupted" for case in self.cases}
        for case in self.cases:
            reached = [
                self._measure(case, subject) for subject in self.subjects if self._is_due(case, subject)
            ]
            if all(reached):
                del results.not_reached[case.name]
            else:
                results.not_reached[case.name] = f"the {self.args.budget:g} minutes were over"
            results.write()

    def _is_due(self, case: DeviceCase, subject: ForkedSubject) -> bool:
        if subject.name == "peer" and not case.peer:
            return False
        known = self.results.get(case.name, subject.name)
        return known is None or (self.args.retry and isinstance(known, str))

    def _measure(self, case: DeviceCase, subject: ForkedSubject) -> bool:
        """Measure a row; return False, and keep nothing, where the time of the run did not suffice."""
        start = time.monotonic()
        if self.end - start < LEAST:
            return False
        limit = start + min(case.limit, self.args.limit or case.limit)
        subject.server.deadline = min(limit, self.end)
        taken: Sample | str
        try:
            taken = case.measure(subject, self.args.device == "sim")
        except BenchError as error:
            if time.monotonic() >= self.end:
                return False
            taken = str(error)
        seconds = time.monotonic() - start
        self.results.put(case.name, subject.name, taken, seconds)
        text = taken if isinstance(taken, str) else report.Row(case, [taken], "").figure([taken])
        self.console.print(f"{seconds:6.1f} s  {case.name}, {subject.name}: {text}")
        return True


def start(args: argparse.Namespace, subjects: list[ForkedSubject]) -> Results:
    """Make the run ready, measure, and return what it gave; ``subjects`` gets the environments in use."""
    if args.device == "sim":
        use_simulation()
    subjects.append(ForkedSubject("ours", Path(sys.executable), args.output))
    facts = find_facts(subjects[0])
    peer, line = find_peer(args)
    subjects += peer
    key = {"code": digest_of_code(CODE), "device": facts["name"], "torch": facts["packages"]["torch"]}
    about = describe(facts, line)
    if args.device == "sim":
        about.append("a rehearsal on the simulated accelerator: no figure means anything")
    results = Results(args.output, key, about, all_rows(rehearsal=args.device == "sim"))
    Run(subjects, results, args).measure_all()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.list:
        print("\n".join(f"{case.name:18} {case.title}" for case in args.cases))
        return 0
    # A run that is asked to end ends as one that is broken off by Ctrl-C: with the rows it has.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    subjects: list[ForkedSubject] = []
    try:
        results = start(args, subjects)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        for subject in subjects:
            subject.server.close()
        shutil.rmtree(args.output / "files", ignore_errors=True)
        signal.signal(signal.SIGTERM, handler)
    report.show(results.table(), Console())
    for name, why in results.not_reached.items():
        print(f"not reached: {name}: {why}")
    print(f"results in {results.json} and {results.markdown}")
    texts = [text for case in args.cases if isinstance(text := results.get(case.name, "ours"), str)]
    return int(any(text != report.SKIPPED for text in texts) or bool(results.not_reached))


if __name__ == "__main__":
    raise SystemExit(main())
