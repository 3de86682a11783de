"""The processes of one call of a function on this machine, and how they ended."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from string import Template
from typing import Any

from accelerate.core import environ
from accelerate.core.frozen import frozen
from accelerate.launch import report
from accelerate.launch.errors import RankError
from accelerate.launch.kinds.local import HOST, rank_variables
from accelerate.launch.logs import Logs
from accelerate.launch.notebook import context, parcel
from accelerate.launch.notebook.forked import Copies, Copy
from accelerate.launch.notebook.rank import exception_file, result_file
from accelerate.launch.plan import Variables
from accelerate.launch.port import Port, PortInUseError
from accelerate.launch.ranks import Command, Outcome, Ranks

STARTER = str(Path(__file__).with_name("starter.py"))
STOP_TIMEOUT = 3.0  # seconds that ranks which are asked to stop have before they are killed


class FunctionError(RankError):
    """A function failed on a rank.

    Attributes:
        rank: the first that failed; None when it left no traceback.
        traceback: that rank's, which is also the end of this error's text.

    ``__cause__`` is the exception itself, where it can be pickled.
    """

    rank: int | None = None

    def __str__(self) -> str:
        trace = f"\n{self.traceback.rstrip()}" if self.traceback else ""
        return "\n".join(part for part in (super().__str__(), *self.others, trace) if part)


@frozen
class Crew:
    """How a function is called.

    Attributes:
        processes: on how many processes.
        variables: what each is told by its environment.
        port: where rank 0 listens; 0 for a free port.
        restarts: how often all are started again after a failure.
        mark: what stands before each line that a rank prints, with ``${rank}`` and ``${local_rank}``.
        no_copies: why the processes cannot be copies of this one; "" if they can.
    """

    processes: int
    variables: Variables = field(default_factory=dict)
    port: int = 0
    restarts: int = 0
    mark: str = "[rank ${rank}] "
    no_copies: str = ""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """What ``function(*args)`` returned on each rank, in their order.

        Raises:
            LaunchError: it cannot be started.
            FunctionError: it failed on a rank.
            KeyboardInterrupt: it was interrupted; no rank is left.
        """
        with tempfile.TemporaryDirectory(prefix="accelerate-") as name, _port(self.port) as port:
            start = self._start(function, args, Path(name))
            for attempt in range(self.restarts + 1):
                folder = Path(name, str(attempt))
                folder.mkdir()
                error = self._attempt(start, folder, port.number, attempt)
                if error is None:
                    return list(results(folder, self.processes))
                if attempt == self.restarts or not isinstance(error, FunctionError):
                    raise error
                print(f"{error.what}; starting all again ({attempt + 1} of {self.restarts})", flush=True)
        raise AssertionError("unreachable")

    def _start(self, function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> Start:
        """How the ranks get the function: they read it, or are copies of this process."""
        try:
            parcel.write(folder / "parcel", function, args)
        except parcel.UnsendableError as error:
            if self.no_copies:
                error.why += (
                    f"\n       so the ranks would have to be copies of this process, {self.no_copies}"
                )
                raise
            if not hasattr(os, "fork"):
                raise
            print(f"{error.why}; so the ranks are copies of this process (fork)", flush=True)
            return Start(function, args)
        return Start(parcel=str(folder / "parcel"))

    def _attempt(self, start: Start, folder: Path, port: int, attempt: int) -> BaseException | None:
        template = Template(self.mark)
        logs = Logs(
            "3",
            None,
            mark=lambda rank: template.safe_substitute(rank=rank, local_rank=rank, role_name="default"),
        )
        told = {**self.variables, **_job(port, attempt, self.restarts), "ACCELERATE_STOP_FOLDER": folder}
        commands = [
            start.command(rank, folder, environ.child({**told, **rank_variables(rank, self.processes)}), logs)
            for rank in range(self.processes)
        ]
        outcome = start.ranks(
            commands,
            stop_timeout=STOP_TIMEOUT,
            raised=lambda rank, pid: report.raised(folder, rank, pid),
            armed=lambda pid: report.armed(folder, pid),
            started=logs.read,
        ).run()
        logs.finish()
        return raised(outcome, folder, report.failure(outcome, folder))


@frozen
class Start:
    """How ranks get a function: from a parcel, or because they are copies of this process.

    Attributes:
        function: for copies.
        args: its arguments.
        parcel: the file for the others.
    """

    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    parcel: str = ""

    @property
    def ranks(self) -> type[Ranks]:
        """What starts and watches them."""
        return Ranks if self.function is None else Copies

    def command(self, rank: int, folder: Path, env: dict[str, str], logs: Logs) -> Command:
        """One rank to start."""
        if self.function is not None:
            return Copy((), env, function=self.function, args=self.args, folder=folder)
        program = (sys.executable, STARTER, self.parcel, str(folder), str(rank))
        return Command(program, env, *logs.pipes(rank))


def _job(port: int, attempt: int, restarts: int) -> dict[str, object | None]:
    return {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": os.urandom(4).hex(),
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": None,
        "TORCHELASTIC_ERROR_FILE": None,
    }


@contextmanager
def _port(wanted: int) -> Iterator[Port]:
    try:
        port = Port(wanted)
    except PortInUseError as error:
        port = Port()
        print(f"Port {wanted} is in use ({error.why}), rank 0 listens on {port.number} instead.", flush=True)
    with port:
        yield port


def results(folder: Path, processes: int) -> Iterator[Any]:
    """What each rank of this machine returned; a warning says where that could not be sent."""
    for rank in range(processes):
        value, why = pickle.loads(result_file(folder, rank).read_bytes())
        if why:
            warnings.warn(why, stacklevel=4)
        yield value


def raised(outcome: Outcome, folder: Path, error: RankError | None) -> BaseException | None:
    """What is raised here when the ranks have failed or were stopped; None when they ended well.

    Args:
        outcome: how they ended.
        folder: where they left their words.
        error: what the launcher says of that.
    """
    if error is None:
        return None
    if outcome.stopped_by not in (None, signal.SIGINT):
        # It was meant for this process, which does what it would have done.
        signal.raise_signal(outcome.stopped_by)
    found = _failed(error, folder)
    if outcome.stopped_by == signal.SIGINT:
        stopped = KeyboardInterrupt()
        stopped.__cause__ = found
        return stopped
    return found


def _failed(error: RankError, folder: Path) -> FunctionError:
    """The launcher's error as that of a function, with the names of cells and the exception itself."""
    found = FunctionError(error.what.replace("the script", "the function"), why=error.why)
    found.code, found.others = error.code, error.others
    found.traceback = _with_cells(error.traceback)
    for file in folder.glob("rank_*.error") if error.traceback else ():
        if error.traceback in file.read_text(encoding="utf-8"):
            found.rank = int(file.stem.removeprefix("rank_"))
            found.__cause__ = cause = _exception(exception_file(folder, found.rank))
            if cause is not None:
                found.what = found.what.replace("(exit code 1)", f"({type(cause).__name__})")
            break
    return found


def _exception(file: Path) -> BaseException | None:
    if not file.is_file():
        return None
    try:
        found = pickle.loads(file.read_bytes())
    except parcel.UNPICKLABLE:  # a class whose objects can be written and not read: the text has to do
        return None
    return found if isinstance(found, BaseException) else None


def _with_cells(text: str) -> str:
    """A traceback with files of cells called as IPython calls them."""

    def named(match: re.Match[str]) -> str:
        cell = context.cell_of(match[1])
        return match[0] if cell is None else cell

    return re.sub(r'File "([^"\n]+)"', named, text)
