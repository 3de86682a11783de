"""The place of a thread: its line of user code, and the call of torch that it waits in."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

# Frames of this package and of the standard library's wrappers are not user code.
PACKAGE_PREFIXES = (str(Path(__file__).parents[1]) + os.sep, "<frozen")
_WRAPPERS = ("contextlib.py", "typing_extensions.py")


class CallSite(NamedTuple):
    """A line of the user's code.

    Attributes:
        file, line: the source position.
        function: name of the function; ``<module>`` at module level.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


# By the code's identity, which the entry keeps alive: hashing the code itself would cost more than the rest.
_cache: dict[tuple[int, int], tuple[CallSite, CodeType]] = {}
_UNKNOWN = CallSite("<unknown>", 0, "")


def find_call_site(frame: FrameType | None, extra_prefixes: tuple[str, ...] = ()) -> CallSite:
    """Return the innermost line of user code at or above a frame; the outermost line if there is none.

    Args:
        frame: the frame to start from.
        extra_prefixes: more folders whose code is not the user's.
    """
    prefixes = PACKAGE_PREFIXES + extra_prefixes if extra_prefixes else PACKAGE_PREFIXES
    if frame is None:
        return _UNKNOWN
    while True:
        code, outer = frame.f_code, frame.f_back
        name = code.co_filename
        if outer is None or not (name.startswith(prefixes) or name.endswith(_WRAPPERS)):
            break
        frame = outer
    key = id(code), frame.f_lasti
    entry = _cache.get(key)
    if entry is None:
        # A generator of code (a notebook, exec in a loop) must not fill the memory.
        if len(_cache) > 4096:
            _cache.clear()
        entry = _cache[key] = CallSite(code.co_filename, frame.f_lineno, code.co_name), code
    return entry[0]


_training_libraries: list[str] = []


def add_training_library(module: ModuleType) -> None:
    """Count the frames of a package that trains by torch's collectives as torch's own."""
    folder = os.path.dirname(str(module.__file__)) + os.sep
    if folder not in _training_libraries:
        _training_libraries.append(folder)


def torch_prefixes() -> tuple[str, ...]:
    """Return the folders of torch and of training libraries, and the file that starts threads."""
    torch_folder = os.path.dirname(str(sys.modules["torch"].__file__)) + os.sep
    return (torch_folder, threading.__file__, *_training_libraries)


# Files of torch that may wait for other ranks -> the name that users know.
_BLOCKING_FILES = {
    "distributed/_functional_collectives.py": "an exchange of distributed tensors",
    "nn/parallel/distributed.py": "a forward of the model",
    "autograd/graph.py": "backward",
}
# Files that wait for other ranks and compute nothing: a rank whose innermost line is there only waits.
_COMMUNICATION_FILES = {"distributed/distributed_c10d.py", "distributed/_functional_collectives.py"}
# Names for want of a better one further out; empty: the function's own name.
_INNER_FILES = {"distributed/distributed_c10d.py": "", "distributed/fsdp/": "a forward of the model"}


class BlockingCall(NamedTuple):
    """A call that may wait for other ranks.

    Attributes:
        name: as users know it, ``"backward"``; empty for none.
        only_waits: it does nothing but communicate; otherwise it may also compute.
    """

    name: str = ""
    only_waits: bool = False


# Functions of this package that wait in torch: the identity of the code -> name, and the code.
_own_waits: dict[int, tuple[str, CodeType]] = {}
_F = TypeVar("_F", bound=Callable[..., Any])


def waits_for_ranks(name: str) -> Callable[[_F], _F]:
    """Name a function that waits for other ranks by an object of torch, without a call of torch in Python."""

    def register(function: _F) -> _F:
        code = function.__code__
        _own_waits[id(code)] = name, code
        return function

    return register


def blocking_call(frames: Iterable[FrameType]) -> BlockingCall:
    """Return the call of torch that may wait for other ranks.

    Args:
        frames: of a thread, the innermost first.
    """
    folder, name, only_waits, innermost = torch_prefixes()[0], "", False, True
    for frame in frames:
        code = frame.f_code
        if id(code) in _own_waits:
            return BlockingCall(_own_waits[id(code)][0], True)
        file = code.co_filename
        if not file.startswith(folder):
            break
        file = file[len(folder) :].replace(os.sep, "/")
        if file == "_ops.py":  # the call of an operator: what waits is the line around it
            continue
        only_waits, innermost = only_waits or (innermost and file in _COMMUNICATION_FILES), False
        if file in _BLOCKING_FILES:
            return BlockingCall(_BLOCKING_FILES[file], only_waits)
        for start, inner in _INNER_FILES.items():
            if file.startswith(start):
                name = inner or code.co_name
    return BlockingCall(name, only_waits and bool(name))


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def waiting_place(error: BaseException) -> str:
    """Return where an error of torch about a lost peer was raised: ``"backward at train.py:12"``."""
    stack = list(traceback.walk_tb(error.__traceback__))
    call = blocking_call(frame for frame, _ in stack[::-1]).name or "a collective of torch"
    return f"{call} at {user_line(stack)}"


def user_line(stack: Sequence[tuple[FrameType, int]]) -> CallSite:
    """Return the innermost line of user code in a traceback of (frame, line), the outermost first."""
    prefixes = PACKAGE_PREFIXES + torch_prefixes()
    users = (
        CallSite(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in stack[::-1]
        if not frame.f_code.co_filename.startswith(prefixes)
        and not frame.f_code.co_filename.endswith(_WRAPPERS)
    )
    return next(users, _UNKNOWN)
