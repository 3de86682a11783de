"""The help of the command line, from pressing return to the prompt."""

from __future__ import annotations

from benchmarks.case import BenchError, Case, Sample, Subject, commands


def check(text: str) -> None:
    if "usage" not in text.lower():
        raise BenchError("no help was printed")


def measure(*arguments: str):
    def run(subject: Subject, quick: bool) -> Sample:
        return commands(
            subject,
            [str(subject.python), "-c", "pass"],
            [subject.script("accelerate"), *arguments, "--help"],
            "total",
            scale=1e3,
            repeats=1 if quick else 4,
            check=check,
        )

    return run


CASES = (
    Case("`accelerate --help`", "ms", "total", 120, measure(), rounds=3, peer_rounds=1),
    Case("`accelerate launch --help`", "ms", "total", 120, measure("launch"), rounds=3, peer_rounds=1),
)
