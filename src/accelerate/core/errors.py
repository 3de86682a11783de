"""The errors and warnings of this package.

    AccelerateError                what went wrong, why, and what to type
    |-- SettingError               a value, key, flag or variable is wrong           (ValueError)
    |   `-- UnknownNameError       an unknown name; the nearest one is suggested
    |-- PrepareError               an object cannot be prepared or used this way     (ValueError, TypeError)
    |-- DeviceError                a device is absent or cannot do what is requested (RuntimeError)
    |-- WorldError                 the process group is not as requested             (RuntimeError)
    |-- CollectiveError            ranks do not agree about a collective             (RuntimeError)
    |   `-- PeerError              another rank failed; its traceback comes last
    |-- CheckpointError            a checkpoint is missing, incomplete or damaged    (RuntimeError)
    |-- OffloadError               an offloaded weight cannot be read or changed     (RuntimeError)
    |-- LaunchError                a job cannot be started                           (RuntimeError)
    |   `-- RankError              a rank of it failed; its traceback comes last
    |-- MissingExtraError          an optional package is needed                     (ImportError)
    `-- FeatureNotBuiltError       promised, and not built yet                       (NotImplementedError)

The second bases are what users of the public package already catch. Warnings point at the line of the user's
code which is concerned: ``warn_user``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

UNKNOWN_RANK = -1
_PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Frames of these packages are not the user's: torch wraps ``optimizer.step``, contextlib wraps contexts.
_LIBRARIES = frozenset({"accelerate", "torch", "contextlib"})


class AccelerateError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one sentence that names the problem, in the user's words.
        why: the reason or the rule behind it; may be empty.
        fix: what to type or change; may be empty.

    Attributes:
        failed_rank: the other rank whose failure led to this error, ``UNKNOWN_RANK`` where nobody knows
            which; None when this rank failed itself.
    """

    failed_rank: int | None = None
    what: str
    why: str
    fix: str

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks and from workers; keyword-only arguments need this.
        return _rebuild, (type(self), self.what, self.why, self.fix)


def find_failed_rank(error: BaseException) -> int | None:
    """Return the other rank whose failure led to ``error``, by its chain; None if this rank failed itself."""
    peer = find_consequence(error)
    return None if peer is None else peer.failed_rank


def find_consequence(error: BaseException) -> AccelerateError | None:
    """Return the error in the chain of ``error`` that another rank's failure led to, or None."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        if isinstance(each, AccelerateError) and each.failed_rank is not None:
            return each
        seen.add(id(each))
        pending += (each.__context__, each.__cause__)
    return None


def _rebuild(kind: type[AccelerateError], what: str, why: str, fix: str) -> AccelerateError:
    # RuntimeError.__new__, which is the first in the MRO, refuses a kind that is an OSError too.
    base: Any = kind.__base__
    error = base.__new__(kind)
    AccelerateError.__init__(error, what, why=why, fix=fix)
    return error


class SettingError(AccelerateError, ValueError):
    """A setting has a value it cannot have, or two settings contradict each other."""


class UnknownNameError(SettingError):
    """A flag, key, device, strategy ... that does not exist.

    Args:
        kind: the kind of name: ``"flag"``, ``"key in config.yaml"``, ``"device"``.
        name: the name as the user wrote it.
        known: the names that exist; the nearest is suggested.
        where: the place of the name, ``"in config.yaml, line 3"``.
        why: replaces the list of known names.
        fix: replaces the suggestion of the nearest one.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], *, where: str = "", why: str = "", fix: str = ""
    ) -> None:
        choices = sorted(set(known))
        near = nearest(name, choices)
        listed = ", ".join(choices) if len(choices) <= 24 else ""
        super().__init__(
            f"unknown {kind} {name!r} {where}".rstrip(),
            why=why or (f"known: {listed}" if listed else ""),
            fix=fix or (f"did you mean {near!r}?" if near else ""),
        )
        self.name, self.near = name, near


class PrepareError(AccelerateError, ValueError, TypeError):
    """An object cannot be prepared, or was used in a way its preparation rules out."""


class DeviceError(AccelerateError, RuntimeError):
    """A device is absent, unknown, or cannot do what is requested."""


class WorldError(AccelerateError, RuntimeError):
    """The process group is not as requested."""


class CollectiveError(AccelerateError, RuntimeError):
    """Ranks do not agree about a collective: other order, shape, type, or a missing rank."""


class PeerError(CollectiveError):
    """Another rank failed while this one worked with it: a consequence, and never the cause.

    Attributes:
        failed_rank: the rank that failed.
        traceback: the traceback of that rank, as Python prints it; the last part of this error's text.
    """

    failed_rank: int | None = UNKNOWN_RANK
    traceback: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.traceback.rstrip()}" if self.traceback else super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        return *super().__reduce__(), {"traceback": self.traceback, "failed_rank": self.failed_rank}


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class OffloadError(AccelerateError, RuntimeError):
    """A weight that is offloaded cannot be read or changed as asked."""


class LaunchError(AccelerateError, RuntimeError):
    """A job cannot be started, or one of its ranks failed."""


class RankError(LaunchError):
    """A rank failed, or the job was stopped by a signal.

    Attributes:
        code: what the launcher exits with: the first failing rank's code, 128 + n for signal n.
        others: one line per way in which other ranks ended.
        traceback: what the first failing rank left; may be empty.
    """

    code: int = 1
    others: Sequence[str] = ()
    traceback: str = ""

    def format_text(self) -> str:
        """Return all of it, the traceback last."""
        reason = f"  why: {self.why}" if self.why else ""
        head = [f"accelerate launch: {line}" for line in (*self.others, self.what)]
        return "\n".join(part for part in (*head, reason, self.traceback.rstrip()) if part)


class MissingExtraError(AccelerateError, ImportError):
    """An optional package is needed.

    Args:
        package: the name to install with pip.
        need: the feature that needs it.
        why: a reason or condition of the package's own.
    """

    def __init__(self, package: str, need: str, why: str = "") -> None:
        super().__init__(f"{need} needs the package {package!r}", why=why, fix=f"pip install {package}")


class FeatureNotBuiltError(AccelerateError, NotImplementedError):
    """A promised name or feature that is not built yet; the reason says what is planned."""


# Of errors that end a process: each returns the error to show in place of one, or None.
EXPLANATIONS: list[Callable[[BaseException], AccelerateError | None]] = []


def explain_error(error: BaseException) -> BaseException:
    """Return the error to show in place of one that ends this process, with its traceback."""
    shown = next(filter(None, (explain(error) for explain in EXPLANATIONS)), error)
    return shown.with_traceback(error.__traceback__)


def trim_traceback(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback of an error without the frames of this package at its end.

    Only where the package raised it on purpose: then its text says all, and the last line of the program's
    own code is what its reader looks for. Any other error may be a fault of the package.
    """
    if not isinstance(error, AccelerateError):
        return trace
    kept: list[TracebackType] = []
    while trace is not None:
        kept.append(trace)
        trace = trace.tb_next
    while kept and _is_of_package(kept[-1].tb_frame):
        kept.pop()
    for each in reversed(kept):
        trace = type(each)(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def _is_of_package(frame: FrameType) -> bool:
    # The constructors that dataclasses generate have no file.
    name = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_filename.startswith(_PACKAGE_FOLDER) or name.startswith("accelerate.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, or the only one that it begins; None when none is near."""
    import difflib  # only for mistakes

    table = {choice.lower(): choice for choice in known}
    begun = [choice for choice in table if len(name) > 2 and choice.startswith(name.lower())]
    near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.6) or begun
    return table[near[0]] if len(near) == 1 else None


def list_first(names: Iterable[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")


def name_ranks(ranks: Iterable[int], shown: int = 8) -> str:
    """Return ``"rank 3"`` or ``"ranks 0-5, 8"``: of these ranges the first, and how many more there are."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return f"rank{'s' if sum(map(len, spans)) > 1 else ''} {list_first(names, shown)}"


# ---------------------------------------------------------------- warnings


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside of this package and of torch."""
    level, _ = _user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    warnings.warn(message, category, stacklevel=level + 1)


def user_line() -> str:
    """Return the innermost line outside of this package and of torch, as ``file.py:12``."""
    _, frame = _user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _user_frame(frame: FrameType) -> tuple[int, FrameType]:
    """Return (how many frames it is above ``frame``, counted from 1; the innermost frame of the user)."""
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level, frame
