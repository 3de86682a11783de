"""Runs a script exactly as ``python script.py`` or ``python -m module`` would, and keeps its traceback.

Started once per rank by ``rank_entry_point.py``, and known to Python by this file's name alone, which is one
that no script has. It imports nothing that Python has not loaded already (``__future__`` would be one more),
so that starting it costs no more than starting Python.

An exception that nobody catches goes to ERROR_FILE: a line of when, exit code, rank and what, then the
traceback as Python prints it, without the frames of this file; of an error of the package, without those of
the package at its end. The rank is another one whose failure led to the exception (-1 for an unknown one), or
"own". A crash of the interpreter goes to FAULT_FILE. The launcher prints those of the first failing rank
last. When it is gone, everything goes to stderr as usual.
"""

import builtins
import faulthandler
import marshal
import os
import sys
import time

TYPE_CHECKING = False  # `typing` would be more to load than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType
    from typing import TextIO

THIS_FILE = __file__
STARTER = os.path.join(os.path.dirname(THIS_FILE), "rank_entry_point.py")


def main(fault_file: str, error_file: str, kind: str, target: str, *arguments: str) -> None:
    """Become the script."""
    report = RankErrorFile(error_file)
    _enable_faulthandler(fault_file)
    sys.excepthook = report.write_exception
    for stream in (sys.stdout, sys.stderr):
        # Whole lines: ranks share a terminal or a file, and a pipe must not hold back what was printed.
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    sys.orig_argv = [sys.executable, *(["-m"] if kind == "module" else []), target, *arguments]
    sys.argv = [target, *arguments]
    module = type(sys)("__main__")
    # Of an imported file, such as this one, __builtins__ is the dict of the module.
    vars(module).update(__builtins__=builtins, __annotations__={})
    # A fresh one, so that nothing of this file is in it, and classes of the script pickle as __main__.X.
    sys.modules["__main__"] = module
    try:
        if kind == "module":
            _run_module(target)
        else:
            _run_script(target)
    except SystemExit as stop:
        report.write_exit(stop)
        raise


def _run_script(path: str) -> None:
    if os.path.isdir(path) or not (path.endswith(".py") or _is_text(path)):
        _run_archive(path)
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    code = _load_code(path)
    module = sys.modules["__main__"]
    loader = type(__loader__)("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(module))


def _load_code(path: str) -> "CodeType":
    """The code of the script: compiled by somebody before, or here."""
    if path.endswith(".pyc"):
        return _read_pyc(path)
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _read_pyc(path: str) -> "CodeType":
    """The code of a compiled file, which Python runs as it runs a text."""
    from importlib.util import MAGIC_NUMBER

    with open(path, "rb") as file:
        header, content = file.read(16), file.read()
    if header[: len(MAGIC_NUMBER)] != MAGIC_NUMBER:
        sys.exit(f"{path} was not compiled by this version of Python")
    return marshal.loads(content)


def _run_archive(path: str) -> None:
    """A folder or a zip archive, which Python runs by the ``__main__.py`` in it."""
    _set_first_path(os.path.abspath(path))
    import runpy

    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _run_module(name: str) -> None:
    _set_first_path(os.getcwd())
    import runpy

    # What `python -m` itself calls: the module's own __spec__, and its path as argv[0].
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _is_text(path: str) -> bool:
    """Return whether the file is not a zip archive, which Python runs by its ``__main__.py``."""
    import zipfile

    return not zipfile.is_zipfile(path)


def _set_first_path(folder: str) -> None:
    """Put ``folder`` where Python put the folder of this file; in safe-path mode it put nothing there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _enable_faulthandler(fault_file: str) -> None:
    if faulthandler.is_enabled():  # somebody wants to see crashes as they happen
        return
    try:
        # Left open for the life of the process: a crash cannot open it.
        faulthandler.enable(os.open(fault_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        faulthandler.enable()


class RankErrorFile:
    """The file in which this rank reports its failure to the launcher."""

    def __init__(self, path: str) -> None:
        self.path, self.launcher, self.rank = path, os.getppid(), os.getpid()

    def write(
        self, code: int, summary: str, error: BaseException, print_text: "Callable[[TextIO], object]"
    ) -> bool:
        """Write a line about the failure, and what ``print_text`` prints; the launcher sees the whole file.

        Returns:
            False when it cannot be written, or nobody would read it.
        """
        # A process forked from this one inherits the hook; its errors are not the rank's.
        if os.getppid() != self.launcher or os.getpid() != self.rank:
            return False
        # Only errors of this package know; where it is not loaded there are none.
        errors = sys.modules.get("accelerate.core.errors")
        failed_rank = None if errors is None else errors.find_failed_rank(error)
        origin = "own" if failed_rank is None else failed_rank
        draft = f"{self.path}.draft"
        try:
            with open(draft, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.monotonic_ns()} {code} {origin} {summary}\n")
                print_text(file)
            os.replace(draft, self.path)
        except OSError:
            return False
        return True

    def write_exception(
        self, kind: type[BaseException], error: BaseException, trace: "TracebackType | None"
    ) -> None:
        """Write an exception as Python would print it; this is ``sys.excepthook``."""
        runpy = sys.modules.get("runpy")
        inner = (THIS_FILE, STARTER, "<frozen runpy>", getattr(runpy, "__file__", THIS_FILE))
        while trace is not None and trace.tb_frame.f_code.co_filename in inner:
            trace = trace.tb_next
        errors = sys.modules.get("accelerate.core.errors")
        trace = trace if errors is None else errors.trim_traceback(error, trace)
        error = error.with_traceback(trace)

        def print_exception(file: "TextIO | None") -> None:
            stderr = sys.stderr
            sys.stderr = file
            try:
                sys.__excepthook__(kind, error, trace)
            finally:
                sys.stderr = stderr

        if not self.write(1, f"{kind.__name__}: {error}".split("\n")[0], error, print_exception):
            print_exception(sys.stderr)

    def write_exit(self, stop: SystemExit) -> None:
        """Keep the message of ``sys.exit("message")``, and of ``sys.exit(3)`` that it was called."""
        if stop.code in (None, 0):
            return
        text = "" if isinstance(stop.code, int) else f"{stop.code}\n"
        # True and members of an IntEnum are whole numbers that are not written as such.
        code = int(stop.code) if isinstance(stop.code, int) else 1
        summary = text.split("\n")[0] or f"sys.exit({code})"
        if self.write(code, summary, stop, lambda file: file.write(text)):
            stop.code = code
