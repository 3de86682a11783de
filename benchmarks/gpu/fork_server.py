"""A process that has imported torch and the package, and forks one process per rank of a row.

An import of a torch for CUDA takes seconds; the rows of a run pay it once per environment. The server itself
never touches the device, since a process that did cannot fork others that use it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from benchmarks.case import ROOT, BenchError, Subject, clean_environment, complaint, kill_processes

START = 180.0  # seconds until torch is imported, from a cold disk too
PRELOADED = ("torch.distributed.fsdp", "torch._dynamo", "safetensors.torch", "accelerate")
# With it torch looks for CUDA without initializing the driver, after which no fork could use it.
ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
GRACE = 2.0  # seconds that the other ranks have once one has failed


# ------------------------------------------------------------------------------------------ in the run


class ForkServer:
    """The server of one environment, started at first use and again after it died.

    Args:
        python: the interpreter of the environment.
        preloaded: what the server imports before it forks.

    Attributes:
        devices: how many accelerators there are. Ranks beyond them share the first one.
        deadline: when the row that runs has to end (``time.monotonic``).
    """

    def __init__(self, python: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self.python, self.preloaded = python, preloaded
        self.devices, self.deadline = 1, float("inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(
        self, module: str, arguments: Sequence[str], environments: Sequence[dict[str, str]], limit: float
    ) -> tuple[list[int], list[str], list[str]]:
        """Run ``python -m module`` on one forked process per environment.

        Args:
            module: the program.
            arguments: its arguments.
            environments: of each rank, the variables that it has beside the server's.
            limit: seconds until all ranks are killed.

        Returns:
            The exit codes, and the texts that the ranks wrote to stdout and to stderr.

        Raises:
            BenchError: the limit was reached, or the server died.
        """
        connection = self._connect()
        with tempfile.TemporaryDirectory(prefix="accelerate-rows-") as folder:
            pids: list[int] = []
            finished = False
            try:
                connection.send((module, list(arguments), list(environments), folder))
                pids = self._receive(connection, 60)
                codes = self._receive(connection, limit)
                finished = True
            finally:
                if not finished:
                    kill_processes(pids)
                    self.close()
            texts = [
                [Path(folder, f"{stream}.{rank}").read_text(errors="replace") for rank in range(len(pids))]
                for stream in ("out", "err")
            ]
        return codes, texts[0], texts[1]

    def _receive(self, connection: Connection, limit: float) -> list[int]:
        if not connection.poll(max(0.0, limit)):
            raise BenchError(f"took longer than {limit:.0f} s")
        try:
            return connection.recv()
        except EOFError:
            raise BenchError("the process that the rows are forked from has died") from None

    def _connect(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                arguments = [str(theirs.fileno()), *self.preloaded]
                self._process = subprocess.Popen(
                    [str(self.python), "-m", "benchmarks.gpu.fork_server", *arguments],
                    cwd=ROOT,
                    env={**clean_environment(), **ASK_NVML},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._connection = Connection(ours.detach())
            self._receive(self._connection, START)
        return self._connection

    def close(self) -> None:
        """End the server; its ranks are killed by whoever gave up on them."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            kill_processes([process.pid])
            process.wait()


@dataclass(frozen=True)
class ForkedSubject(Subject):
    """An environment whose programs are forked from its server.

    Attributes:
        output: the folder of the run, for large files and traces.
    """

    output: Path = ROOT

    @cached_property
    def server(self) -> ForkServer:
        """The server of the environment; it starts with the first program."""
        return ForkServer(self.python)

    def run_module(self, module: str, *arguments: str, processes: int = 1) -> str:
        codes, out, err = self.run_codes(module, *arguments, processes=processes)
        for rank, code in enumerate(codes):
            if code and code != -signal.SIGKILL:
                raise BenchError(f"exit code {code}: {complaint(err[rank])}")
        if any(codes):
            raise BenchError("a process was killed by the system")
        return out[0]

    def run_codes(
        self, module: str, *arguments: str, processes: int = 1
    ) -> tuple[list[int], list[str], list[str]]:
        """Run a program; return exit codes, stdout and stderr of its ranks."""
        limit = min(self.server.deadline - time.monotonic(), 3600.0)
        return self.server.run(module, arguments, self._environments(processes), limit)

    def _environments(self, processes: int) -> list[dict[str, str]]:
        if processes == 1:
            return [{}]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # Two ranks on one card: each is the only one of its machine, so that both take card 0.
        alone = self.server.devices < processes
        local = {"LOCAL_WORLD_SIZE": "1" if alone else str(processes)}
        return [
            {**shared, **local, "RANK": str(rank), "LOCAL_RANK": "0" if alone else str(rank)}
            for rank in range(processes)
        ]


# --------------------------------------------------------------------------------------- in the server


def serve(connection: Connection, preloaded: Sequence[str]) -> None:
    """Fork what is asked for, one row after the other, until the run closes its end."""
    for name in preloaded:
        importlib.import_module(name)
    connection.send([])
    while True:
        try:
            module, arguments, environments, folder = connection.recv()
        except EOFError:
            return
        pids = [
            _fork(module, arguments, environment, folder, rank)
            for rank, environment in enumerate(environments)
        ]
        connection.send(pids)
        connection.send(_wait(pids))


def _fork(module: str, arguments: list[str], environment: dict[str, str], folder: str, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        _become(module, arguments, environment, folder, rank)
    return pid


def _become(
    module: str, arguments: list[str], environment: dict[str, str], folder: str, rank: int
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{stream}.{rank}", os.O_CREAT | os.O_WRONLY), number)
        os.environ.update(environment)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever a row raises is its outcome
        traceback.print_exc()
    finally:
        # What was made in the server is not taken apart here: it is the server's.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    """The exit codes; when one rank has failed, the others are killed after a while."""
    codes: dict[int, int] = {}
    end = float("inf")
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                end = min(end, time.monotonic() + GRACE) if codes[pid] else end
        if time.monotonic() > end:
            kill_processes([pid for pid in pids if pid not in codes])
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
