"""The set-up of supervised ranks: their command, their report folder, and the port of rank 0."""

from __future__ import annotations

import marshal
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.core import environ
from accelerate.core.errors import LaunchError
from accelerate.launch import failure_report
from accelerate.launch.base import print_line
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.port import PortInUseError, ReservedPort


def rank_command(request: LaunchRequest, folder: Path, rank: int) -> tuple[str, ...]:
    """The command of a process that leaves its traceback in ``folder``."""
    if request.settings.no_python:
        return request.program
    kind = "module" if request.settings.module else "script"
    files = (str(failure_report.fault_file(folder, rank)), str(failure_report.error_file(folder, rank)))
    return (sys.executable, failure_report.RANK_SCRIPT, *files, kind, *request.program)


def write_compiled_script(request: LaunchRequest, folder: Path) -> None:
    """Leaves the compiled script in ``folder`` for all ranks: compiling takes a tenth of a rank's start.

    Where Python has something to say about the script, nothing is left: each rank compiles it and says it.
    """
    job = request.settings
    # Ranks with another level of optimisation compile something else.
    if job.module or job.no_python or sys.flags.optimize or environ.get("PYTHONOPTIMIZE"):
        return
    path = os.path.abspath(request.program[0])
    if not path.endswith(".py") or not os.path.isfile(path):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError, Warning, RecursionError, MemoryError):
            return
    code_path = failure_report.code_file(folder)
    try:
        code_path.write_bytes(marshal.dumps(code))
    except OSError:  # the disk is full, and half of the code is none
        code_path.unlink()


@contextmanager
def report_folder() -> Iterator[Path]:
    """Provide a temporary folder in which ranks leave their tracebacks while the job runs."""
    try:
        temporary_folder = tempfile.TemporaryDirectory(prefix="accelerate-")
    except OSError as error:
        raise LaunchError(
            "no folder for temporary files can be made", why=str(error), fix="set TMPDIR to one with space"
        ) from error
    with temporary_folder as name:
        yield Path(name)


@contextmanager
def reserve_port(request: LaunchRequest, size: int) -> Iterator[ReservedPort | None]:
    """The port of rank 0 while the job runs; none is needed for a lone process."""
    requested_port = request.settings.main_process_port or 0
    if size == 1:
        yield None
        return
    try:
        port = ReservedPort(requested_port)
    except PortInUseError as error:
        port = ReservedPort()
        print_line(
            request, f"port {requested_port} is in use ({error.why}); rank 0 listens on {port.number} instead"
        )
    with port:
        yield port
