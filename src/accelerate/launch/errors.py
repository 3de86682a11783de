"""The error of a launched job that failed."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.core.errors import LaunchError


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
        """All of it, the traceback last."""
        reason = f"  why: {self.why}" if self.why else ""
        head = [f"accelerate launch: {line}" for line in (*self.others, self.what)]
        return "\n".join(part for part in (*head, reason, self.traceback.rstrip()) if part)
