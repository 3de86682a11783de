"""``accelerate launch`` of an empty script in 64 processes; the base starts 64 ``python`` at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.case import BenchError, Case, Sample, Subject, commands

COUNT = 64
PLAIN = """
import subprocess, sys
started = [subprocess.Popen([sys.executable, sys.argv[1]]) for _ in range(int(sys.argv[2]))]
sys.exit(any([process.wait() for process in started]))
"""
# As good as empty: that all have run is seen by the files.
SCRIPT = 'import os; open(__file__ + "." + str(os.getpid()), "x").close()\n'


def measure(subject: Subject, quick: bool) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        script, plain = Path(folder, "empty.py"), Path(folder, "plain.py")
        script.write_text(SCRIPT)
        plain.write_text(PLAIN)
        repeats = 1 if quick else 5
        sample = commands(
            subject,
            [str(subject.python), str(plain), str(script), str(COUNT)],
            [subject.script("accelerate"), "launch", "--cpu", "--num_processes", str(COUNT), str(script)],
            "ratio",
            repeats=repeats,
        )
        ran = len(list(Path(folder).glob("empty.py.*")))
        if ran != 2 * COUNT * repeats:
            raise BenchError(f"{ran - COUNT * repeats} processes ran, not {COUNT * repeats}")
        return sample


CASES = (
    Case(
        f"launch of an empty script in {COUNT} processes, against {COUNT} `python`",
        "s",
        "ratio",
        1.3,
        measure,
        rounds=3,
        peer_rounds=1,
    ),
)
