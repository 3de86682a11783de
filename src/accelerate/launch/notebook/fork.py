"""Ranks that are copies of this process, for functions that cannot be sent.

A copy keeps everything, but not what a device's driver keeps: a process that has used a device cannot be
copied to one that uses it. Its other threads are gone too, so this is the second choice.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from accelerate.core import environ
from accelerate.launch.notebook.function_runner import ExceptionHook, call_function
from accelerate.launch.supervisor import ProcessSpec, WorkerSupervisor


@dataclass
class ForkedRankSpec(ProcessSpec):
    """One rank to start as a copy of this process.

    Attributes:
        function: what it calls.
        args: with what.
        folder: where it leaves its result.
    """

    function: Callable[..., Any] = print
    args: tuple[Any, ...] = ()
    folder: Path = Path()


class ForkedProcess:
    """A forked rank with the part of ``Popen`` that ``WorkerSupervisor`` uses.

    Args:
        rank: its number on this machine.
        copy: what it does.
        guard: what ends it when this process dies; it listens to a pipe that the copy must not hold open.
    """

    def __init__(self, rank: int, copy: ForkedRankSpec, guard: Any) -> None:
        self.returncode: int | None = None
        pipes = {number: os.pipe() for number in (1, 2)}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(guard.process.stdin.fileno())
            _run_as_rank(rank, copy, {number: writer for number, (_, writer) in pipes.items()})
        for _, writer in pipes.values():
            os.close(writer)
        self.stdout: IO[bytes] | None = os.fdopen(pipes[1][0], "rb")
        self.stderr: IO[bytes] | None = os.fdopen(pipes[2][0], "rb")

    def poll(self) -> int | None:
        """Its exit code if it has ended, as ``Popen`` gives it."""
        return self._wait_pid(os.WNOHANG)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self._wait_pid(0)
        assert code is not None
        return code

    def _wait_pid(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkSupervisor(WorkerSupervisor):
    """Ranks that are started by copying this process; the rest is theirs."""

    def _start(self, guard: Any) -> None:
        for rank, command in enumerate(self.commands):
            process = cast(Any, ForkedProcess(rank, cast(ForkedRankSpec, command), guard))
            self.processes[rank] = self.alive[rank] = process
            guard.write_line(f"+{process.pid}")
            self.on_start(rank, process)


def _run_as_rank(rank: int, copy: ForkedRankSpec, outputs: dict[int, int]) -> None:
    """Turns this copy into a rank; it never returns into the program that was copied."""
    code = 1
    try:
        os.setsid()
        _reset_signals()
        environ.set_variables({name: copy.env.get(name) for name in (*environ.snapshot(), *copy.env)})
        for number, writer in outputs.items():
            os.dup2(writer, number)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), "utf-8", line_buffering=True)
            for number in (1, 2)
        )
        code = _call_function(rank, copy)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # what the copied program would do at its end is not this one's to do


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _call_function(rank: int, copy: ForkedRankSpec) -> int:
    from accelerate.world import world

    sys.excepthook = ExceptionHook(copy.folder, rank)
    try:
        call_function(copy.function, copy.args, copy.folder, rank)
        world.close()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    return 0
