"""What a check is: a function that looks at one thing on every process, and says in a line what it saw."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from accelerate.facade.accelerator import Accelerator

# Runs on all processes. Returns what it saw; raises ``WrongError``, or whatever goes wrong, or ``Skip``.
Check = Callable[[Accelerator], str]


class WrongError(AssertionError):
    """Something is not as it has to be."""


class Skip(Exception):  # noqa: N818 (no error: it ends a check that means nothing here)
    """A check means nothing in this set-up; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """How a check went on one process.

    Attributes:
        result: ``"ok"``, ``"failed"`` or ``"skipped"``.
        text: what was seen, what is wrong, or why it was left out: one line.
        trace: the traceback of what failed.
    """

    result: Literal["ok", "failed", "skipped"]
    text: str
    trace: str = ""

    def packed(self) -> str:
        """As text for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(text: str) -> Outcome:
        """The reverse of ``packed``."""
        return Outcome(**json.loads(text))


def tried(check: Check, accelerator: Accelerator) -> Outcome:
    """Runs a check here. What it raises is its outcome, and a failed one ends the run with code 1."""
    try:
        return Outcome("ok", check(accelerator))
    except Skip as why:
        return Outcome("skipped", str(why))
    except Exception as error:  # noqa: BLE001 (every error is shown with its rank, whatever it is)
        first = (str(error).splitlines() or [""])[0]
        text = first if isinstance(error, WrongError) else f"{type(error).__name__}: {first}"
        return Outcome("failed", text, traceback.format_exc())


def expect(right: bool, wrong: str) -> None:
    """Goes on if ``right``.

    Raises:
        WrongError: it is not; ``wrong`` says what was seen.
    """
    if not right:
        raise WrongError(wrong)


def equal(found: Any, wanted: Any, what: str) -> None:
    """Goes on if two plain values are equal.

    Raises:
        WrongError: they are not; both are shown.
    """
    expect(found == wanted, f"{what} is {found}, not {wanted}")
