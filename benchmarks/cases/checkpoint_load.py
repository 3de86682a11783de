"""Loading a model of 1.07 GB with AdamW, 3.2 GB in all, fp32, on the CPU: raw is 1.15.0's `load_state`.

Each load is one of a new program, whose model is there and whose optimizer has no state yet, as when a
training goes on; the row "again" is the median of three more loads of that program. Each package loads what
it has saved. In the first row all files are in the page cache before; in the second none is. Ours verifies
the digests, which 1.15.0 does not have.

Memory: the peak of the program (VmHWM, pages of mapped files included) beyond what it had before the model
was made, until the state is memory of its own; raw is the size of the state. Notes give the peak without
pages of files (RssAnon), and when that was.

Verifying: raw is as many threads, which read the same files, from the page cache, and hash them by hand.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.case import BenchError, Case, Sample, Subject, compare, report, worker
from benchmarks.checkpoints import BYTES, Queue, check, peer, room, training

ROWS = ("warm", "cold", "again", "memory")
_open = ExitStack()
_saved: dict[str, Path] = {}


def saved(subject: Subject) -> Path:
    """The checkpoint of a package; it is made once, and removed when this program ends."""
    if subject.name not in _saved:
        if not _saved:
            atexit.register(_open.close)
        folder = _open.enter_context(room()) / subject.name
        subject.run([str(subject.python), "-m", __name__, "save", str(folder)])
        _saved[subject.name] = folder
    return _saved[subject.name]


def load(subject: Subject, *, cached: bool) -> dict[str, float]:
    """What one load of a new program took."""
    folder = saved(subject)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            if cached:
                buffer = bytearray(2**20)
                while file.readinto(buffer):
                    pass
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _, text = subject.run([str(subject.python), "-m", __name__, "load", str(folder)])
    return json.loads(text.splitlines()[-1])


def take(subject: Subject, quick: bool) -> dict[str, Sample | str]:
    """One round of all rows. For the public package, of which the memory is shown: against itself."""
    if not hasattr(os, "posix_fadvise"):
        raise BenchError("the page cache is emptied and looked at on Linux only")
    both = (peer(), subject)
    taken: dict[str, Sample | str] = {}
    for row in ("cold", "warm"):
        found: tuple[list[dict[str, float]], ...] = ([], [])
        for turn in range(1 if quick or row == "cold" else 2):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                found[which].append(load(both[which], cached=row == "warm"))
        times = [[one["seconds"] for one in side] for side in found]
        taken[row] = compare(times[0], times[1], "ratio")
        if row == "warm":
            again = [[one["again"] for one in side] for side in found]
            taken["again"] = compare(again[0], again[1], "ratio")
    last = found[1][-1]
    facts = {
        "peak without pages of files": f"{last['anonymous']:.3g} GB",
        "memory of its own": f"{last['settled']:.2g} s after the call",
    }
    taken["memory"] = Sample(BYTES / 1e9, last["peak"], last["peak"] - BYTES / 1e9, 0.0, facts)
    return taken


def verify(subject: Subject, quick: bool) -> Sample:
    """One round of verifying."""
    if subject.name == "peer":
        raise BenchError("1.15.0 has no digests")
    return worker(subject, __name__, "verify", str(saved(subject)))


QUEUE = Queue(take, ROWS)


def against_peer(name: str, title: str, target: float | None) -> Case:
    return Case(title, "s", "ratio", target, QUEUE.measure(name), 2, raw_is_peer=True)


CASES = (
    against_peer("warm", "`load_state` of 3.2 GB, cached, against 1.15.0", 0.35),
    against_peer("cold", "`load_state` of 3.2 GB, on disk, against 1.15.0", None),
    against_peer("again", "`load_state` of 3.2 GB again, in a process that has loaded it", 1.0),
    Case("peak memory of `load_state`, beyond the state", "GB", "added", 0.3, QUEUE.measure("memory"), 2, 1),
    Case("verifying 3.2 GB, against reading and hashing by hand", "s", "ratio", 1.25, verify, 2, 1),
)


def status(name: str) -> float:
    """A line of /proc/self/status in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / 1e9


def load_once(folder: Path) -> None:
    """Prints seconds and memory of one load, and the seconds of further loads."""
    import torch  # noqa: F401 - its own memory is not counted

    import accelerate.utils

    accelerate.Accelerator(cpu=True)
    before, before_anonymous = status("VmRSS"), status("RssAnon")
    accelerator, model, optimizer = training(full=False)
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    accelerator.load_state(str(folder))
    seconds = time.perf_counter() - start
    if hasattr(accelerator, "wait_for_checkpoint"):
        accelerator.wait_for_checkpoint()
    settled = time.perf_counter() - start
    highest = status("VmHWM")
    ended.set()
    watcher.join()
    check(model, optimizer)
    anonymous = max(peak[0], status("RssAnon")) - before_anonymous
    further = []
    for _ in range(3):
        start = time.perf_counter()
        accelerator.load_state(str(folder))
        further.append(time.perf_counter() - start)
    check(model, optimizer)
    times = {"seconds": seconds, "settled": settled, "again": median(further)}
    print(json.dumps(times | {"peak": highest - before, "anonymous": anonymous}))


def verify_blocks(folder: Path) -> None:
    """Verifies in turn with reading and hashing by hand."""
    import xxhash

    from accelerate.checkpoint import layout
    from accelerate.checkpoint.load import verify_files as verify_files
    from accelerate.checkpoint.rank_group import CheckpointRankGroup

    manifest: Any = layout.decode_manifest((folder / "manifest.json").read_bytes(), folder)
    pieces = [(path, at) for path in folder.iterdir() for at in range(0, path.stat().st_size, 2**26)]
    threads = len(os.sched_getaffinity(0))

    def by_hand(piece: tuple[Path, int]) -> None:
        buffer, state = bytearray(2**20), xxhash.xxh3_128()
        with piece[0].open("rb", buffering=0) as file:
            file.seek(piece[1])
            for _ in range(2**6):
                state.update(memoryview(buffer)[: file.readinto(buffer)])

    base, value = [], []
    for _ in range(5):
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(by_hand, pieces))
        base.append(time.perf_counter() - start)
        start = time.perf_counter()
        verify_files(folder, manifest, CheckpointRankGroup())
        value.append(time.perf_counter() - start)
    sample = compare(base[1:], value[1:], "ratio")
    speed = {"speed": f"{BYTES / sample.value / 1e9:.2g} GB/s with {threads} threads"}
    report(Sample(sample.base, sample.value, sample.figure, sample.noise, speed))


def main(what: str, folder: Path) -> None:
    if what == "save":
        accelerator, *_ = training(full=True)
        accelerator.save_state(str(folder))
    elif what == "load":
        load_once(folder)
    else:
        verify_blocks(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
