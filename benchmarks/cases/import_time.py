"""``import accelerate`` beyond an empty Python, whether torch came with it, and the memory it took."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.case import Case, Sample, Subject, commands

# VmHWM is the peak of this program alone; getrusage would count the parent's pages from before exec.
FACTS = """
import sys, accelerate
try:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(f"{int(peak.split()[1]) / 1024:.0f} MB")
except OSError:
    print("unknown")
print("yes" if "torch" in sys.modules else "no")
"""


def measure(subject: Subject, quick: bool) -> Sample:
    python = str(subject.python)
    sample = commands(
        subject,
        [python, "-c", "pass"],
        [python, "-c", "import accelerate"],
        "added",
        scale=1e3,
        repeats=1 if quick else 4,
    )
    _, text = subject.run([python, "-c", FACTS])
    memory, torch = text.split("\n")[:2]
    return replace(sample, facts={"peak memory": memory, "torch imported": torch})


CASES = (
    Case("`import accelerate`, beyond an empty Python", "ms", "added", 50, measure, rounds=3, peer_rounds=1),
)
