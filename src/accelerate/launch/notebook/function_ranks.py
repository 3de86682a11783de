"""The ranks of a function: each calls it and leaves its result or exception for the caller.

A rank is a fresh process that reads the function (``run_payload``), or a copy of this one where it cannot be
sent. A copy keeps everything, but not what a device's driver keeps: a process that has used a device cannot
be copied to one that uses it. Its other threads are gone too, so this is the second choice.
"""

from __future__ import annotations

import faulthandler
import io
import linecache
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any, cast

from accelerate.core import environ
from accelerate.core.errors import trim_traceback
from accelerate.launch.accelerate_rank import RankErrorFile
from accelerate.launch.notebook import payload
from accelerate.launch.rank_reports import ProcessSpec, rank_file
from accelerate.launch.supervisor import GuardProcess, WorkerSupervisor

THIS_FILE = __file__


def run_payload(
    file: io.BufferedReader, header: dict[str, Any], folder_name: str, local_rank: str = ""
) -> None:
    """Read a function and its arguments, call it, and leave its result.

    Args:
        file: the parcel, its beginning read.
        header: that beginning.
        folder_name: the folder where the result goes.
        local_rank: of this process among those of its machine; "" reads ``LOCAL_RANK``.
    """
    folder, rank = Path(folder_name), int(local_rank or environ.get("LOCAL_RANK", "0") or 0)
    linecache.cache.update(header["lines"])
    sys.argv[:] = header["argv"]
    sys.excepthook = ExceptionHook(folder, rank, sys.excepthook)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, so that those of several ranks do not run into each other.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Classes and functions of the notebook are found in __main__ here too, by what pickles them once more.
    main = sys.modules["__main__"] = ModuleType("__main__")
    # Left open for the life of the process: a crash cannot open it.
    faulthandler.enable(rank_file(folder, rank, "fault").open("w"))
    function, args = pickle.load(file)
    if getattr(function, "__module__", None) == "__main__":
        for name, value in getattr(function, "__globals__", {}).items():
            vars(main).setdefault(name, value)
    call_function(function, args, folder, rank)


def call_function(function: Callable[..., Any], args: tuple[Any, ...], folder: Path, rank: int) -> None:
    """Call the function; its exit code and message, when it leaves by ``sys.exit``, are kept.

    ``sys.exit()`` and ``sys.exit(0)`` are the end of a function that returns nothing.
    """
    try:
        result = function(*args)
    except SystemExit as stop:
        if stop.code in (None, 0):
            rank_file(folder, rank, "result").write_bytes(_pickle_result(None, rank))
        RankErrorFile(str(rank_file(folder, rank, "error"))).write_exit(stop)
        raise
    rank_file(folder, rank, "result").write_bytes(_pickle_result(result, rank))


def _pickle_result(result: Any, rank: int) -> bytes:
    """(what was returned, "") with its tensors on the CPU, or (None, why that cannot be sent)."""
    try:
        return payload.dump_by_value((result, ""), bare=True)
    except payload.UNPICKLABLE as error:
        # A training that has ended well is worth more than what it returned; the caller is warned.
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        said = f"what rank {rank} returned cannot be sent ({reason}); None stands for it"
        return pickle.dumps((None, said))


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that led to the function."""
    frames: list[tuple[TracebackType, bool]] = []
    while trace is not None:
        frames.append((trace, trace.tb_frame.f_code.co_filename == THIS_FILE))
        trace = trace.tb_next
    first = next((index for index, (_, is_internal) in enumerate(frames) if is_internal), 0)
    return next((frame for frame, is_internal in frames[first:] if not is_internal), None)


class ExceptionHook:
    """``sys.excepthook`` of a rank: leaves the exception and its traceback from the function on.

    Args:
        folder: where to.
        rank: whose.
        previous_hook: the hook of whoever started this process, which is called too.
    """

    def __init__(self, folder: Path, rank: int, previous_hook: Any = sys.__excepthook__) -> None:
        self.folder, self.rank, self.previous_hook = folder, rank, previous_hook
        self.error_file = RankErrorFile(str(rank_file(folder, rank, "error")))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write both; what of an exception cannot be pickled is told by its text alone."""
        trace = trim_traceback(error, _trim_traceback(trace))
        if os.getpid() == self.error_file.rank:
            try:
                pickled = payload.dump_by_value(error.with_traceback(None))
            except payload.UNPICKLABLE:
                pickled = b""
            if pickled:
                rank_file(self.folder, self.rank, "exception").write_bytes(pickled)
        self._write_traceback(kind, error, trace)
        if self.previous_hook is not sys.__excepthook__:
            self.previous_hook(kind, error, trace)

    def _write_traceback(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Not by the interpreter's own hook: it looks for lines in files only, and a cell is in none.
        print_exception = partial(traceback.print_exception, kind, error, trace)
        summary = f"{kind.__name__}: {error}".split("\n")[0]
        if not self.error_file.write(1, summary, error, lambda file: print_exception(file=file)):
            print_exception(file=sys.stderr)


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

    def _create_process(
        self, rank: int, command: ProcessSpec, guard: GuardProcess
    ) -> subprocess.Popen[bytes]:
        process = ForkedProcess(rank, cast(ForkedRankSpec, command), guard)
        return cast("subprocess.Popen[bytes]", process)


def _run_as_rank(rank: int, copy: ForkedRankSpec, outputs: dict[int, int]) -> None:
    """Turn this copy into a rank; it never returns into the program that was copied."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environ.set_variables({name: copy.env.get(name) for name in (*environ.snapshot(), *copy.env)})
        for number, writer in outputs.items():
            os.dup2(writer, number)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), "utf-8", line_buffering=True)
            for number in (1, 2)
        )
        code = _call_forked(rank, copy)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # what the copied program would do at its end is not this one's to do


def _call_forked(rank: int, copy: ForkedRankSpec) -> int:
    from accelerate.world import world

    sys.excepthook = ExceptionHook(copy.folder, rank)
    world.forget()  # that the copied process has closed
    try:
        call_function(copy.function, copy.args, copy.folder, rank)
        world.close()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    return 0
