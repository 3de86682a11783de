"""``ranks(n, function, ...)``: run a function of a test module on n processes, in a fraction of a second.

Each rank is a fresh process with torchrun's variables; the process group is opened by what runs inside.
The function must be a top-level one of a test module, since it is named, not copied.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.support.environment import ROOT, clean
from tests.support.free_ports import free_port
from tests.support.rank_server import GRACE, Ended, Job, Report, file_of

T = TypeVar("T")
# For a single rank: a process that nobody has launched has none of these.
NO_LAUNCHER: dict[str, None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
)
# It does not compute on a CPU, and refuses.
FSDP2_OF_TORCH_2_6 = re.compile(r"FSDP2 of torch 2\.6\.\S+ does not compute")
ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_SERVE = "import sys; from tests.support.rank_server import serve; serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: which one.
        status: ``"returned" "raised" "died" "hung"`` (at the timeout) or ``"stopped"`` (a peer failed).
        value: what it returned, still pickled.
        kind: class name of the exception it raised.
        message: the text of that exception.
        traceback: from the test's function on.
        output: what it wrote to stdout and stderr.
        stacks: of all its threads, when it was stopped or crashed.
        at: clock of the failure.
    """

    rank: int
    status: str
    value: bytes | None = None
    kind: str = ""
    message: str = ""
    traceback: str = ""
    output: str = ""
    stacks: str = ""
    at: float = float("inf")

    def is_peer_gone(self) -> bool:
        """Return whether the rank only saw that a faster one had ended, in our words or in torch's."""
        torch_says = self.kind == "RuntimeError" and "onnect" in self.message
        return self.kind in ("PeerError", "DistNetworkError") or torch_says

    def __str__(self) -> str:
        parts = [f"----- rank {self.rank} {self.status} {self.kind}".rstrip() + " -----"]
        parts += [self.traceback.rstrip()] if self.traceback else [self.message] if self.message else []
        parts += [f"stacks of rank {self.rank}:\n{self.stacks.rstrip()}"] if self.stacks else []
        parts += [f"output of rank {self.rank}:\n{self.output.rstrip()}"] if self.output else []
        return "\n".join(parts)


class RanksError(AssertionError):
    """Some ranks did not return; shows every rank that did not, the first to fail first.

    Attributes:
        outcomes: one per rank, in rank order.
    """

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        order = ("raised", "died", "hung", "stopped", "returned")
        shown = sorted(outcomes, key=lambda o: (order.index(o.status), o.at, o.rank))
        super().__init__("\n".join([what, *map(str, shown)]))

    def kinds(self) -> list[str]:
        """Class names of the exceptions raised, in rank order; ``""`` for a rank that raised none."""
        return [outcome.kind for outcome in self.outcomes]

    def causes(self) -> list[Outcome]:
        """Return the failures in rank order, without ranks that only found a peer gone."""
        return [outcome for outcome in self.outcomes if outcome.kind and not outcome.is_peer_gone()]

    def causing_kinds(self) -> set[str]:
        """Return the class names of the exceptions of :meth:`causes`."""
        return {outcome.kind for outcome in self.causes()}


class RankServer:
    """Starts ranks; one per test session, its process is started on the first call and again if it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="accelerate-ranks-"))

    def __call__(
        self,
        n: int,
        function: Callable[..., T],
        *args: Any,
        timeout: float = 60,
        env: Mapping[str, object | None] | None = None,
        devices: Sequence[str] | None = None,
        grace: float = GRACE,
    ) -> list[T]:
        """What ``function(*args)`` returned on each of ``n`` ranks, in rank order.

        Args:
            n: world size.
            function: a top-level function of a test module.
            args: its arguments, pickled.
            timeout: seconds until every rank is stopped and its stacks are shown.
            env: more variables for every rank; None removes one.
            devices: the torch device of each rank; None hides accelerators from the ranks.
            grace: seconds the others may go on after a rank has failed.

        Raises:
            RanksError: a rank raised, died, hung, or returned what cannot be pickled.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(n, function, *args, timeout=timeout, env=env, devices=devices, grace=grace)
        bad = [o for o in outcomes if o.status != "returned"]
        if bad:
            raise RanksError(_summary(bad, n, timeout), outcomes)
        return [pickle.loads(o.value or b"") for o in outcomes]

    def outcomes(
        self,
        n: int,
        function: Callable[..., object],
        *args: Any,
        timeout: float = 60,
        env: Mapping[str, object | None] | None = None,
        devices: Sequence[str] | None = None,
        grace: float | None = None,
    ) -> list[Outcome]:
        """Like a call, but tells how each rank ended instead of raising.

        A test that reads what the others answer to a failure gives them the time of a busy machine:
        ``grace`` seconds. Without it a rank that has to be stopped is an error: it was left waiting.
        """
        folder = tempfile.mkdtemp(dir=self._folder)
        try:
            call, environments = _pickled(function, args), _environments(n, env, devices)
            module = _test_module()
            preload = tuple(getattr(sys.modules.get(module), "PRELOAD", ()))
            job = Job(
                *(call, module, preload, environments, list(sys.path), os.getcwd(), folder, timeout),
                grace=GRACE if grace is None else grace,
            )
            ended = self._ask(job)
            outcomes = [_outcome(folder, rank, end, job) for rank, end in enumerate(ended)]
            if any(FSDP2_OF_TORCH_2_6.search(each.message + each.output) for each in outcomes):
                pytest.skip("FSDP2 of torch 2.6 on a CPU")
            if grace is None and any(each.status == "stopped" for each in outcomes):
                raise RanksError("a rank was stopped: say how long it may go on (grace)", outcomes)
            return outcomes
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, job: Job) -> list[Ended]:
        channel = self._connected()
        finished = False
        try:
            channel.send(job)
            if not channel.poll(job.timeout + job.grace + 60):
                raise RuntimeError(f"the rank server does not answer\n{self._log()}")
            answer = channel.recv()
            finished = True
            return answer
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"the rank server died, the next call starts it again\n{self._log()}"
            ) from error
        finally:
            if not finished:  # also after Ctrl-C: an answer that nobody read must not go to the next call
                self.close()

    def _connected(self) -> Connection:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs, (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SERVE, str(theirs.fileno())],
                    cwd=ROOT,
                    # What it imports may ask whether CUDA is there; a process that has initialized the driver
                    # to answer cannot fork others that use it.
                    env={**clean(accelerators=True), **ASK_NVML},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self._channel = Connection(ours.detach())
        return self._channel

    def _log(self) -> str:
        log = self._folder / "log"
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""

    @property
    def pid(self) -> int | None:
        """The server's process, None before the first call."""
        return self._process.pid if self._process else None

    def survivors(self) -> list[psutil.Process]:
        """Ranks that still run, with what descends from them; there are none between calls."""
        below = psutil.Process(self.pid).children(recursive=True) if self.pid else []
        return [process for process in below if os.getsid(process.pid) != self.pid]  # ranks have sessions

    def close(self) -> None:
        """Ends the server and everything below it."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()  # the server reads the end of its channel, kills its ranks and leaves
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def remove(self) -> None:
        """Ends the server and removes its folder."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def same_on_all(results: Sequence[T]) -> T:
    """The one value that every rank returned; tensors are compared by value, type and shape.

    Raises:
        AssertionError: some ranks returned something else.
    """
    first = results[0]
    other = [rank for rank, result in enumerate(results) if not _equal(result, first)]
    assert not other, f"ranks {other} differ from rank 0: {[results[r] for r in other]!r} != {first!r}"
    return first


def _equal(one: Any, two: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two)


def _environments(
    n: int, env: Mapping[str, object | None] | None, devices: Sequence[str] | None
) -> list[dict[str, str]]:
    if devices is not None and len(devices) != n:
        raise ValueError(f"{len(devices)} devices for {n} ranks")
    port = free_port()
    all_ranks = []
    for rank in range(n):
        values: dict[str, object | None] = {
            "RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        if sys.platform == "linux":
            values["GLOO_SOCKET_IFNAME"] = "lo"  # the name of a test machine need not resolve
        if devices is not None:
            values["ACCELERATE_TORCH_DEVICE"] = devices[rank]
        all_ranks.append(clean({**values, **(env or {})}, accelerators=devices is not None))
    return all_ranks


def _test_module() -> str:
    """The module of the test that runs, empty outside of a test."""
    path = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    return path.removesuffix(".py").replace("/", ".")


def _pickled(function: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    name = getattr(function, "__qualname__", repr(function))
    if "<locals>" in name or "<lambda>" in name:
        raise TypeError(f"ranks() needs a top-level function of a test module, not {name}")
    return pickle.dumps((function, args))


def _outcome(folder: str, rank: int, ended: Ended, job: Job) -> Outcome:
    def text(what: str) -> str:
        place = file_of(folder, rank, what)
        return place.read_text(errors="replace") if place.exists() else ""

    output, stacks = text("output"), text("stacks")
    place = file_of(folder, rank, "report")
    report: Report = pickle.loads(place.read_bytes()) if place.exists() else Report(None)
    if report.kind:
        failure = (report.kind, report.message, report.traceback, output, stacks, report.at)
        return Outcome(rank, "raised", None, *failure)
    status, message = "returned", ""
    if ended.stopped == "timeout":
        where = "after its function had returned" if report.value else "in its function"
        status, message = "hung", f"still {where} after {job.timeout:g} s"
    elif ended.stopped:
        status, message = "stopped", f"still running {job.grace:g} s after another rank had failed"
    elif report.value is None or ended.code:
        status, message = "died", _epitaph(ended.code)
    return Outcome(rank, status, report.value, message=message, output=output, stacks=stacks)


def _epitaph(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"left with exit status {code} before its function returned"


def _summary(bad: Sequence[Outcome], n: int, timeout: float) -> str:
    hung = [o.rank for o in bad if o.status == "hung"]
    failed = [o.rank for o in bad if o.status in ("raised", "died")]
    if failed:
        return f"{len(failed)} of {n} ranks failed: {', '.join(map(str, failed))}"
    return f"{len(hung)} of {n} ranks did not end within {timeout:g} s: {', '.join(map(str, hung))}"
