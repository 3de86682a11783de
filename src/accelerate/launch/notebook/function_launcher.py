"""The processes of one call of a function, and how they ended.

On one machine they are started here (``FunctionLauncher``). On several, each machine starts
``accelerate launch``, whose script calls the function (``NotebookRendezvousConfig``).
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import field
from pathlib import Path
from string import Template
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import RankError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.device import Device
from accelerate.launch import rank_reports
from accelerate.launch.base import Variables
from accelerate.launch.job_scheduler import OUTER_LAUNCH_VARIABLE
from accelerate.launch.kinds.local import torchrun_variables
from accelerate.launch.launcher import record_variables
from accelerate.launch.logs import RankLogSettings
from accelerate.launch.notebook import payload
from accelerate.launch.notebook.fork_server_client import ForkServerSupervisor
from accelerate.launch.notebook.function_ranks import (
    ForkedRankSpec,
    ForkSupervisor,
    exception_file,
    result_file,
)
from accelerate.launch.rank_reports import JobOutcome, ProcessSpec
from accelerate.launch.supervisor import WorkerSupervisor
from accelerate.world.ports import LOOPBACK, PortInUseError, ReservedPort

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
    prefix: str = "[rank ${rank}] "
    why_no_fork: str = ""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call ``function(*args)`` on each rank and return the results in rank order.

        Raises:
            LaunchError: it cannot be started.
            FunctionError: it failed on a rank.
            KeyboardInterrupt: it was interrupted; no rank is left.
        """
        with tempfile.TemporaryDirectory(prefix="accelerate-") as name, _reserve_port(self.port) as port:
            start = self._create_transport(function, args, Path(name))
            for attempt in range(self.max_restarts + 1):
                folder = Path(name, str(attempt))
                folder.mkdir()
                error = self._run_attempt(start, folder, port.number, attempt)
                if error is None:
                    return list(read_results(folder, self.processes))
                if attempt == self.max_restarts or not isinstance(error, FunctionError):
                    raise error
                print(f"{error.what}; starting all again ({attempt + 1} of {self.max_restarts})", flush=True)
        raise AssertionError("unreachable")

    def _create_transport(
        self, function: Callable[..., Any], args: tuple[Any, ...], folder: Path
    ) -> FunctionTransport:
        """Make the transport of the function: the ranks read it, or are copies of this process."""
        try:
            payload.write_payload(folder / "parcel", function, args)
        except payload.UnpicklableFunctionError as error:
            reason = self.why_no_fork or _why_no_copies()
            if reason:
                error.why += f"\n       so the ranks would have to be copies of this process, {reason}"
                raise
            if not hasattr(os, "fork"):
                raise
            print(f"{error.why}; so the ranks are copies of this process (fork)", flush=True)
            return FunctionTransport(function, args)
        return FunctionTransport(payload_file=str(folder / "parcel"))

    def _run_attempt(
        self, start: FunctionTransport, folder: Path, port: int, attempt: int
    ) -> BaseException | None:
        template = Template(self.prefix)
        logs = RankLogSettings(
            "3",
            None,
            prefix=lambda rank: template.safe_substitute(rank=rank, local_rank=rank, role_name="default"),
        )
        each = list(
            torchrun_variables(
                self.processes, LOOPBACK, port, os.urandom(4).hex(), restarts=(attempt, self.max_restarts)
            )
        )
        shared = {**self.variables, OUTER_LAUNCH_VARIABLE: record_variables(self.variables)}
        commands = [
            start.process_spec(
                rank,
                folder,
                environ.make_child_environment({**shared, **variables, "ACCELERATE_STOP_FOLDER": folder}),
            )
            for rank, variables in enumerate(each)
        ]
        outcome = start.create_supervisor(commands, logs, folder, job_variables=each[0]).run()
        return error_to_raise(outcome, folder, rank_reports.build_job_error(outcome, folder))


def _why_no_copies() -> str:
    """Return why copies of this process cannot be ranks: its world would be theirs, one for each copy."""
    from accelerate.world import world

    if world.current() is None:
        return ""
    return (
        "but it has an Accelerator or PartialState already, and each copy would train alone with it: create "
        "it inside the function only; accelerator.end_training() ends the one that is here"
    )


@frozen_dataclass
class FunctionTransport:
    """The way of a function to the ranks: in a parcel, or because they are copies of this process.

    Attributes:
        function: for copies.
        args: its arguments.
        payload_file: the file for the others.
    """

    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    payload_file: str = ""

    def create_supervisor(
        self,
        commands: Sequence[ProcessSpec],
        logs: RankLogSettings,
        folder: Path,
        *,
        job_variables: Collection[str],
    ) -> WorkerSupervisor:
        """Return the supervisor that starts and watches the ranks; ``job_variables`` differ between them."""
        if self.function is not None:
            return ForkSupervisor(commands, logs, folder, stop_timeout=STOP_TIMEOUT)
        return ForkServerSupervisor(
            commands, logs, folder, stop_timeout=STOP_TIMEOUT, job_variables=job_variables
        )

    def process_spec(self, rank: int, folder: Path, env: dict[str, str]) -> ProcessSpec:
        """One rank to start."""
        if self.function is not None:
            return ForkedRankSpec((), env, function=self.function, args=self.args, folder=folder)
        call = ("function", self.payload_file, str(folder), str(rank))
        program = (sys.executable, rank_reports.RANK_SCRIPT, *call)
        return ProcessSpec(program, env, stdin=None if rank == 0 else subprocess.DEVNULL)


@frozen_dataclass
class NotebookRendezvousConfig:
    """The place where the machines of a job find each other.

    Attributes:
        machines: how many they are.
        machine_rank: which one this is.
        main_address: of rank 0.
        port: of rank 0.
        backend: the name of torch's rendezvous.
        endpoint: where it is; "" for the address and port.
        conf: its options.
        id: the name of the job.
        max_restarts: how often the processes of all machines are started again.
        monitor_interval: seconds between two looks at them.
    """

    machines: int
    machine_rank: int
    main_address: str
    port: int
    backend: str
    endpoint: str
    conf: Mapping[str, Any]
    id: str
    max_restarts: int
    monitor_interval: float

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        processes: int,
        device: Device,
        variables: Variables,
    ) -> list[Any]:
        """Call ``function(*args)`` and return the results of this machine's processes.

        Args:
            function: what to call.
            args: with what.
            processes: on how many processes of each machine.
            device: on which type of device.
            variables: what each process is told by its environment.

        Raises:
            LaunchError: the function cannot be sent.
            FunctionError: it failed, or the machines did not meet; what the launcher said is printed.
            KeyboardInterrupt: the cell was interrupted.
        """
        with tempfile.TemporaryDirectory(prefix="accelerate-") as name:
            folder = Path(name)
            payload.write_payload(folder / "parcel", function, args)
            # No file of the user's says more than this call does.
            (folder / "settings.yaml").write_text("{}\n", encoding="utf-8")
            script = (rank_reports.RANK_SCRIPT, "function", str(folder / "parcel"), name)
            program = (sys.executable, "-m", "accelerate", "launch")
            flags = tuple(self._flags(folder / "settings.yaml", processes, device))
            logs = RankLogSettings("3", None, prefix=lambda rank: "")
            env = environ.make_child_environment({**variables, OUTER_LAUNCH_VARIABLE: None})
            launcher = ProcessSpec((*program, *flags, *script), env)
            # It ends its ranks itself, and needs longer for that than they do. The reports are of its ranks.
            outcome = WorkerSupervisor(
                [launcher], logs, folder / "launcher", stop_timeout=4 * STOP_TIMEOUT
            ).run()
            error = error_to_raise(
                outcome,
                folder,
                self._local_error(folder, processes, rank_reports.build_job_error(outcome, folder)),
            )
            if error is not None:
                raise error
            return list(read_results(folder, processes))

    def _flags(self, settings: Path, processes: int, device: Device) -> Iterator[str]:
        yield from ("--config_file", str(settings), "--tee", "3", "--stop_timeout", str(STOP_TIMEOUT))
        yield from ("--num_processes", str(processes * self.machines), "--num_machines", str(self.machines))
        yield from ("--rdzv_backend", self.backend)
        if self.backend == "static":  # the others number the machines as they meet
            yield from ("--machine_rank", str(self.machine_rank))
        yield from ("--main_process_ip", self.main_address, "--main_process_port", str(self.port))
        yield from (
            "--max_restarts",
            str(self.max_restarts),
            "--monitor_interval",
            str(self.monitor_interval),
        )
        if self.endpoint:
            yield from ("--rdzv_endpoint", self.endpoint)
        if self.id != "none":
            yield from ("--rdzv_id", self.id)
        if self.conf:
            yield from ("--rdzv_conf", ",".join(f"{key}={value}" for key, value in self.conf.items()))
        if device.type == "cpu":
            yield "--cpu"

    def _local_error(self, folder: Path, processes: int, error: RankError | None) -> RankError | None:
        """The launcher's own end, with the traceback of the rank of this machine that failed first."""
        reports = (rank_reports.read_error_file(folder, rank) for rank in range(processes))
        failures = [each for each in reports if each is not None]
        if error is None:
            return None
        if not failures:
            error.what, error.why = (
                f"the job failed (exit code {error.code})",
                "what its launcher printed says it",
            )
            return error
        first = min(failures, key=lambda each: each.blame_order)
        error.what, error.why = f"the function failed on this machine: {first.summary}", ""
        error.traceback = first.text
        return error


@contextmanager
def _reserve_port(wanted: int) -> Iterator[ReservedPort]:
    try:
        port = ReservedPort(wanted)
    except PortInUseError as error:
        port = ReservedPort()
        print(f"Port {wanted} is in use ({error.why}), rank 0 listens on {port.number} instead.", flush=True)
    with closing(port):
        yield port


def read_results(folder: Path, processes: int) -> Iterator[Any]:
    """Yield the result of each rank of this machine; warn where it could not be pickled, or there is none."""
    for rank in range(processes):
        file = result_file(folder, rank)
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
            function_error.__cause__ = cause = _read_exception(exception_file(folder, function_error.rank))
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
