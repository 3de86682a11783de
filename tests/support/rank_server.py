"""The processes behind the ``ranks`` fixture: torch is imported once, and every rank is a fresh fork.

The test process is the client (``ranks.py``). It sends a ``Job`` and gets back how each rank ended; what
the ranks returned, printed and dumped lies in the job's folder. The root server, which has torch, forks a
module server for the test module of the job. That one imports the module, and forks the ranks of all jobs of
the module. The next module gets a new one, so that no test sees what another module has imported. What its
``PRELOAD`` names, such as transformers, is imported by a preload server between the two, once for all modules
that name the same.

Three rules keep a failing test from hurting the next one: a rank that ends takes its process group with it,
whatever still descends from the module server after a job is killed, and when the client goes away
everything does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.fsdp",  # 1.5 s; also brings torch._dynamo's parts that optimizers import on first use
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "pytest",
    "psutil",
    "yaml",
    "msgspec",
    "click",
    "rich",
    "safetensors.torch",
    "huggingface_hub.serialization",
    "packaging.version",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.tensor.experimental",
    "torch._functorch.aot_autograd",
    "torch._inductor.pattern_matcher",
    "torch.export",
    "torch.profiler",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "encodings.idna",  # for the names of hosts
    "encodings.latin_1",
    "accelerate.facade.accelerator",
    *(
        "accelerate.accelerator",
        "accelerate.data_loader",
        "accelerate.parallelism_config",
        "accelerate.state",
    ),
)
# Subpackages that ranks import on first use.
SUBPACKAGES = ("checkpoint", "data", "facade", "offload", "precision", "strategy", "utils", "watch", "world")
EXCLUDED = ("accelerate.utils.rich",)  # importing it is an error where it is switched off
POLL = 0.003  # seconds between looks at the ranks, where the system cannot tell that a process has ended
GRACE = 3.0  # seconds, where a test does not say how long the others may go on after a rank has failed
# The highest real-time signal: SIGUSR1 and SIGUSR2 belong to the programs under test.
DUMP = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
HUGE, _MADV_COLLAPSE = 2 << 20, 25
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Job:
    """One call of the fixture: the pickled (function, arguments), and the module of the running test."""

    call: bytes
    module: str
    preload: tuple[str, ...]  # what the module names
    environments: list[dict[str, str]]
    path: list[str]
    cwd: str
    folder: str
    timeout: float
    grace: float = GRACE  # seconds the others may go on after a rank has failed


@dataclass(frozen=True)
class Report:
    """What a rank leaves behind: the pickled value, or the exception (``kind``) and its traceback."""

    value: bytes | None
    kind: str = ""
    message: str = ""
    traceback: str = ""
    at: float = 0.0  # time.monotonic() of the failure: which rank failed first


@dataclass
class Ended:
    """How the process of one rank ended: exit status (negative: signal), and why it was stopped."""

    code: int | None = None
    stopped: str = ""


def file_of(folder: str, rank: int, what: str) -> Path:
    """Where a rank leaves its ``"report"``, ``"output"`` or ``"stacks"``."""
    return Path(folder, f"{rank}.{what}")


# ------------------------------------------------------------------------------------------- the server


def serve(descriptor: int) -> NoReturn:
    """The root server."""
    _preload(*PRELOAD, *_package_modules())
    use_huge_pages()
    _serve_modules(Connection(descriptor), ())


def _serve_modules(client: Connection, preloaded: tuple[str, ...]) -> NoReturn:
    """Pass each job to the server of its module or its preload, until the client closes its end."""
    preloads: dict[tuple[str, ...], ChildServer] = {}
    module: ChildServer | None = None
    try:
        while True:
            job = client.recv()
            if module is not None and (module.name != job.module or not module.is_alive()):
                module.close()
                module = None
            if job.preload == preloaded:
                server = module = module or ChildServer(job.module, client, partial(_serve_module, job))
            elif (known := preloads.get(job.preload)) is not None and known.is_alive():
                server = known
            else:
                # No module server is there now: this fork would hold its channel open.
                server = preloads[job.preload] = ChildServer("", client, partial(_serve_preload, job))
            client.send(server.run(job))
    except EOFError:
        # The newest first: a fork holds the channels of those before it open.
        for child in filter(None, (module, *reversed(preloads.values()))):
            child.close()
        os._exit(0)  # nothing is left to do, and taking torch down takes seconds


def _serve_preload(job: Job, root: Connection) -> NoReturn:
    sys.path[:] = job.path
    _preload(*job.preload)
    use_huge_pages()
    _serve_modules(root, job.preload)


class ChildServer:
    """A fork that serves jobs, as the process sees it that has forked it.

    Args:
        name: of its test module, if it serves one.
        client: where the jobs of this process come from.
        main: what the fork runs, with its end of the channel.
    """

    def __init__(self, name: str, client: Connection, main: Callable[[Connection], NoReturn]) -> None:
        self.name = name
        self._client = client
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            client.close()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            main(Connection(theirs.detach()))
        theirs.close()
        self._channel = Connection(ours.detach())

    def is_alive(self) -> bool:
        """Tell whether the process still runs."""
        return not _has_ended(self._pid)

    def run(self, job: Job) -> list[Ended]:
        """Run a job and return how its ranks ended.

        Raises:
            EOFError: the client has gone away, or the process of this server has ended.
        """
        self._channel.send(job)
        if self._channel not in wait([self._channel, self._client]):
            raise EOFError  # the client only speaks between jobs: it has gone away
        return self._channel.recv()

    def close(self) -> None:
        """End the process: it reads the end of its channel, kills its ranks and leaves."""
        self._channel.close()
        os.waitpid(self._pid, 0)


def _serve_module(job: Job, root: Connection) -> NoReturn:
    try:
        os.chdir(job.cwd)
        sys.path[:] = job.path
        _preload(*filter(None, [job.module]))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A fork copies only the thread that forks; a lock of another one would stay locked in every rank.
        assert threading.active_count() == 1, threading.enumerate()
        while True:
            root.send(_run(root.recv(), root))
    except EOFError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the root server's log shows it, and the client the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _package_modules() -> list[str]:
    import accelerate

    return [
        module.name
        for name in SUBPACKAGES
        for root in accelerate.__path__
        for module in pkgutil.walk_packages([str(Path(root, name))], f"accelerate.{name}.")
        if module.name not in EXCLUDED
    ]


def _preload(*names: str) -> None:
    for name in names:
        _try_import(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all objects, and so copy the memory it shares with us


def use_huge_pages() -> None:
    """Let this process hold its memory in pages of 2 MiB, where Linux can: a fork copies a page table.

    With 290 MB of what torch has imported, a fork that does nothing and ends took 15 ms of CPU, and takes 4.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *_ = line.split()
        if file == "0" and rights.startswith("rw"):
            first, last = (int(address, 16) for address in place.split("-"))
            for address in range(-(-first // HUGE) * HUGE, last // HUGE * HUGE, HUGE):
                madvise(address, HUGE, _MADV_COLLAPSE)  # an older kernel, or no memory: it stays as it is


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - it only saves time: the test that needs the module shows why it fails
        traceback.print_exc()


def _run(job: Job, client: Connection) -> list[Ended]:
    # Ranks that have returned wait at this gate, so that one that leaves early (and with it the store it
    # may host) does not disturb the others. It opens when its writing end is closed.
    gate, opener = os.pipe()
    arrivals, arriving = os.pipe()  # a byte for each rank that has left its report
    pids = []
    for rank in range(len(job.environments)):
        pid = os.fork()
        if pid == 0:
            os.close(opener)
            os.close(arrivals)
            client.close()
            _rank(job, rank, gate, arriving)
        pids.append(pid)
    os.close(gate)
    os.close(arriving)
    ends = [os.pidfd_open(pid) for pid in pids] if hasattr(os, "pidfd_open") else []
    try:
        return _watch(job, pids, opener, client, arrivals, ends)
    finally:
        for descriptor in (arrivals, *ends):
            os.close(descriptor)
        _kill_descendants()


def _watch(
    job: Job, pids: list[int], opener: int, client: Connection, arrivals: int, ends: list[int]
) -> list[Ended]:
    ended = [Ended() for _ in pids]
    alive = dict(enumerate(pids))
    events: list[Any] = [client, arrivals]
    deadline, reason, gate_open = time.monotonic() + job.timeout, "timeout", False
    while alive:
        for rank in list(alive):
            if _has_ended(alive[rank]):
                ended[rank].code = _reap(alive.pop(rank))
                failed = ended[rank].code or not file_of(job.folder, rank, "report").exists()
                if failed and reason == "timeout":
                    deadline, reason = min(deadline, time.monotonic() + job.grace), "peer"
        waiting = all(file_of(job.folder, rank, "report").exists() for rank in alive)
        if not gate_open and (waiting or reason == "peer"):
            os.close(opener)
            gate_open = True
        seconds = max(0.0, deadline - time.monotonic()) if ends else POLL
        happened = wait([*events, *(ends[rank] for rank in alive if ends)], seconds) if alive else []
        if client in happened:  # it only speaks between jobs: it has gone away
            raise EOFError
        if arrivals in happened and not os.read(arrivals, len(pids)):
            events.remove(arrivals)  # every rank has closed its end
        if alive and time.monotonic() > deadline:
            _dump_stacks(job, alive)
            # All stand still before the first one dies: the others would see its connections close and fail.
            for pid in alive.values():
                _signal_group(pid, signal.SIGSTOP)
            for rank, pid in alive.items():
                ended[rank] = Ended(_reap(pid), stopped=reason)
            alive.clear()
    if not gate_open:
        os.close(opener)
    return ended


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(pid: int) -> int:
    """Kills the whole process group of a rank and returns the rank's exit status."""
    _signal_group(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _signal_group(pid: int, number: int) -> None:
    # The leader is not reaped yet, so its number cannot have been given to another process; it may not
    # have made its group yet. macOS refuses when all of the group are zombies.
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def _dump_stacks(job: Job, alive: dict[int, int]) -> None:
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP)
    patience = time.monotonic() + 2.0
    sizes: list[int] = []
    while time.monotonic() < patience:
        time.sleep(0.1)
        now = [file_of(job.folder, r, "stacks").stat().st_size for r in alive]
        if all(now) and now == sizes:
            return
        sizes = now


def _kill_descendants() -> None:
    """Kills what escaped its rank's process group; being the subreaper, this process is its parent by now."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --------------------------------------------------------------------------------------------- one rank


def _rank(job: Job, rank: int, gate: int, arriving: int) -> NoReturn:
    code = 70
    try:
        stacks = _settle(job, rank)
        report = _call(job.call)
        _leave(job, rank, report)
        os.write(arriving, b".")
        code = 0 if report.value is not None else 1
        if code == 0:
            os.read(gate, 1)
            _close_group()
        stacks.flush()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _settle(job: Job, rank: int) -> IO[bytes]:
    """Makes this fork a process of its own: group, output, environment, import path, stack dumps."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(file_of(job.folder, rank, "output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks = file_of(job.folder, rank, "stacks").open("wb")
    faulthandler.register(DUMP, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(job.environments[rank])
    os.chdir(job.cwd)
    sys.path[:] = job.path
    return stacks


def _call(call: bytes) -> Report:
    try:
        function, arguments = pickle.loads(call)
        value = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is shown by the test process
        shown = _show(error)
        return Report(None, type(error).__name__, str(error), shown, time.monotonic())
    try:
        return Report(pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - pickling raises whatever the value's classes raise
        message = f"the {type(value).__name__} that this rank returned cannot be pickled: {error}"
        return Report(None, "PicklingError", message, f"{message}\n", time.monotonic())


def _show(error: BaseException) -> str:
    """The traceback from the test's function on; a failed ``assert`` also shows the names it could see."""
    trace: Any = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    if isinstance(error, AssertionError) and trace is not None:
        while trace.tb_next:
            trace = trace.tb_next
        seen = {name: _brief(value) for name, value in trace.tb_frame.f_locals.items() if not callable(value)}
        text += "".join(f"    {name} = {value}\n" for name, value in seen.items())
    return text


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 300 else f"{shown[:300]} ..."


def _leave(job: Job, rank: int, report: Report) -> None:
    place = file_of(job.folder, rank, "report")
    draft = place.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(report))
    draft.rename(place)  # the server sees a whole report or none


def _close_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
