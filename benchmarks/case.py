"""What a case is, and the two ways to measure one.

A case compares the library (``value``) with the same work done without it (``base``) and reports one figure.
Both are measured alternately and compared pair by pair, so that a machine that slows down for a while slows
both. This file needs the standard library alone: the workers import it in the environment of every subject.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent

# added: value - base · ratio: value / base · total: value alone
Kind = Literal["added", "ratio", "total"]


class BenchError(Exception):
    """A subject could not be measured; the text says why and stands in the table in place of a number."""


@dataclass(frozen=True)
class Subject:
    """An environment with an ``accelerate`` in it."""

    name: str
    python: Path

    def script(self, name: str) -> str:
        """The path of a console script of this environment, such as ``torchrun``."""
        return str(self.python.parent / name)

    def run(self, argv: Iterable[str], *, timeout: float = 300) -> tuple[float, str]:
        """Runs a command from the root of the repository: its wall time in seconds, and what it printed.

        A command that is given up is killed with all that it started, so that no later row runs beside it.

        Raises:
            BenchError: the command failed or took longer than ``timeout`` seconds.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        start = time.perf_counter()
        with subprocess.Popen(list(argv), cwd=ROOT, env=clean_environment(), **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException as error:
                kill_processes([process.pid])
                if isinstance(error, subprocess.TimeoutExpired):
                    raise BenchError(f"took longer than {timeout:.0f} s") from None
                raise
        seconds = time.perf_counter() - start
        if process.returncode:
            raise BenchError(f"exit code {process.returncode}: {complaint(err)}")
        return seconds, out

    def run_module(self, module: str, *arguments: str, processes: int = 1) -> str:
        """Runs ``python -m module``, by torchrun where there are several processes: what it printed.

        Raises:
            BenchError: it failed or took too long.
        """
        argv = [str(self.python)]
        if processes > 1:
            argv += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        return self.run([*argv, "-m", module, *arguments])[1]


@dataclass(frozen=True)
class Sample:
    """One round of one subject. Numbers are in the unit of the case."""

    base: float
    value: float
    figure: float
    noise: float  # the same figure for base against base: what is smaller than this means nothing
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    ``measure(subject, quick)`` is one round. ``unit`` is the unit of ``base`` and ``value``, and of the
    figure too unless that is a ratio. ``target`` is an upper bound for the figure; None: the row informs.
    The public package has no target to meet: ``peer_rounds`` of the ``rounds`` are enough for it, and none
    where it is the ``base`` itself (``raw_is_peer``).
    """

    title: str
    unit: str
    kind: Kind
    target: float | None
    measure: Callable[[Subject, bool], Sample]
    rounds: int = 5
    peer_rounds: int = 3
    raw_is_peer: bool = False


def complaint(text: str) -> str:
    """The line of a standard error output that says most: the last exception, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-")]
    raised = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")
    errors = [line for line in lines if raised.match(line) and "ChildFailedError" not in line]
    return (errors or lines or ["no message"])[-1]


def kill_processes(pids: Iterable[int]) -> None:
    """Kill these processes and all that descends from them, in whatever session."""
    import psutil

    doomed: list[psutil.Process] = []
    for pid in filter(psutil.pid_exists, pids):
        with suppress(psutil.NoSuchProcess):
            doomed += [process := psutil.Process(pid), *process.children(recursive=True)]
    for process in doomed:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def clean_environment() -> dict[str, str]:
    """This environment without settings that would change what is measured: one thread, no config file."""
    settings = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(settings)}
    nothing = Path(tempfile.gettempdir(), "accelerate-benchmarks-no-config")
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HOME": str(nothing), "PYTHONUNBUFFERED": "1"}


def compare(base: list[float], value: list[float], kind: Kind) -> Sample:
    """Figures of one round from times taken alternately: the median over the pairs."""
    apply = {"added": lambda a, b: b - a, "ratio": lambda a, b: b / a, "total": lambda _, b: b}[kind]
    figure = median(apply(a, b) for a, b in zip(base, value, strict=True))
    calm = 1.0 if kind == "ratio" else 0.0
    itself = [abs(apply(a, b) - calm) for a, b in pairwise(base)] if kind != "total" else []
    # The median of n pairs scatters about sqrt(n) times less than one pair does.
    noise = median(itself) / len(itself) ** 0.5 if itself else 0.0
    return Sample(median(base), median(value), figure, noise)


# --- the first way: the wall time of two commands -------------------------------------------------------


def commands(
    subject: Subject,
    base: list[str],
    value: list[str],
    kind: Kind,
    *,
    scale: float = 1.0,
    repeats: int = 5,
    check: Callable[[str], None] | None = None,
) -> Sample:
    """Runs two commands in turn and compares their wall times, multiplied by ``scale`` (1e3: ms).

    ``check`` gets what the second command printed and raises BenchError when it did not do the work.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds, text = subject.run((base, value)[which])
            times[which].append(seconds * scale)
            if which == 1 and check:
                check(text)
    return compare(*times, kind)


# --- the second way: two loops in one process (or one group of processes) -------------------------------


def worker(subject: Subject, module: str, *arguments: str, processes: int = 1) -> Sample:
    """Runs ``python -m module`` in the subject's environment, which ends by calling ``report``."""
    text = subject.run_module(module, *arguments, processes=processes)
    lines = [line for line in text.splitlines() if line.startswith('{"base"')]
    if not lines:
        raise BenchError("the worker ended without a result")
    return Sample(**json.loads(lines[-1]))


def alternate(
    base: Callable[[], None],
    value: Callable[[], None],
    kind: Kind,
    *,
    blocks: int,
    steps: int,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """Times blocks of ``steps`` steps of two loops in turn, in microseconds per step.

    The first two blocks of each warm up and are dropped; ``before`` runs, untimed, before each block. The
    ``clock`` is the wall's, or ``time.process_time`` for work that waits for nothing.
    """
    loops, times = (base, value), ([], [])
    for turn in range(blocks + 2):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            before()
            start = clock()
            loops[which]()
            times[which].append((clock() - start) / steps * 1e6)
    return compare(times[0][2:], times[1][2:], kind)


def report(sample: Sample) -> None:
    """Hands the result of a worker to the process that started it."""
    print(json.dumps(asdict(sample)))
    sys.stdout.flush()


def leave() -> None:
    """Ends a worker of several processes at once, its work done.

    A worker of gloo that drops its last collective late aborts an interpreter that ends (``terminate called
    without an active exception``): this library waits for it, raw torch and the peer do not.
    """
    sys.stdout.flush()
    os._exit(0)
