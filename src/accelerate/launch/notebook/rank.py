"""What runs in each process: the function is called, and what it returns or raises is left for the caller."""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from io import BufferedReader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from accelerate.core import environ
from accelerate.launch import report
from accelerate.launch.accelerate_rank import Report
from accelerate.launch.notebook import parcel

HERE = str(Path(__file__).parent)


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves what its function returned."""
    return folder / f"rank_{rank}.result"


def exception_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves the exception itself; its traceback is in ``report.error_file``."""
    return folder / f"rank_{rank}.exception"


def run_parcel(file: BufferedReader, start: dict[str, Any], place: str, number: str = "") -> None:
    """Reads a function and its arguments, calls it, and leaves its result.

    Args:
        file: the parcel, its beginning read.
        start: that beginning.
        place: the folder where the result goes.
        number: of this process among those of its machine; "" reads ``LOCAL_RANK``.
    """
    folder, rank = Path(place), int(number or environ.get("LOCAL_RANK", "0") or 0)
    linecache.cache.update(start["lines"])
    sys.argv[:] = start["argv"]
    sys.excepthook = Hook(folder, rank, sys.excepthook)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, so that those of several ranks do not run into each other.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Classes and functions of the notebook are found in __main__ here too, by what pickles them once more.
    main = sys.modules["__main__"] = ModuleType("__main__")
    # Left open for the life of the process: a crash cannot open it.
    faulthandler.enable(report.fault_file(folder, rank).open("w"))
    function, args = pickle.load(file)
    if getattr(function, "__module__", None) == "__main__":
        for name, value in getattr(function, "__globals__", {}).items():
            vars(main).setdefault(name, value)
    call(function, args, folder, rank)


def call(function: Callable[..., Any], args: tuple[Any, ...], folder: Path, rank: int) -> None:
    """Calls the function; its exit code and message, when it leaves by ``sys.exit``, are kept."""
    try:
        result = function(*args)
    except SystemExit as stop:
        Report(str(report.error_file(folder, rank))).exit(stop)
        raise
    result_file(folder, rank).write_bytes(_result(result, rank))


def _result(result: Any, rank: int) -> bytes:
    """(what was returned, "") with its tensors on the CPU, or (None, why that cannot be sent)."""
    try:
        return parcel.dumps((result, ""), bare=True)
    except parcel.UNPICKLABLE as error:
        # A training that has ended well is worth more than what it returned; the caller is warned.
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        return pickle.dumps((None, f"what rank {rank} returned cannot be sent ({why}); None stands for it"))


def _from_the_function_on(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that led to the function."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    ours = [frame.tb_frame.f_code.co_filename.startswith(HERE) for frame in frames]
    first = ours.index(True) if True in ours else 0
    return next((frame for frame, own in zip(frames[first:], ours[first:], strict=True) if not own), None)


class Hook:
    """``sys.excepthook`` of a rank: leaves the exception and its traceback from the function on.

    Args:
        folder: where to.
        rank: whose.
        before: the hook of whoever started this process, which is called too.
    """

    def __init__(self, folder: Path, rank: int, before: Any = sys.__excepthook__) -> None:
        self.folder, self.rank, self.before = folder, rank, before
        self.report = Report(str(report.error_file(folder, rank)))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Writes both; what of an exception cannot be pickled is told by its text alone."""
        trace = _from_the_function_on(trace)
        if os.getpid() == self.report.rank:
            with suppress(*parcel.UNPICKLABLE):
                exception_file(self.folder, self.rank).write_bytes(parcel.dumps(error.with_traceback(None)))
        self._write(kind, error, trace)
        if self.before is not sys.__excepthook__:
            self.before(kind, error, trace)

    def _write(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        file = self.report.open(1, f"{kind.__name__}: {error}".split("\n")[0])
        # Not by the interpreter's own hook: it looks for lines in files only, and a cell is in none.
        with file or nullcontext(sys.stderr) as place:
            traceback.print_exception(kind, error, trace, file=place)
