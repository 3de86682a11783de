"""A job on a Ray cluster: Ray says which machines take part, and a launcher on each runs their processes.

The placement group has one bundle for each process, and an actor holds each. The first actor on a machine
runs ``accelerate launch`` there, for as many processes as there are actors, on the devices that Ray gave to
all of them. The launchers meet as those of several machines always do (``launch/elastic``), and so start
again after a failed rank. What they print, and the files of their ranks, come back as a stream.

Source: Ray 2.60 documentation, "Placement Groups", "Actors", "Dynamic generators", "Accelerator Support".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import LaunchError, MissingExtraError, RankError, SettingError
from accelerate.core.packages import is_installed
from accelerate.core.value_types import Count, Index, PositiveNumber, frozen_dataclass
from accelerate.launch import rank_reports
from accelerate.launch.base import Variables
from accelerate.launch.kinds.mpi import FORWARDED_VARIABLES
from accelerate.launch.logs import OutputSink
from accelerate.launch.notebook import payload
from accelerate.launch.notebook.function_launcher import error_to_raise, read_results
from accelerate.launch.notebook.launchers import check_call, check_numbers, precision_variables, refuse_nested
from accelerate.launch.rank_reports import JobOutcome, ProcessExit
from accelerate.launch.ray_worker import Message, RayWorker
from accelerate.launch.supervisor import FORWARDED_SIGNALS, STOP_SIGNALS, SignalAndChildExitWaiter

POLL_SECONDS = 0.1  # seconds between looks for signals
QUIET_WAIT_SECONDS = 10.0  # seconds of waiting for Ray before it is said


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_workers: int | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    mixed_precision: str = "no",
    max_restarts: int = 0,
    placement_strategy: str = "PACK",
    address: str | None = None,
    timeout: float = 600.0,
) -> list[Any]:
    """Call ``function(*args)`` in processes on the machines of a Ray cluster.

    A program that has called ``ray.init`` uses that cluster, any other one the cluster of ``address``, of
    ``RAY_ADDRESS``, or one that runs on this machine; where there is none, Ray is started here.

    Args:
        function: the training; it creates its own ``Accelerator``.
        args: its arguments.
        num_workers: how many processes; None: one for each GPU of the cluster, or one.
        resources_per_worker: what Ray gives each, by default ``{"CPU": 1}`` and a GPU where there are some.
        mixed_precision: for every ``Accelerator`` that says none itself; ``"no"`` leaves that as it is.
        max_restarts: how often all processes are started again when one fails, or a machine is lost.
        placement_strategy: of Ray: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        address: of the cluster.
        timeout: seconds to wait until Ray has placed the processes.

    Returns:
        What the function returned in each process, by rank; tensors on the CPU.

    Raises:
        SettingError: an argument cannot be as it is.
        LaunchError: Ray does not place the processes, or the function cannot be sent.
        FunctionError: it failed on a rank; the text ends with that rank's traceback.
        KeyboardInterrupt: it was interrupted; no process is left.
    """
    call = check_call(function, args)
    num_workers, max_restarts, timeout = check_numbers(
        num_workers=(num_workers, Count | None),
        max_restarts=(max_restarts, Index),
        timeout=(timeout, PositiveNumber),
    )
    refuse_nested("accelerate.ray.launch")
    job = RayJob(
        processes=num_workers,
        resources=resources_per_worker or {},
        placement=placement_strategy,
        address=address,
        max_restarts=max_restarts,
        join_timeout=timeout,
        print_line=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return job.call(function, call, precision_variables(mixed_precision))


@dataclass
class RayMachine:
    """One machine of the job.

    Attributes:
        address: of it.
        workers: its actors; the first runs the launcher.
        first_rank: the rank of the first of its processes.
        visible: the devices of all its workers, by variable.
        end: the last message of its launcher; None before.
        loss: why it is lost; "" while it is not.
    """

    address: str
    first_rank: int = 0
    workers: list[Any] = field(default_factory=list)
    visible: dict[str, list[str]] = field(default_factory=dict)
    end: Message | None = None
    loss: str = ""


class MachineLostError(RankError):
    """A machine has left the Ray cluster."""


@frozen_dataclass
class RayJob:
    """A job on a Ray cluster.

    Attributes:
        processes: how many; None for one for each GPU of the cluster.
        resources: what Ray gives each; empty for the default.
        placement: Ray's strategy.
        address: of the cluster; None for the one at hand.
        max_restarts: how often to place all again when a machine is lost; the launchers count failed ranks.
        join_timeout: seconds to wait until Ray has placed the processes.
        print_line: prints a line.
        uses_cpu: give the processes no GPU.
    """

    processes: int | None
    resources: Mapping[str, float]
    placement: str
    address: str | None
    max_restarts: int
    join_timeout: float
    print_line: Callable[[str], None]
    uses_cpu: bool = False

    def run_script(self, flags: Sequence[str], program: Sequence[str], variables: Variables) -> None:
        """Run a script.

        Raises:
            LaunchError: Ray does not place the processes, or a rank failed.
        """
        self._connect()
        with rank_reports.report_folder() as folder:
            _, _, error = self._run(flags, program, variables, None, folder)
        if error is not None:
            raise error

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], variables: Variables) -> list[Any]:
        """Call ``function(*args)`` and return the results by rank; see ``launch``."""
        self._connect()
        with rank_reports.report_folder() as folder:
            payload.write_payload(folder / "parcel", function, args)
            parcel = (folder / "parcel").read_bytes()
            flags = ("--tee", "3", "--max_restarts", str(self.max_restarts))
            size, outcome, error = self._run(flags, (), variables, parcel, folder)
            failure = error_to_raise(outcome, folder, _blame_function(error, folder, size))
            if failure is not None:
                raise failure
            return list(read_results(folder, size))

    # --- the cluster

    def _connect(self) -> None:
        """Connect this process to the cluster, once.

        Raises:
            MissingExtraError: Ray is not installed.
            LaunchError: nobody answers at the address.
        """
        if not is_installed("ray"):
            raise MissingExtraError("ray", "a launch on Ray")
        import ray

        if ray.is_initialized():
            return
        try:
            ray.init(address=self.address or "auto", logging_level="warning")
        except ConnectionError as error:
            if self.address is not None or environ.get("RAY_ADDRESS"):
                raise LaunchError(
                    f"no Ray cluster answers at {self.address or environ.get('RAY_ADDRESS')}",
                    why=str(error).splitlines()[0],
                    fix="ray start --head on one machine, and its address here; or no address at all",
                ) from error
            self.print_line("no Ray cluster runs: Ray is started on this machine")
            ray.init(address="local", include_dashboard=False, logging_level="warning")

    def _request_bundles(self) -> list[dict[str, float]]:
        """Return what Ray has to give each process."""
        import ray

        gpus = 0 if self.uses_cpu else int(ray.cluster_resources().get("GPU", 0))
        resources = dict(self.resources) or {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
        if self.uses_cpu:
            resources.pop("GPU", None)
        return [resources] * (self.processes or max(1, gpus))

    def _place(self, bundles: list[dict[str, float]], signals: SignalAndChildExitWaiter) -> Any:
        """Return a placement group, once Ray has one.

        Raises:
            LaunchError: it has none within the time.
            RankError: a signal came meanwhile.
        """
        from ray.util import placement_group, remove_placement_group

        import ray

        try:
            group = placement_group(bundles, strategy=self.placement)
        except ValueError as error:
            raise SettingError(
                f"Ray cannot place {_describe(bundles)} ({self.placement})", why=str(error).splitlines()[0]
            ) from error
        began, has_announced = time.monotonic(), False
        try:
            while not group.wait(POLL_SECONDS):
                waited = time.monotonic() - began
                capacity = ray.cluster_resources()
                missing = [
                    name for name, count in bundles[0].items() if capacity.get(name, 0) < count * len(bundles)
                ]
                has = ", ".join(f"{capacity.get(name, 0):g} {name}" for name in bundles[0])
                if waited > self.join_timeout:
                    raise LaunchError(
                        f"Ray has not placed {_describe(bundles)} ({self.placement}) within "
                        f"{self.join_timeout:g} s",
                        why=f"the cluster has {has}" + ("" if missing else ", and others use them"),
                        fix="start fewer processes (-n), or each with less",
                    )
                if not has_announced and (missing or waited > QUIET_WAIT_SECONDS):
                    has_announced, most = True, f"for {self.join_timeout:g} s at most"
                    self.print_line(
                        f"waiting for Ray to place {_describe(bundles)}, {most}; the cluster has {has}"
                    )
                for number in signals.wait(0):
                    if number in STOP_SIGNALS:
                        error = rank_reports.stopped_error(number)
                        error.what += " while it waited for Ray"
                        raise error
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    # --- the job

    def _run(
        self,
        flags: Sequence[str],
        program: Sequence[str],
        variables: Variables,
        parcel: bytes | None,
        folder: Path,
    ) -> tuple[int, JobOutcome, RankError | None]:
        """Run the job, again when a machine is lost; the files of its ranks are in ``folder`` then.

        Returns:
            the number of processes, how the launchers ended, and the error.
        """
        from ray.util import remove_placement_group

        forwarded = {k: v for k, v in environ.snapshot().items() if FORWARDED_VARIABLES.fullmatch(k)}
        bundles = self._request_bundles()
        uses_device = bool(bundles[0].keys() - {"CPU", "memory"})
        flags = (*flags, *(() if uses_device else ("--cpu",)))
        restarts = 0
        with SignalAndChildExitWaiter() as signals:
            while True:
                group = self._place(bundles, signals)
                try:
                    attempt = RayAttempt(_find_machines(group, bundles), signals)
                    attempt.start(flags, program, {**forwarded, **variables}, parcel)
                    attempt.run()
                finally:
                    remove_placement_group(group)
                error = attempt.error()
                if not isinstance(error, MachineLostError) or restarts == self.max_restarts:
                    _write_rank_files(attempt.machines, folder)
                    return len(bundles), attempt.outcome, error
                restarts += 1
                self.print_line(f"{error.what}; restart {restarts} of {self.max_restarts}")


class RayAttempt:
    """The launchers of one placement group.

    Args:
        machines: on which they run.
        signals: to this process; they are passed on.
    """

    def __init__(self, machines: list[RayMachine], signals: SignalAndChildExitWaiter) -> None:
        self.machines, self.signals = machines, signals
        self.outcome = JobOutcome()
        self.streams: dict[Any, int] = {}
        self.sinks = {1: OutputSink(sys.stdout, lambda _: None), 2: OutputSink(sys.stderr, lambda _: None)}

    def start(
        self, flags: Sequence[str], program: Sequence[str], variables: Variables, parcel: bytes | None
    ) -> None:
        """Start the launcher of each machine."""
        import ray

        count, main = len(self.machines), self.machines[0]
        port = ray.get(main.workers[0].reserve_port.remote()) if count > 1 else 0
        for number, machine in enumerate(self.machines):
            place = ["--nproc_per_node", str(len(machine.workers)), "--num_machines", str(count)]
            if count > 1:
                place += ["--machine_rank", str(number), "--main_process_ip", main.address]
                place += ["--main_process_port", str(port)]
            visible = {name: ",".join(dict.fromkeys(ids)) for name, ids in machine.visible.items()}
            run = machine.workers[0].run.options(num_returns="streaming")
            stream = run.remote((*place, *flags), program, {**variables, **visible}, parcel)
            self.streams[stream] = number

    def run(self) -> None:
        """Pass output and signals on until no launcher is left."""
        from ray.exceptions import RayError

        import ray

        while self.streams:
            for number in self.signals.wait(0):
                self._pass_on(number)
            ready, _ = ray.wait(list(self.streams), timeout=POLL_SECONDS)
            for stream in ready:
                index = self.streams[stream]
                machine = self.machines[index]
                try:
                    message = ray.get(next(stream))
                except StopIteration:
                    del self.streams[stream]
                except RayError as error:
                    del self.streams[stream]
                    machine.loss = str(error).strip().splitlines()[0]
                    self._stop_all(signal.SIGTERM)
                else:
                    self._handle(index, message)

    def _handle(self, index: int, message: Message) -> None:
        for stream, lines in message.get("output", ()):
            self.sinks[stream].write(lines)
        if "code" in message:
            self.machines[index].end = message
            code, now = message["code"], time.monotonic_ns()
            self.outcome.exits.append(ProcessExit(index, code, now, was_asked_to_stop=False))

    def _pass_on(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self.outcome.stopped_by = self.outcome.stopped_by or number
        if number in STOP_SIGNALS or number in FORWARDED_SIGNALS:
            self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        for index in self.streams.values():
            self.machines[index].workers[0].stop.remote(int(number))

    def error(self) -> RankError | None:
        """Return the error of the job: of a machine that is lost, else what the first launcher says."""
        for number, machine in enumerate(self.machines):
            if machine.loss and self.outcome.stopped_by is None:
                return MachineLostError(
                    f"machine {number} ({machine.address}) has left the Ray cluster", why=machine.loss
                )
        ends = [machine.end for machine in self.machines if machine.end and machine.end["code"]]
        if not ends:
            number = self.outcome.stopped_by
            return None if number is None else rank_reports.stopped_error(number)
        end = max(ends, key=lambda each: bool(each["error"].get("traceback")))
        said = end["error"]
        code = said.get("code", rank_reports.shell_code(end["code"]))
        error = RankError(
            said.get("what") or f"the launcher of a machine ended with exit code {code}",
            why=said.get("why", "what it printed stands above"),
            fix=said.get("fix", ""),
        )
        error.code, error.others, error.traceback = code, said.get("others", ()), said.get("traceback", "")
        return error


def _find_machines(group: Any, bundles: list[dict[str, float]]) -> list[RayMachine]:
    """Start the actor of each bundle; return the machines, in the order of their first bundles."""
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    import ray

    more = {name: count for name, count in bundles[0].items() if name not in ("CPU", "GPU", "memory")}
    workers = [
        ray.remote(RayWorker)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            resources=more,
            max_concurrency=2,  # `stop` comes while `run` runs
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote(os.getcwd())
        for index, bundle in enumerate(bundles)
    ]
    try:
        places = ray.get([worker.describe.remote() for worker in workers])
    except RayError as error:
        raise LaunchError(
            "a process that Ray has placed cannot be started",
            why=str(error).strip().splitlines()[-1],
            fix="all machines need this package, of the same version",
        ) from error
    machines: dict[str, RayMachine] = {}
    for worker, place in zip(workers, places, strict=True):
        machine = machines.setdefault(place["node"], RayMachine(place["address"]))
        machine.workers.append(worker)
        for name, value in place["visible"].items():
            machine.visible.setdefault(name, []).extend(value.split(","))
    first = 0
    for machine in machines.values():
        machine.first_rank = first
        first += len(machine.workers)
    return list(machines.values())


def _write_rank_files(machines: list[RayMachine], folder: Path) -> None:
    """Write the files of all ranks, named by rank; their machines name them by local rank."""
    for machine in machines:
        for name, content in (machine.end["files"] if machine.end else {}).items():
            local, _, suffix = name.removeprefix("rank_").partition(".")
            (folder / f"rank_{machine.first_rank + int(local)}.{suffix}").write_bytes(content)


def _blame_function(error: RankError | None, folder: Path, size: int) -> RankError | None:
    """Return the error of a job, with the traceback that a rank has left from the function on."""
    if error is None:
        return None
    reports = [report for rank in range(size) if (report := rank_reports.read_error_file(folder, rank))]
    # Clocks of machines differ: who was first, their launchers have settled.
    named = [report for report in reports if report.summary in error.traceback] or reports
    if named:
        error.traceback = min(named, key=lambda report: report.blame_order).text
    return error


def _describe(bundles: list[dict[str, float]]) -> str:
    each = ", ".join(f"{count:g} {name}" for name, count in bundles[0].items())
    return f"{len(bundles)} {'process' if len(bundles) == 1 else 'processes'} of {each}"
