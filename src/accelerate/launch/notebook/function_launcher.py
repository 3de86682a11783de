"""The processes of one call of a function, and how they ended.

On one machine they are started here (``FunctionLauncher``). On several, each machine starts
``accelerate launch``, whose script calls the function (``call_on_machines``).
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import RankError
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch import rank_reports
from accelerate.launch.base import Variables
from accelerate.launch.job_scheduler import OUTER_LAUNCH_VARIABLE
from accelerate.launch.kinds.local import torchrun_variables
from accelerate.launch.launcher import record_variables
from accelerate.launch.logs import RankLogSettings
from accelerate.launch.notebook import payload
from accelerate.launch.notebook.fork_server_client import ForkServerSupervisor
from accelerate.launch.notebook.function_ranks import ForkedRankSpec, ForkSupervisor
from accelerate.launch.rank_reports import JobOutcome, ProcessSpec
from accelerate.launch.supervisor import WorkerSupervisor
from accelerate.world.network import LOOPBACK, reserve_port

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


@frozen_dataclass
class FunctionLauncher:
    """The call of a function on ranks.

    Attributes:
        processes: on how many processes.
        variables: what each is told by its environment.
        port: where rank 0 listens; 0 for a free port.
        max_restarts: how often all are started again after a failure.
        prefix: what stands before each line that a rank prints, with ``${rank}`` and ``${local_rank}``.
        why_no_fork: why the processes cannot be copies of this one; "" if they can.
    """

    processes: int
    variables: Variables = field(default_factory=dict)
    port: int = 0
    max_restarts: int = 0
    prefix: str = ""
    why_no_fork: str = ""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call ``function(*args)`` on each rank and return the results in rank order.

        Raises:
            LaunchError: it cannot be started.
            FunctionError: it failed on a rank.
            KeyboardInterrupt: it was interrupted; no rank is left.
        """
        with (
            rank_reports.report_folder() as parcel_folder,
            reserve_port(self.port, partial(print, flush=True)) as port,
        ):
            parcel = self._write_parcel(function, args, parcel_folder)
            for attempt in range(self.max_restarts + 1):
                with rank_reports.report_folder() as folder:
                    error = self._run_attempt((function, args), parcel, folder, port.number, attempt)
                    if error is None:
                        return list(read_results(folder, self.processes))
                if attempt == self.max_restarts or not isinstance(error, FunctionError):
                    raise error
                print(f"{error.what}; starting all again ({attempt + 1} of {self.max_restarts})", flush=True)
        raise AssertionError("unreachable")

    def _write_parcel(self, function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> Path | None:
        """Write the function for the ranks; return None where they have to be copies of this process."""
        parcel = folder / "parcel"
        try:
            payload.write_payload(parcel, function, args)
        except payload.UnpicklableFunctionError as error:
            reason = self.why_no_fork or _why_no_copies()
            if reason:
                error.why += f"\n       so the ranks would have to be copies of this process, {reason}"
            if reason or not hasattr(os, "fork"):
                raise
            print(f"{error.why}; so the ranks are copies of this process (fork)", flush=True)
            return None
        return parcel

    def _run_attempt(
        self,
        call: tuple[Callable[..., Any], tuple[Any, ...]],
        parcel: Path | None,
        folder: Path,
        port: int,
        attempt: int,
    ) -> BaseException | None:
        """Run the ranks once: they read the parcel, or are copies of this process that make the call."""
        template = Template(self.prefix)
        logs = RankLogSettings(
            "3",
            None,
            prefix=lambda rank: template.safe_substitute(rank=rank, local_rank=rank, role_name="default"),
        )
        restarts = (attempt, self.max_restarts)
        run_id = os.urandom(4).hex()
        each = list(torchrun_variables(self.processes, LOOPBACK, port, run_id, restarts=restarts))
        shared = {**self.variables, OUTER_LAUNCH_VARIABLE: record_variables(self.variables)}
        shared["ACCELERATE_STOP_FOLDER"] = folder
        environments = [environ.make_child_environment({**shared, **own}) for own in each]
        if parcel is None:
            function, args = call
            copies = [
                ForkedRankSpec((), env, function=function, args=args, folder=folder) for env in environments
            ]
            ranks: WorkerSupervisor = ForkSupervisor(copies, logs, folder, stop_timeout=STOP_TIMEOUT)
        else:
            program = (sys.executable, rank_reports.RANK_SCRIPT, "function", str(parcel), str(folder))
            commands = [
                ProcessSpec((*program, str(rank)), env, stdin=subprocess.DEVNULL if rank else None)
                for rank, env in enumerate(environments)
            ]
            ranks = ForkServerSupervisor(
                commands, logs, folder, stop_timeout=STOP_TIMEOUT, job_variables=each[0]
            )
        outcome = ranks.run()
        return error_to_raise(outcome, folder, rank_reports.build_job_error(outcome, folder))


def _why_no_copies() -> str:
    """Return why copies of this process cannot be ranks: its world would be theirs, one for each copy."""
    from accelerate.world import world

    if not world.is_open():
        return ""
    return (
        "but it has an Accelerator or PartialState already, and each copy would train alone with it: create "
        "it inside the function only; accelerator.end_training() ends the one that is here"
    )


def call_on_machines(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    flags: Sequence[object],
    *,
    processes: int,
    variables: Variables,
) -> list[Any]:
    """Call ``function(*args)`` on several machines; return the results of this machine's processes.

    Args:
        function: what to call.
        args: with what.
        flags: of ``accelerate launch``: the machines, and where they meet.
        processes: on how many processes of each machine.
        variables: what each process is told by its environment.

    Raises:
        LaunchError: the function cannot be sent.
        FunctionError: it failed, or the machines did not meet; what the launcher said is printed.
        KeyboardInterrupt: the cell was interrupted.
    """
    with rank_reports.report_folder() as folder:
        payload.write_payload(folder / "parcel", function, args)
        # No file of the user's says more than this call does.
        (folder / "settings.yaml").write_text("{}\n", encoding="utf-8")
        own_flags = ("--config_file", f"{folder}/settings.yaml", "--stop_timeout", STOP_TIMEOUT)
        script = (rank_reports.RANK_SCRIPT, "function", f"{folder}/parcel", str(folder))
        program = map(str, (sys.executable, "-m", "accelerate", "launch", *own_flags, *flags, *script))
        env = environ.make_child_environment({**variables, OUTER_LAUNCH_VARIABLE: None})
        logs = RankLogSettings("3", None, prefix=lambda rank: "")
        # It ends its ranks itself, and needs longer for that than they do. The reports are of its ranks.
        launcher = WorkerSupervisor(
            [ProcessSpec(tuple(program), env)], logs, folder / "launcher", stop_timeout=4 * STOP_TIMEOUT
        )
        outcome = launcher.run()
        error = rank_reports.build_job_error(outcome, folder)
        raised = error_to_raise(outcome, folder, error and _blame_local_rank(error, folder, processes))
        if raised is not None:
            raise raised
        return list(read_results(folder, processes))


def _blame_local_rank(error: RankError, folder: Path, processes: int) -> RankError:
    """Return the launcher's error, with the traceback of the rank of this machine that failed first."""
    reports = (rank_reports.read_error_file(folder, rank) for rank in range(processes))
    first = min((each for each in reports if each), key=lambda each: each.blame_order, default=None)
    if first is None:
        error.what = f"the job failed (exit code {error.code})"
        error.why = "what its launcher printed says it"
    else:
        error.what, error.why = f"the function failed on this machine: {first.summary}", ""
        error.traceback = first.text
    return error


def read_results(folder: Path, processes: int) -> Iterator[Any]:
    """Yield the result of each rank of this machine; warn where it could not be pickled, or there is none."""
    for rank in range(processes):
        file = rank_reports.rank_file(folder, rank, "result")
        if file.is_file():
            value, reason = pickle.loads(file.read_bytes())
        else:
            value, reason = None, f"rank {rank} ended (os._exit) before its function did; None stands for it"
        if reason:
            warnings.warn(reason, stacklevel=4)
        yield value


def error_to_raise(outcome: JobOutcome, folder: Path, error: RankError | None) -> BaseException | None:
    """Return the exception to raise after ranks failed or were stopped; None after success.

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
    function_error = _function_error(error, folder)
    if outcome.stopped_by == signal.SIGINT:
        stopped = KeyboardInterrupt()
        stopped.__cause__ = function_error
        return stopped
    return function_error


def _function_error(error: RankError, folder: Path) -> FunctionError:
    """The launcher's error as that of a function, with the names of cells and the exception itself."""
    function_error = FunctionError(error.what.replace("the script", "the function"), why=error.why)
    function_error.code, function_error.others = error.code, error.others
    function_error.traceback = _name_cells(error.traceback)
    for file in folder.glob("rank_*.error") if error.traceback else ():
        if error.traceback in file.read_text(encoding="utf-8"):
            function_error.rank = int(file.stem.removeprefix("rank_"))
            exception = rank_reports.rank_file(folder, function_error.rank, "exception")
            function_error.__cause__ = cause = _read_exception(exception)
            if cause is not None:
                function_error.what = function_error.what.replace(
                    "(exit code 1)", f"({type(cause).__name__})"
                )
            break
    return function_error


def _read_exception(file: Path) -> BaseException | None:
    if not file.is_file():
        return None
    try:
        exception = pickle.loads(file.read_bytes())
    except payload.UNPICKLABLE:  # a class whose objects can be written and not read: the text has to do
        return None
    return exception if isinstance(exception, BaseException) else None


def _name_cells(text: str) -> str:
    """A traceback with files of cells called as IPython calls them."""

    def replace_name(match: re.Match[str]) -> str:
        cell = payload.cell_of(match[1])
        return match[0] if cell is None else cell

    return re.sub(r'File "([^"\n]+)"', replace_name, text)
