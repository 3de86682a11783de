"""What a run has measured so far, on disk after every sample: an interrupted run goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.case import ROOT, Case, Sample

FOLDER = ROOT / "benchmarks" / "unfinished"
MEASURED = ("src/accelerate", "benchmarks")


class Journal:
    """The samples of one run that is to be recorded, one line of JSON each; the first line describes the run.

    Args:
        path: the file; None keeps nothing.
        about: facts about this run. A run that goes on has those of the run it continues.
    """

    def __init__(self, path: Path | None, about: Sequence[str]) -> None:
        self.path = path
        self.about = list(about)
        self.known: dict[tuple[str, str, int], Sample | str] = {}
        if path is None:
            return
        if path.exists():
            self._read(path.read_text(encoding="utf-8"))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"about": self.about})

    def _read(self, text: str) -> None:
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the line that was being written when the run was killed
                continue
            if "about" in entry:
                self.about = entry["about"]
            else:
                key = entry["case"], entry["subject"], entry["turn"]
                self.known[key] = Sample(**entry["sample"]) if "sample" in entry else entry["failed"]
        # What follows a half-written line starts on a line of its own.
        if self.path is not None and not text.endswith("\n"):
            self._append("\n")

    def get(self, case: Case, subject: str, turn: int) -> Sample | str | None:
        """What this round of a subject gave, or None when it is still to be measured."""
        return self.known.get((case.title, subject, turn))

    def put(self, case: Case, subject: str, turn: int, taken: Sample | str) -> None:
        """Keeps a round: a sample, or why there is none."""
        self.known[case.title, subject, turn] = taken
        given = {"failed": taken} if isinstance(taken, str) else {"sample": asdict(taken)}
        self._write({"case": case.title, "subject": subject, "turn": turn, **given})

    def done(self) -> None:
        """The run is recorded: what was kept is not needed any more."""
        if self.path is not None:
            self.path.unlink()

    def _write(self, entry: dict[str, object]) -> None:
        self._append(json.dumps(entry) + "\n")

    def _append(self, text: str) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)


def digest_of_code(folders: Sequence[str] = MEASURED) -> str:
    """Twelve digits that change when a Python file of these folders does."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def path_for_this_code() -> Path:
    """Where a run of the code as it is now keeps its samples: other code, another file."""
    return FOLDER / f"{digest_of_code()}.jsonl"
