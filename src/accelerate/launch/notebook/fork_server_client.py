"""Ranks of functions that a fork server starts (fork_server.py), for the process that launches them.

The first launch of a process starts its server, and later ones use it as long as the variables are the same
that torch reads when it is imported. Where there is no such server, as on macOS, ranks are fresh processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from accelerate.launch.rank_reports import ProcessSpec
from accelerate.launch.supervisor import GuardProcess, WorkerSupervisor

PROGRAM = str(Path(__file__).with_name("fork_server.py"))
# pytest names the test in it; each test would have a server of its own, with seconds of imports.
_RUNNING_TEST = "PYTEST_CURRENT_TEST"


class ForkServer:
    """A fork server, as its client sees it. Ranks with another environment or path need another one.

    Args:
        env: its variables, without those that tell a rank of its job.
        path: where modules are found.
    """

    def __init__(self, env: dict[str, str], path: tuple[str, ...]) -> None:
        self.env, self.path = env, path
        self.exit_codes: dict[int, int | None] = {}  # of each rank that it has started; None while it runs
        self._lock = threading.Lock()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A fork of this process that lives on must not keep the server from seeing the end of this one.
        os.register_at_fork(after_in_child=self.connection.close)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, PROGRAM, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection.send(json.dumps(path).encode())

    def start(self, request_file: Path, streams: Sequence[int]) -> int:
        """Let it start a rank and return the process number.

        Raises:
            OSError: it has ended.
        """
        with self._lock:
            socket.send_fds(self.connection, [str(request_file).encode()], streams)
            while True:
                started = self._receive()
                if started is not None:
                    self.exit_codes[started] = None
                    return started

    def exit_code(self, pid: int, *, block: bool = False) -> int | None:
        """Return the exit code of a rank, as ``Popen`` gives it; None while it runs.

        A rank whose server has ended is killed: nobody could tell how it ends.
        """
        with self._lock:
            try:
                while self.exit_codes[pid] is None:
                    self._receive(0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self.exit_codes[pid] = -signal.SIGKILL
            return self.exit_codes[pid]

    def _receive(self, flags: int = 0) -> int | None:
        """Read one answer: the number of a rank that has started, or None for one that has ended."""
        answer = self.connection.recv(64, flags).decode()
        if not answer:
            raise ConnectionResetError("the fork server has ended")
        if answer.startswith("+"):
            return int(answer)
        pid, code = answer[1:].split()
        self.exit_codes[int(pid)] = int(code)
        return None

    def is_busy(self) -> bool:
        """Tell whether ranks of it run, as far as is known."""
        return None in self.exit_codes.values()

    def has_ended(self) -> bool:
        """Tell whether it has ended, as it does after a while without a launch."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server."""
        self.connection.close()
        self._process.kill()
        self._process.wait()


_server: ForkServer | None = None  # of this process
_server_lock = threading.Lock()


def request_server(env: dict[str, str], job_variables: Collection[str]) -> ForkServer | None:
    """Return the fork server for ranks with these variables; None where there can be none.

    Args:
        env: the variables of a rank.
        job_variables: the names of those that differ between ranks and launches.
    """
    global _server
    if sys.platform != "linux":
        return None
    others = {*job_variables, _RUNNING_TEST}
    fixed = {
        name: value
        for name, value in env.items()
        if name not in others and not name.startswith("ACCELERATE_")
    }
    # The server asks for no device: a driver that has been asked for its devices does not survive a fork.
    path = tuple(place for place in sys.path if isinstance(place, str))  # Python takes no notice of others
    fixed["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with _server_lock:
        if _server is not None and ((_server.env, _server.path) != (fixed, path) or _server.has_ended()):
            if not _server.is_busy():  # else another thread launches with it; it ends when it is idle
                _server.close()
            _server = None
        if _server is None:
            _server = ForkServer(fixed, path)
        return _server


def forget_server(server: ForkServer) -> None:
    """Close a server that has ended; the next launch starts another."""
    global _server
    with _server_lock:
        server.close()
        if _server is server:
            _server = None


class ServedProcess:
    """A rank of a fork server with the part of ``Popen`` that ``WorkerSupervisor`` uses.

    Args:
        server: which.
        request_file: what it was asked.
        stdin: what the rank reads, as in ``Popen``.
        outputs: where it writes, likewise.

    Raises:
        OSError: the server has ended.
    """

    def __init__(
        self,
        server: ForkServer,
        request_file: Path,
        stdin: int | None,
        outputs: tuple[int | None, int | None],
    ) -> None:
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._server = server
        pipes = [os.pipe() if output == subprocess.PIPE else None for output in outputs]
        nothing = os.open(os.devnull, os.O_RDWR)
        writers = [number if pipe is None else pipe[1] for number, pipe in zip((1, 2), pipes, strict=True)]
        try:
            self.pid = server.start(request_file, (0 if stdin is None else nothing, *writers))
        except OSError:
            for pipe in filter(None, pipes):
                os.close(pipe[0])
            raise
        finally:
            for number in (nothing, *(pipe[1] for pipe in pipes if pipe)):
                os.close(number)
        self.stdout, self.stderr = (None if pipe is None else os.fdopen(pipe[0], "rb") for pipe in pipes)

    def poll(self) -> int | None:
        """Its exit code if it has ended, as ``Popen`` gives it."""
        return self._server.exit_code(self.pid)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self._server.exit_code(self.pid, block=True)
        assert code is not None
        return code


class ForkServerSupervisor(WorkerSupervisor):
    """Ranks that a fork server starts; fresh processes where it cannot.

    Args:
        args, kwargs: those of ``WorkerSupervisor``.
        job_variables: the names of variables that differ between ranks and launches.
    """

    def __init__(self, *args: Any, job_variables: Collection[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server = request_server(self.commands[0].env, job_variables)
        if self._server is not None:
            self.wake_fds = (self._server.connection.fileno(),)

    def _create_process(
        self, rank: int, command: ProcessSpec, guard: GuardProcess
    ) -> subprocess.Popen[bytes]:
        if self._server is not None:
            request_file = self.folder / f"rank_{rank}.request"
            try:
                request = {"env": command.env, "cwd": os.getcwd(), "arguments": command.program[3:]}
                request_file.write_text(json.dumps(request), encoding="utf-8")
                process = ServedProcess(self._server, request_file, command.stdin, self.logs.pipes(rank))
                return cast("subprocess.Popen[bytes]", process)
            except OSError:  # it has ended, since it cannot serve here; or the working folder is gone
                forget_server(self._server)
                self._server, self.wake_fds = None, ()
        return super()._create_process(rank, command, guard)
