"""A plain text file: one line of JSON for each record. Needs no package."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import IO, Any

from accelerate.core.errors import SettingError
from accelerate.track.base import GeneralTracker, on_main_process, to_json_types


class JSONLTracker(GeneralTracker):
    """Appends to ``logging_dir/run_name.jsonl``. Run here: no package is needed.

    Each line is an object with ``time`` (seconds since 1970) and one of:

        {"start": run_name}          a run begins; several runs of one name follow each other
        {"config": {...}}            its hyperparameters
        {"step": n, "values": {...}} what was logged; ``step`` is null without one
        {"table": name, "columns": [...], "rows": [[...], ...], "step": n}
        {"end": "finished"}          or "failed"; a run that was killed has none

    A line is on its way to the disk when the call returns, so that a crash loses none. Numbers that JSON does
    not have are the texts "NaN", "Infinity" and "-Infinity", as in the JSON of protocol buffers.

    Args:
        run_name: name of the file; may contain folders.
        logging_dir: where it lies.
    """

    name = "jsonl"
    requires_logging_directory = True
    # Nobody has installed it, so a script that starts all trackers gets no files of it.
    in_all = False

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir, f"{run_name}.jsonl")
        self._file: IO[str] | None = None

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._write(start=self.run_name)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration; what JSON has no type for is written as text."""
        self._write(config=values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line.

        Raises:
            SettingError: there are ``kwargs``: a file has no options.
        """
        if kwargs:
            raise SettingError(f"log_kwargs of {self.name} are {kwargs}", why="a file takes no options")
        self._write(step=step, values=values)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write a table, given by its rows or as a data frame."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
        self._write(step=step, table=table_name, columns=columns or [], rows=data or [])

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._write(end="failed" if self.failed else "finished")
            self._file.close()
            self._file = None

    def _write(self, **record: Any) -> None:
        if self._file is None:
            raise SettingError(f"the run {self.run_name!r} is not open", fix="call start() first")
        line = json.dumps(_finite(to_json_types({"time": time.time(), **record})), allow_nan=False)
        self._file.write(f"{line}\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


PLUGIN = JSONLTracker
