"""Skipping to the middle of a shuffled epoch of 10,000,000 map-style samples: the time it adds, the memory.

Time: to the first batch after ``skip_first_batches(loader, 156250)``, half of the 312,500 batches, beyond the
time to the first batch of the whole epoch. Both are of the same prepared loader, in one process; the raw
column is the start of the whole epoch.

Memory: how much the process grows at most on the way to that first batch, beyond how much it grows for a
permutation of so many 64-bit numbers, in one process that has run a small epoch before. A note says what a
plain torch loader takes that starts the whole epoch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.case import BenchError, Case, Sample, Subject, compare, report, worker

SAMPLES = 10_000_000
BATCH = 32
MIDDLE = SAMPLES // BATCH // 2


def measure(what: str):
    def run(subject: Subject, quick: bool) -> Sample:
        if what == "memory" and not Path("/proc/self/clear_refs").exists():
            raise BenchError("the peak of a stretch of a program is known on Linux only")
        return worker(subject, __name__, what, "2" if quick else "5")

    return run


CASES = (
    Case("skipping to the middle of 10M samples", "ms", "added", 100, measure("time"), 2, 1),
    Case("memory of skipping to the middle, beyond a permutation", "MB", "added", 1, measure("memory"), 1),
)


def loaders(samples: int):
    """A plain loader over so many samples, and its prepared twin."""
    from torch.utils.data import DataLoader, Dataset

    from accelerate import Accelerator

    class Numbers(Dataset):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> int:
            return index

    plain, other = (DataLoader(Numbers(), batch_size=BATCH, shuffle=True) for _ in range(2))
    return plain, Accelerator(cpu=True).prepare(other)


def first(make: Callable[[], Iterator[object]]) -> float:
    """Seconds until an epoch gives its first batch. The epoch is broken off then."""
    start = time.perf_counter()
    iterator = iter(make())
    next(iterator)
    return time.perf_counter() - start


def growth(make: Callable[[], Iterator[object]]) -> float:
    """MB by which this process grows at most until an epoch gives its first batch."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status("VmRSS")
    first(make)
    return status("VmHWM") - before


def status(name: str) -> float:
    """A line of /proc/self/status in MB (of 1,000,000 bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / 1e6


def main(what: str, repeats: int) -> None:
    import torch

    from accelerate import skip_first_batches

    for loader in loaders(1000):
        for _ in loader:
            pass
    for _ in skip_first_batches(loader, 3):
        pass
    plain, prepared = loaders(SAMPLES)

    def skipped():
        return iter(skip_first_batches(prepared, MIDDLE))

    if what == "memory":
        permutation = growth(lambda: iter([torch.randperm(SAMPLES)]))
        value, plain_start = growth(skipped), growth(lambda: iter(plain))
        facts = {"a plain loader that starts the whole epoch": f"{plain_start:.0f} MB"}
        report(Sample(permutation, value, value - permutation, 0.0, facts))
        return
    base, value = [], []
    for turn in range(repeats + 1):
        for times, make in ((base, lambda: iter(prepared)), (value, skipped))[:: 1 if turn % 2 == 0 else -1]:
            times.append(first(make) * 1e3)
    report(compare(base[1:], value[1:], "added"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
