"""The check protocol: a function that tests one thing on every rank and returns its result as one line."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from accelerate.facade.accelerator import Accelerator

# Runs on all ranks and returns a line of text. Raises ``CheckNotApplicableError`` where it does not apply,
# ``CheckFailedError`` or any other error where it fails.
Check = Callable[[Accelerator], str]


class CheckFailedError(AssertionError):
    """A result is not the expected one."""


class CheckNotApplicableError(Exception):
    """A check does not apply to this set-up; the text says why."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check on one rank.

    Attributes:
        result: ``"ok"``, ``"failed"`` or ``"skipped"``.
        text: the result, the failure, or the reason for skipping: one line.
        trace: the traceback of a failure.
    """

    result: Literal["ok", "failed", "skipped"]
    text: str
    trace: str = ""

    def to_json(self) -> str:
        """Return the outcome as JSON, for another rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CheckOutcome:
        """Return the outcome of a text of ``to_json``."""
        return CheckOutcome(**json.loads(text))


def run_check(check: Check, accelerator: Accelerator) -> CheckOutcome:
    """Run a check and return its outcome; an error becomes the outcome "failed"."""
    try:
        return CheckOutcome("ok", check(accelerator))
    except CheckNotApplicableError as why:
        return CheckOutcome("skipped", str(why))
    except Exception as error:  # noqa: BLE001 (every error is shown with its rank)
        first = (str(error).splitlines() or [""])[0]
        text = first if isinstance(error, CheckFailedError) else f"{type(error).__name__}: {first}"
        return CheckOutcome("failed", text, traceback.format_exc())


def expect(condition: bool, message: str) -> None:
    """Raise CheckFailedError with ``message`` unless ``condition`` holds.

    Raises:
        CheckFailedError: the condition does not hold.
    """
    if not condition:
        raise CheckFailedError(message)


def expect_equal(actual: Any, expected: Any, label: str) -> None:
    """Raise CheckFailedError unless two plain values are equal.

    Raises:
        CheckFailedError: they differ; both are shown.
    """
    expect(actual == expected, f"{label} is {actual}, not {expected}")
