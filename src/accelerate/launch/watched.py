"""What stands around processes that a launcher watches: their command, their folder, and rank 0's port."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.core.errors import LaunchError
from accelerate.launch import report
from accelerate.launch.base import say
from accelerate.launch.job import Request
from accelerate.launch.port import Port, PortInUseError


def watched(request: Request, folder: Path, rank: int) -> tuple[str, ...]:
    """The command of a process that leaves its traceback in ``folder``."""
    if request.settings.no_python:
        return request.program
    kind = "module" if request.settings.module else "script"
    files = (str(report.fault_file(folder, rank)), str(report.error_file(folder, rank)))
    return (sys.executable, report.CHILD, *files, kind, *request.program)


@contextmanager
def own_folder() -> Iterator[Path]:
    """Where the ranks leave their tracebacks while the job runs."""
    try:
        made = tempfile.TemporaryDirectory(prefix="accelerate-")
    except OSError as error:
        raise LaunchError(
            "no folder for temporary files can be made", why=str(error), fix="set TMPDIR to one with space"
        ) from error
    with made as name:
        yield Path(name)


@contextmanager
def own_port(request: Request, size: int) -> Iterator[Port | None]:
    """The port of rank 0 while the job runs; none is needed for a lone process."""
    wanted = request.settings.main_process_port or 0
    if size == 1:
        yield None
        return
    try:
        port = Port(wanted)
    except PortInUseError as error:
        port = Port()
        say(request, f"port {wanted} is in use ({error.why}); rank 0 listens on {port.number} instead")
    with port:
        yield port
