"""Stop a function at every system call by which it changes files, and kill it there if asked.

``run`` forks. The child is followed by ptrace, as a debugger does, with the threads and processes that it
starts: so writes of native libraries count like those of Python. Before each change below a folder the child
stands still, and the caller may look at the disk, or kill it: before the change, or in the middle of a write.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import platform
import random
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

_TRACEME, _POKEUSER, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 6, 24, 0x4200, 0x420E
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXITKILL = 0x1, 0x2, 0x4, 0x8, 0x100000
_WALL = 0x40000000  # also wait for threads
_RDX, _ORIG_RAX = 12 * 8, 15 * 8  # places in struct user of x86-64
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_INFO = struct.Struct("=BxxxIQQQ6Q")

# Number of a call on x86-64 -> its name and where its arguments say which file: (descriptor or None, path or
# None). Two pairs for calls that know two names.
_ONE, _AT = ((None, 0),), ((0, 1),)
_TWO, _TWO_AT = ((None, 0), (None, 1)), ((0, 1), (2, 3))
_CALLS: dict[int, tuple[str, tuple[tuple[int | None, int | None], ...]]] = {
    1: ("write", ((0, None),)), 18: ("write", ((0, None),)), 20: ("writev", ((0, None),)),
    296: ("writev", ((0, None),)), 328: ("writev", ((0, None),)), 40: ("sendfile", ((0, None),)),
    326: ("copy", ((2, None),)), 77: ("truncate", ((0, None),)), 285: ("truncate", ((0, None),)),
    76: ("truncate", _ONE), 9: ("mmap", ((4, None),)),
    2: ("open", _ONE), 85: ("open", _ONE), 257: ("open", _AT), 437: ("open", _AT),
    74: ("fsync", ((0, None),)), 75: ("fsync", ((0, None),)), 277: ("fsync", ((0, None),)),
    83: ("mkdir", _ONE), 258: ("mkdir", _AT), 84: ("rmdir", _ONE),
    87: ("unlink", _ONE), 263: ("unlink", _AT),
    82: ("rename", _TWO), 264: ("rename", _TWO_AT), 316: ("rename", _TWO_AT),
    86: ("link", _TWO), 265: ("link", _TWO_AT),
    88: ("symlink", ((None, 1),)), 266: ("symlink", ((1, 2),)),
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One system call that changes the disk.

    Attributes:
        call: ``"open"`` (for writing), ``"write"``, ``"fsync"``, ``"rename"``, ``"mkdir"``, ``"unlink"`` ...
        path: of what, relative to the folder that is watched.
        target: of a rename or link, its new name.
        size: of a write, bytes.
    """

    call: str
    path: str
    target: str = ""
    size: int = 0


@dataclass
class Ended:
    """How the child ended.

    Attributes:
        killed: it was killed by a signal.
        value: what the function returned.
        error: the traceback of what it raised.
        changes: what it did to the disk, or was about to do when it was killed.
    """

    killed: bool = False
    value: Any = None
    error: str = ""
    changes: list[Change] = field(default_factory=list)

    def result(self) -> Any:
        """What the function returned.

        Raises:
            AssertionError: it raised, or was killed.
        """
        assert not self.killed, "the child was killed"
        assert not self.error, self.error
        return self.value


@cache
def available() -> str:
    """Why processes cannot be followed here; empty if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "system calls are followed on Linux on x86-64 only"
    try:
        ended = run(lambda begin: (begin(), os.close(os.open(os.devnull, os.O_WRONLY))), Path("/dev"))
    except OSError as error:
        return f"this machine does not let processes be followed: {error}"
    return "" if [c.call for c in ended.changes] == ["open"] else "this kernel does not tell system calls"


def run(
    function: Callable[[Callable[[], None]], Any],
    root: Path,
    watch: Callable[[int, Change], str] | None = None,
) -> Ended:
    """Runs ``function(begin)`` in a fork; it calls ``begin()`` where following it shall begin.

    Args:
        function: the work; what it returns is pickled.
        root: the folder below which changes count.
        watch: called with number (from 1) and change while the child stands still before it. It says whether
            to kill the child with SIGKILL: no (``""``), now (``"before"``), or after half of the bytes of a
            write (``"within"``).
    """
    draws = random.getstate()
    with tempfile.TemporaryFile() as answers:
        pid = os.fork()
        if pid == 0:
            random.setstate(draws)  # Python seeds it anew in every fork
            _child(function, answers)
        follower = _Follower(pid, str(root.resolve()), watch)
        try:
            code = follower.follow()
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        answers.seek(0)
        answer = answers.read() if code == 0 else b""
    if follower.refused:
        raise OSError(follower.refused, os.strerror(follower.refused))
    value, error = pickle.loads(answer) if answer else (None, "" if code < 0 else f"exit status {code}")
    return Ended(code < 0, value, error, follower.changes)


def kill_at(number: int, how: str) -> Callable[[int, Change], str]:
    """A ``watch`` that kills at one change."""
    return lambda n, _: how if n == number else ""


def alone(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a fork of its own, which nobody follows."""
    return run(lambda _: function(), Path("/")).result()


def _child(function: Callable[[Callable[[], None]], Any], answers: IO[bytes]) -> NoReturn:
    code = 1
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # OpenMP's threads are not in a fork, and it would wait for them
    try:
        try:
            answer = (function(_begin), "")
        except Exception:  # noqa: BLE001 - it is shown by the parent
            answer = (None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _begin() -> None:
    """Lets the parent follow this thread, and stands still until it does."""
    if _ptrace(_TRACEME, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.kill(os.getpid(), signal.SIGSTOP)


class _Follower:
    """Goes from system call to system call."""

    def __init__(self, pid: int, root: str, watch: Callable[[int, Change], str] | None) -> None:
        self.pid, self.root, self.watch = pid, root, watch
        self.changes: list[Change] = []
        self.known: set[int] = set()
        self.doomed = 0  # the thread that is killed when its call returns
        self.refused = 0

    def follow(self) -> int:
        """Until the child has ended: its exit status, negative for a signal."""
        while True:
            task, status = os.waitpid(-1 if self.known else self.pid, _WALL | os.WUNTRACED)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                if task == self.pid:
                    return os.waitstatus_to_exitcode(status)
                continue
            self._go_on(task, self._stopped(task, os.WSTOPSIG(status), status >> 16))

    def _stopped(self, task: int, number: int, event: int) -> int:
        """Looks at a stop; returns the signal to hand on."""
        if number == signal.SIGTRAP | 0x80:
            self._call(task)
            return 0
        if task not in self.known and number == signal.SIGSTOP:  # the first stop of a task
            self.known.add(task)
            if task == self.pid:
                _ptrace(_SETOPTIONS, task, 0, _SYSGOOD | _FORK | _VFORK | _CLONE | _EXITKILL)
            return 0
        return 0 if event else number

    def _go_on(self, task: int, number: int) -> None:
        if _ptrace(_SYSCALL, task, 0, number) < 0 and ctypes.get_errno() != errno.ESRCH:
            self.refused = ctypes.get_errno()
            os.kill(self.pid, signal.SIGKILL)

    def _call(self, task: int) -> None:
        buffer = ctypes.create_string_buffer(_INFO.size)
        if _ptrace(_GET_SYSCALL_INFO, task, _INFO.size, ctypes.addressof(buffer)) < 0:
            return  # it was killed meanwhile
        kind, _, _, _, call, *arguments = _INFO.unpack(buffer.raw)
        if kind == 2 and task == self.doomed:  # the half write is done
            os.kill(self.pid, signal.SIGKILL)
        change = self._change(task, call, arguments) if kind == 1 else None
        if change is None:
            return
        self.changes.append(change)
        what = self.watch(len(self.changes), change) if self.watch is not None else ""
        if what == "within":
            assert change.size, f"not a write: {change}"
            _ptrace(_POKEUSER, task, _RDX, arguments[2] // 2)
            self.doomed = task
        elif what:
            _ptrace(_POKEUSER, task, _ORIG_RAX, -1)  # no call at all, whatever the kernel does first
            os.kill(self.pid, signal.SIGKILL)

    def _change(self, task: int, call: int, arguments: list[int]) -> Change | None:
        name, places = _CALLS.get(call, ("", ()))
        if not name or (name == "open" and not self._opens(task, call, arguments) & _WRITING):
            return None
        if name == "mmap" and not (arguments[2] & 2 and arguments[3] & 1 and arguments[4] < 2**31):
            return None  # neither shared nor to be written, or of no file
        paths = [_path(task, arguments, place) for place in places]
        if not any(path == self.root or path.startswith(f"{self.root}/") for path in paths):
            return None
        shown = [os.path.relpath(path, self.root) for path in paths]
        return Change(
            name, shown[0], shown[1] if len(shown) > 1 else "", arguments[2] if call in (1, 18) else 0
        )

    @staticmethod
    def _opens(task: int, call: int, arguments: list[int]) -> int:
        if call == 85:  # creat
            return os.O_WRONLY
        if call == 437:  # openat2 has its flags in a struct
            return struct.unpack("=Q", _memory(task, arguments[2], 8))[0]
        return arguments[1 if call == 2 else 2]


def _path(task: int, arguments: list[int], place: tuple[int | None, int | None]) -> str:
    descriptor, name = place
    text = ""
    if name is not None:
        text = os.fsdecode(_memory(task, arguments[name], 4096).partition(b"\0")[0])
    if text.startswith("/"):
        return os.path.normpath(text)
    number = ctypes.c_int(arguments[descriptor]).value if descriptor is not None else -100
    try:
        base = os.readlink(f"/proc/{task}/cwd" if number == -100 else f"/proc/{task}/fd/{number}")
    except FileNotFoundError:
        return ""
    return os.path.normpath(os.path.join(base, text)) if text else base


def _memory(task: int, address: int, size: int) -> bytes:
    memory = os.open(f"/proc/{task}/mem", os.O_RDONLY)
    try:
        return os.pread(memory, size, address)
    finally:
        os.close(memory)


def _ptrace(request: int, task: int, address: int = 0, data: int = 0) -> int:
    return _libc().ptrace(request, task, address, data)


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.restype = ctypes.c_long
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return library
