"""The output of each rank: marked with its rank, and kept in a file per rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from io import RawIOBase, UnsupportedOperation
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from accelerate.core.errors import LaunchError, SettingError
from accelerate.launch.config_files import expand_home

if TYPE_CHECKING:
    import subprocess

STDOUT, STDERR = 1, 2
FINISH_SECONDS = 1.0  # seconds for pipes that processes hold which ranks have left behind
_FINISH_POLL_SECONDS = 0.05  # seconds between looks whether somebody ends the wait for the last lines
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20  # a line without an end is passed on in pieces of this size: it may never end
_STREAMS = {"0": 0, "1": STDOUT, "2": STDERR, "3": STDOUT | STDERR}


class RankLogSettings:
    """Which output of which rank is marked and logged.

    Args:
        tee: torchrun's notation: 0 none, 1 stdout, 2 stderr, 3 both; or by rank, ``"0:3,1:2"``. None means
            both if there is a folder, else none.
        folder: where the logs go, ``rank_0.log``...; None marks without logging.
        prefix: what stands before each line of a rank.

    Raises:
        SettingError: ``tee`` is not written so.
        LaunchError: the folder cannot be made.
    """

    def __init__(
        self, tee: str | None, folder: str | None, prefix: Callable[[int], str] = "[rank {}] ".format
    ) -> None:
        self.prefix = prefix
        self.default_streams, self.streams_by_rank = parse_tee(
            tee if tee is not None else "3" if folder else "0"
        )
        self.folder = None if folder is None else expand_home(folder)
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"the folder {folder} (--log_dir) cannot be made", why=error.strerror or str(error)
                ) from error
            if not os.access(self.folder, os.W_OK):
                raise LaunchError(f"the folder {folder} (--log_dir) cannot be written to")
        self.readers: list[tuple[threading.Thread, CountedPipe]] = []
        self.sinks: dict[int, OutputSink | None] = {}  # by rank

    @property
    def is_active(self) -> bool:
        """Return whether any output has to pass through the launcher."""
        return bool(self.default_streams) or any(self.streams_by_rank.values())

    def pipes(self, rank: int) -> tuple[int | None, int | None]:
        """(stdout, stderr) to start a rank with."""
        from subprocess import PIPE

        which = self.streams_by_rank.get(rank, self.default_streams)
        return PIPE if which & STDOUT else None, PIPE if which & STDERR else None

    def read(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Begin to read a process's output."""
        if process.stdout is None and process.stderr is None:
            return
        log = None if self.folder is None else self._open_log(rank, self.folder / f"rank_{rank}.log")
        mark = self.prefix(rank).encode()
        for pipe, console in zip((process.stdout, process.stderr), self._consoles, strict=True):
            if pipe is not None:
                counted = CountedPipe(pipe)
                args = (counted, console, log, mark)
                pump = threading.Thread(target=_forward_output, args=args, daemon=True)
                pump.start()
                self.readers.append((pump, counted))

    @cached_property
    def _consoles(self) -> tuple[OutputSink, OutputSink]:
        """The launcher's own stdout and stderr."""
        out, err = sys.stdout, sys.stderr
        stdout = OutputSink(out, lambda error: _drop_console(out, err))
        return stdout, OutputSink(err, lambda error: _drop_console(err, out))

    def _open_log(self, rank: int, path: Path) -> OutputSink | None:
        """Return the log of a rank; None if it cannot be opened, which is said and stops nothing.

        Nothing in it is lost: a rank that is started again adds to it, and a later launch too, below a line.
        """

        def report(error: Exception) -> None:
            reason = getattr(error, "strerror", None) or error
            _print_note(sys.stderr, f"{path} is not written any more: {reason}; the training goes on")

        is_new_launch, self.sinks[rank] = rank not in self.sinks, None
        try:
            log = self.sinks[rank] = OutputSink(path.open("ab", buffering=0), report)
            if is_new_launch and path.stat().st_size:
                log.write(time.strftime("--- accelerate launch, %Y-%m-%d %H:%M:%S\n").encode())
        except OSError as error:
            report(error)
        return self.sinks[rank]

    def append_tracebacks(self, tracebacks: Mapping[int, str]) -> None:
        """Write the tracebacks of ranks, which the launcher prints in their place, to their logs."""
        for rank, text in tracebacks.items():
            log = self.sinks.get(rank)
            if text and log is not None and self.streams_by_rank.get(rank, self.default_streams) & STDERR:
                log.write(f"{text.rstrip()}\n".encode())

    def finish(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all that the ranks have written is passed on, however slow a console or a disk is.

        Processes that ranks left behind may hold pipes open for ever: those get ``FINISH_SECONDS`` more.

        Args:
            is_interrupted: whether somebody does not want to wait any longer; it is asked again and again.

        Returns:
            False when it was interrupted.
        """
        readers, self.readers = self.readers, []
        # Counted anew each time: a chunk that a pump has just taken from the pipe is in neither count.
        for seconds in (0.0, FINISH_SECONDS, 0.0):
            deadline, sizes = time.monotonic() + seconds, [pipe.count_written() for _, pipe in readers]
            for (pump, pipe), size in zip(readers, sizes, strict=True):
                while pump.is_alive() and (pipe.forwarded < size or time.monotonic() < deadline):
                    if is_interrupted():
                        return False
                    pump.join(_FINISH_POLL_SECONDS)
        return True


class CountedPipe:
    """The output of a rank, whose reader asks for more when it has passed on what it got before.

    Attributes:
        received: how many bytes were read.
        forwarded: how many of them were passed on; -1 at the end of the pipe, when a line without an end may
            be left to be passed on.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self.received, self.forwarded = pipe, 0, 0

    def read1(self, size: int) -> bytes:
        """Read what is there, and wait if there is nothing."""
        self.forwarded = self.received
        chunk: bytes = self._pipe.read1(size)  # type: ignore[attr-defined]
        self.received += len(chunk)
        if not chunk:
            self.forwarded = -1
        return chunk

    def count_written(self) -> int:
        """Return how many bytes were written so far: those that were read, and those in the pipe."""
        received = self.received
        try:
            import fcntl
            import termios

            waiting = fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, bytes(4))
        except (
            ImportError,
            OSError,
            ValueError,
        ):  # on Windows; or it has been read to its end, and is closed
            return received
        return received + int.from_bytes(waiting, sys.byteorder)

    def close(self) -> None:
        """Close this end."""
        self._pipe.close()


def parse_tee(tee: str) -> tuple[int, dict[int, int]]:
    """Return which streams to mark by default, and by rank, from torchrun's notation.

    Raises:
        SettingError: it is not written so.
    """
    try:
        if ":" not in tee:
            return _STREAMS[tee.strip()], {}
        pairs = (part.split(":") for part in tee.split(","))
        return 0, {int(rank): _STREAMS[which.strip()] for rank, which in pairs}
    except (KeyError, ValueError) as error:
        raise SettingError(
            f"--tee is {tee!r}, which says nothing about output",
            fix="write 0 (none), 1 (stdout), 2 (stderr), 3 (both), or by rank: 0:3,1:2",
        ) from error


def read_lines(pipe: IO[bytes] | CountedPipe) -> Iterator[list[bytes]]:
    """Yield the whole lines of each read; of a line that does not end, long pieces.

    A carriage return ends a line too, for progress bars.
    """
    begun: list[bytes] = []
    size = 0
    while chunk := pipe.read1(_READ_BYTES):  # type: ignore[union-attr]
        lines: list[bytes] = chunk.replace(b"\r\n", b"\n").splitlines(keepends=True)
        is_open = not lines[-1].endswith((b"\n", b"\r"))
        begun.append(lines[0])
        size += len(lines[0])
        if is_open and len(lines) == 1 and size < _PIECE_BYTES:
            continue
        lines[0] = b"".join(begun)
        begun = [lines.pop()] if is_open and len(lines) > 1 else []
        size = sum(map(len, begun))
        yield lines
    if begun:
        yield [b"".join(begun) + b"\n"]
    pipe.close()


def _forward_output(pipe: CountedPipe, console: OutputSink, log: OutputSink | None, mark: bytes) -> None:
    """Pass the lines of a rank on, until it closes its end; whatever happens to the places they go to."""
    before = b"\n"
    for lines in read_lines(pipe):
        if log is not None:
            log.write(b"".join(lines))
        marked: list[bytes] = []
        for line in lines:
            # Not where a line goes on, nor between the two ends of b"\r\n" that were read apart.
            begins = before == b"\n" or (before == b"\r" and line != b"\n")
            marked.append(mark + line if begins else line)
            before = line[-1:]
        console.write(b"".join(marked))


class OutputSink:
    """A place where output goes. After an error it takes no more, so that the ranks never wait for it.

    Args:
        stream: a text stream (a console, perhaps a notebook's) or an unbuffered binary file; None for the
            console of a process that was started without one.
        on_failure: called once with the error.
    """

    def __init__(self, stream: TextIO | IO[bytes] | None, on_failure: Callable[[Exception], None]) -> None:
        self._stream: Any = stream
        self._on_failure = on_failure
        self._is_broken = stream is None
        self._lock = threading.Lock()  # both streams of every rank may end here, each by a thread

    def write(self, content: bytes) -> None:
        """Write all of it, or nothing any more."""
        with self._lock:
            if self._is_broken:
                return
            try:
                self._write(memoryview(content))
                return
            except (OSError, ValueError) as error:  # ValueError: somebody has closed the stream
                self._is_broken, failure = True, error
        self._on_failure(failure)

    def _write(self, content: memoryview) -> None:
        file = _find_raw_file(self._stream)
        if file is not None:
            # Around the console's buffer. A thread that waits in there for a slow console holds a lock of
            # which Python, at its end, makes a fatal error.
            _flush(self._stream, file)
            while content:  # a file that gets full takes a part
                count = file.write(content)
                if count is None:  # in non-blocking mode, which every process that shares a terminal may set
                    _wait_writable(file)
                content = content[count or 0 :]
        elif hasattr(self._stream, "buffer"):
            self._stream.buffer.write(content)
            self._stream.flush()
        else:  # a notebook's console, which takes text alone
            self._stream.write(str(content, "utf-8", "replace"))
            self._stream.flush()


def _find_raw_file(stream: Any) -> RawIOBase | None:
    """Return the unbuffered file below a stream, which may be it itself; None where there is none."""
    buffer = getattr(stream, "buffer", None)
    layers = (getattr(buffer, "raw", None), buffer, stream)
    return next((layer for layer in layers if isinstance(layer, RawIOBase)), None)


def _flush(stream: Any, file: RawIOBase) -> None:
    """Write what a stream has in its buffer to the file below it, however long that takes."""
    while True:
        try:
            stream.flush()
            return
        except BlockingIOError:  # noqa: PERF203 - a console may be full again and again
            _wait_writable(file)


def _wait_writable(file: RawIOBase) -> None:
    """Wait until a file in non-blocking mode takes more, or nobody reads it any more."""
    import select

    poll = select.poll()
    poll.register(file, select.POLLOUT)
    poll.poll()


def _drop_console(console: TextIO, other: TextIO) -> None:
    """Let what still goes to a console that is closed go nowhere; the other one says so, where it can."""
    with suppress(UnsupportedOperation, ValueError):  # a notebook's console has no descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, console.fileno())
        os.close(descriptor)
    _print_note(other, "nobody reads this output any more; the training goes on")


def _print_note(console: TextIO, text: str) -> None:
    OutputSink(console, lambda error: None).write(f"accelerate: {text}\n".encode())
