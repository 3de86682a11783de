"""``accelerate launch`` of an empty script in one process, beyond ``python`` of the same script."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.case import Case, Sample, Subject, commands


def measure(subject: Subject, quick: bool) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "empty.py")
        script.touch()
        return commands(
            subject,
            [str(subject.python), str(script)],
            [subject.script("accelerate"), "launch", "--num_processes", "1", str(script)],
            "added",
            scale=1e3,
            repeats=1 if quick else 4,
        )


CASES = (
    Case(
        "`accelerate launch` of an empty script, beyond `python`",
        "ms",
        "added",
        120,
        measure,
        rounds=3,
        peer_rounds=1,
    ),
)
