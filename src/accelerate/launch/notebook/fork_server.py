"""A process that has imported torch, and forks the ranks of functions: ``fork_server.py SOCKET``.

It is what Python's own fork server is to ``multiprocessing``: a rank that it forks starts in hundredths of a
second, where a fresh process imports torch for seconds. It uses no device, so its forks can. ``ForkServer``
(fork_server_client.py) is its other end. The first message is where modules are found; each further one names
the file of a request, and brings the three standard streams of the rank. The answers are ``+PID`` for a rank
that has started, and ``-PID CODE`` for one that has ended.

It ends when its client does, or when nothing was asked for ``IDLE_SECONDS``.

``multiprocessing.forkserver`` itself does not do: it imports the main module of the program that launches,
which would run a script again, it belongs to that program, and its processes share environment and output.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys

IDLE_SECONDS = 900.0
# Imported before the first rank is forked, and, while there is nothing to do, what trainings import later.
FIRST = ("torch", "accelerate.facade.accelerator")
LATER = ("torch._dynamo", "torch.distributed.fsdp")
STREAMS = 3
MESSAGE_BYTES = 4096


def main(descriptor: int) -> None:
    """Serve until the client ends; in a rank, return when it has called its function."""
    # Schedulers signal every process of a job, and with this one its ranks would be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    connection = socket.socket(fileno=descriptor)
    sys.path[:] = json.loads(connection.recv(1 << 20))
    _import_all(FIRST)
    if _uses_device():
        return  # no fork of this process could use one: the client starts fresh processes
    request_file, streams = _serve(connection)
    connection.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _become_rank(request_file, streams)


def _serve(connection: socket.socket) -> tuple[str, list[int]]:
    """Fork ranks and tell how they end; returns only in a rank, with what it was asked."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running, later = 0, [*LATER]
    while True:
        seconds = 0.2 if later and not running else IDLE_SECONDS
        ready, _, _ = select.select([connection, reader], [], [], seconds)
        if reader in ready:
            os.read(reader, 4096)
            running -= _report_ended(connection)
        if connection in ready:
            message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, STREAMS)
            if not message:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(reader)
                os.close(writer)
                return message.decode(), streams
            for stream in streams:
                os.close(stream)
            running += 1
            connection.send(f"+{pid}".encode())
        if not ready and later and not running:
            _import_all([later.pop(0)])
        elif not ready and not running:
            os._exit(0)


def _report_ended(connection: socket.socket) -> int:
    """Send the exit code of each rank that has ended, and return how many have."""
    count = 0
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            count += 1
            connection.send(f"-{ended[0]} {os.waitstatus_to_exitcode(ended[1])}".encode())
    return count


def _import_all(names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        # What cannot be imported is shown by the rank that needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all that it shares with this process


def _uses_device() -> bool:
    from accelerate import device as devices

    return any(each.is_initialized() for each in devices.accelerators())


def _become_rank(request_file: str, streams: list[int]) -> None:
    """Turn this fork into what a fresh process of the rank would be, and call the function."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        if stream >= STREAMS:
            os.close(stream)
    with open(request_file, encoding="utf-8") as file:
        request = json.load(file)
    from accelerate.core import environ
    from accelerate.launch.rank_entry_point import run_function

    environ.set_variables({name: request["env"].get(name) for name in (*environ.snapshot(), *request["env"])})
    os.chdir(request["cwd"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    run_function(*request["arguments"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
