"""The wizard of ``accelerate config``, from pressing return to its first question."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import tempfile
import time

from benchmarks.case import BenchError, Case, Sample, Subject, clean_environment, compare

PATIENCE = 30.0  # seconds


def first_question(argv: list[str]) -> float:
    """Milliseconds until a question mark stands on the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.execve(argv[0], argv, {**clean_environment(), "TERM": "xterm", "HF_HOME": folder})
        try:
            return (_shown(terminal, began) - began) * 1e3
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)


def _shown(terminal: int, began: float) -> float:
    text = b""
    while time.perf_counter() - began < PATIENCE:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            text += os.read(terminal, 65536)
        except OSError:  # EIO: Linux says so that no program holds the other end
            break
        if b"\x1b[6n" in text:  # "where is the cursor?": a terminal answers
            os.write(terminal, b"\x1b[1;1R")
            text = text.replace(b"\x1b[6n", b"")
        if b"?" in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", text):
            return time.perf_counter()
    raise BenchError(f"no question within {PATIENCE:g} s, or before it ended; it wrote {text[-200:]!r}")


def measure(subject: Subject, quick: bool) -> Sample:
    argv = [subject.script("accelerate"), "config"]
    times = [first_question(argv) for _ in range(1 if quick else 4)]
    return compare(times, times, "total")


CASES = (Case("`accelerate config`: first question", "ms", "total", 300, measure, rounds=3, peer_rounds=1),)
