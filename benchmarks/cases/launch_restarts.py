"""Launching two processes that may be started again, which meet once and end; the base is ``torchrun``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.case import Case, Sample, Subject, commands
from benchmarks.cases.launch_gloo import SCRIPT, check


def measure(subject: Subject, quick: bool) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "group.py")
        script.write_text(SCRIPT)
        torchrun = [
            subject.script("torchrun"),
            "--standalone",
            "--nproc_per_node",
            "2",
            "--max_restarts",
            "1",
        ]
        ours = [
            subject.script("accelerate"),
            "launch",
            "--cpu",
            "--num_processes",
            "2",
            "--max_restarts",
            "1",
        ]
        return commands(
            subject,
            [*torchrun, str(script)],
            [*ours, str(script)],
            "ratio",
            repeats=1 if quick else 2,
            check=check,
        )


CASES = (
    Case(
        "launch of 2 processes that may be restarted, against `torchrun`",
        "s",
        "ratio",
        1.05,
        measure,
        rounds=3,
        peer_rounds=1,
    ),
)
