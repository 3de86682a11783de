"""Launches of many processes that meet once, against ``torchrun``."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.case import BenchError, Case, Sample, Subject, commands
from benchmarks.cases.launch_gloo import SCRIPT

NAME = "launch"


def measure(size: int, subject: Subject, quick: bool) -> Sample:
    """One round: seconds from the command to its end."""

    def check(text: str) -> None:
        if f"processes: {size}" not in text:
            raise BenchError(f"starts other than {size} processes")

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "group.py")
        script.write_text(SCRIPT)
        return commands(
            subject,
            [subject.script("torchrun"), "--standalone", "--nproc_per_node", str(size), str(script)],
            [subject.script("accelerate"), "launch", "--cpu", "--num_processes", str(size), str(script)],
            "ratio",
            repeats=1,
            check=check,
        )


def case(size: int) -> Case:
    """The row of a launch of ``size`` processes."""
    return Case(
        f"{NAME} of {size} processes that meet, against `torchrun`",
        "s",
        "ratio",
        None,
        partial(measure, size),
        2,
        1,
    )
