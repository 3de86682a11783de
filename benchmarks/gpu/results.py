"""What a run has given so far: one JSON file, written after each row, and one page of Markdown made of it."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import Sample
from benchmarks.gpu.rows import DeviceCase


class Results:
    """The rows of one run; those of an interrupted run of the same code on the same device are kept.

    Args:
        folder: where ``results.json`` and ``results.md`` are. Those of another code or device are renamed.
        key: what makes rows comparable: the digest of the ``code``, the device, its torch.
        about: facts about this run, one per line.
        cases: all rows, in their order.

    Attributes:
        not_reached: row -> why it has no result yet.
    """

    def __init__(
        self, folder: Path, key: Mapping[str, Any], about: Sequence[str], cases: Sequence[DeviceCase]
    ) -> None:
        self.json, self.markdown = folder / "results.json", folder / "results.md"
        self.key, self.about, self.cases = dict(key), list(about), cases
        self.rows: dict[str, dict[str, Any]] = {}
        self.not_reached: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self.json.exists():
            return
        before = json.loads(self.json.read_text(encoding="utf-8"))
        if before["key"] == self.key:
            self.rows = before["rows"]
            self.about = [*before["about"], f"continued at {datetime.datetime.now():%Y-%m-%d %H:%M}"]
        else:
            for path in (self.json, self.markdown):
                os.replace(path, path.with_stem(f"{path.stem}-{before['key']['code']}"))

    def get(self, name: str, subject: str) -> Sample | str | None:
        """What a subject gave for a row: a sample, why there is none, or None when it was not asked."""
        entry = self.rows.get(name, {}).get(subject)
        return entry if entry is None or isinstance(entry, str) else Sample(**entry)

    def put(self, name: str, subject: str, taken: Sample | str, seconds: float) -> None:
        """Keep what a subject gave for a row after ``seconds``."""
        row = self.rows.setdefault(name, {"seconds": {}})
        row[subject] = taken if isinstance(taken, str) else asdict(taken)
        row["seconds"][subject] = round(seconds, 1)

    def write(self) -> None:
        """Write both files; each is whole at any moment."""
        document = {"key": self.key, "about": self.about, "rows": self.rows, "not_reached": self.not_reached}
        _replace(self.markdown, self.page())
        _replace(self.json, json.dumps(document, indent=1) + "\n")

    def page(self) -> str:
        """The table, its notes, and the rows that were not reached."""
        text = report.section(self.table(), self.about)
        missing = "".join(f"- `{name}`: {why}\n" for name, why in self.not_reached.items())
        return f"{text}\n### Not reached\n\n{missing}" if missing else text

    def table(self) -> list[report.Row]:
        """The rows that were reached, as the reports of the benchmarks take them."""
        return [
            report.Row(case, _samples(ours), _samples(self.get(case.name, "peer")))
            for case in self.cases
            if (ours := self.get(case.name, "ours")) is not None
        ]


def _samples(taken: Sample | str | None) -> list[Sample] | str:
    return [taken] if isinstance(taken, Sample) else taken or ""


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
