"""Saving a model of 1.07 GB with AdamW, 3.2 GB in all, fp32, on the CPU: raw is 1.15.0's `save_state`.

Two programs, one of each package, hold the same state and save it in turn on the same disk, each save into
the same folder again. Ours waits until everything is on the disk and has its digest; 1.15.0 does not. In the
asynchronous rows the value is how long `save_state` keeps the loop from going on. The first such save makes
the memory for the copy, the later ones use it again. With `ProjectConfiguration(async_save=True)` it is made
ready beforehand, after the first step.

A virtual machine gets its memory from the host when it first writes to it, which can take ten times as
long as any later use. A round begins with that for as much as is used, so that no row pays for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from benchmarks.case import ROOT, BenchError, Case, Sample, Subject, clean_environment, compare
from benchmarks.checkpoints import BYTES, Queue, peer, room

ROWS = ("save", "ahead", "later", "first")


class Program:
    """A program of one package that holds the state and saves it when it is asked."""

    def __init__(self, subject: Subject, folder: Path, *options: str) -> None:
        command = [str(subject.python), "-m", __name__, str(folder), *options]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("ready")

    def ask(self, what: str) -> float:
        """Seconds of one ``"save"`` or ``"async"``."""
        to, back = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        to.write(what + "\n")
        to.flush()
        for line in back:
            if line.startswith('{"seconds"'):
                return json.loads(line)["seconds"]
        raise BenchError(f"the program ended with exit code {self._process.wait()}")

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cast(IO[str], self._process.stdin).close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()


TOUCH = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
piece = bytes(2**21)
for start in range(0, len(memory) - len(piece), len(piece)):
    memory[start : start + len(piece)] = piece
"""


def touch_memory(size: int) -> None:
    """Write to as many bytes of memory once, in a process of its own, which gives them back."""
    subprocess.run([sys.executable, "-c", TOUCH, str(size)], check=True)


def take(subject: Subject, quick: bool) -> dict[str, Sample | str]:
    """One round of all rows."""
    pairs = 1 if quick else 2
    touch_memory(4 * BYTES)  # the state in both programs, the copy, and files of that size in the page cache
    with room() as folder, Program(peer(), folder / "peer") as other:
        with Program(subject, folder / "ours") as own:
            base, value = [], []
            for turn in range(pairs):
                for times, program in ((base, other), (value, own))[:: 1 if turn % 2 == 0 else -1]:
                    times.append(program.ask("save"))
            blocked = [own.ask("async") for _ in range(1 + pairs)]
        with Program(subject, folder / "ours", "ahead") as own:
            ahead = own.ask("async")
    return {
        "ahead": compare(base[:1], [ahead], "ratio"),
        "save": compare(base, value, "ratio"),
        "first": compare(base[:1], blocked[:1], "ratio"),
        "later": compare(base, blocked[1:], "ratio"),
    }


QUEUE = Queue(take, ROWS)


def row(name: str, what: str, target: float | None) -> Case:
    return Case(f"{what}, against 1.15.0", "s", "ratio", target, QUEUE.measure(name), 2, raw_is_peer=True)


CASES = (
    row("save", "`save_state` of 3.2 GB", 1),
    row("ahead", "first asynchronous save, announced by the project, blocks", 0.15),
    row("later", "later asynchronous saves block", 0.15),
    row("first", "first asynchronous save, not announced, blocks", None),
)


def announced() -> Any:
    """The accelerator of a training whose project saves in the background, after the first step."""
    from accelerate.checkpoint import async_save
    from accelerate.utils import ProjectConfiguration
    from benchmarks.checkpoints import training

    accelerator, _, optimizer = training(full=True, project_config=ProjectConfiguration(async_save=True))
    optimizer.step()
    toucher = async_save.staging._prepare_thread
    assert toucher is not None, "no memory is made ready"
    toucher.join()  # a training does other work for so long
    return accelerator


def main(folder: Path, ahead: bool) -> None:
    from benchmarks.checkpoints import training

    accelerator = announced() if ahead else training(full=True)[0]
    options: dict[str, dict[str, Any]] = {"save": {}, "async": {"async_save": True}}
    for line in sys.stdin:
        start = time.perf_counter()
        if line.strip() != "ready":
            accelerator.save_state(str(folder), **options[line.strip()])
        seconds = time.perf_counter() - start
        if line.strip() == "async":
            accelerator.wait_for_checkpoint()
        if line.strip() != "ready":
            size = sum(path.stat().st_size for path in folder.rglob("*"))
            assert size > BYTES, f"{size} bytes were saved instead of {BYTES}"
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "ahead" in sys.argv)
