"""A plain text file: one line of JSON for each record. Needs no package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate.track.base import GeneralTracker, on_main_process, runs_here, to_json_config
from accelerate.track.protocol.json_lines import JSONLinesFile
from accelerate.track.protocol.logged_values import LoggedTable


class JSONLTracker(GeneralTracker):
    """Appends to ``logging_dir/run_name.jsonl``. Run here: no package is needed.

    Each line is an object with ``time`` (seconds since 1970) and one of:

        {"start": run_name}          a run begins; several runs of one name follow each other
        {"config": {...}}            its hyperparameters
        {"step": n, "values": {...}} what was logged; ``step`` is null without one
        {"table": name, "columns": [...], "rows": [[...], ...], "step": n}
        {"artifact": path, "bytes": n, "folder": name}   a file, which stays where it is
        {"end": "finished"}          or "failed"; a run that was killed has none

    A line is given to the system when the call returns, by one write, so that a crash loses none. The
    numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity", as protocol buffers write
    them. While another run writes the file, a run takes ``run_name-2.jsonl``, and says so.

    Online: nothing is sent.
    Offline: always.
    Files: ``logging_dir/run_name.jsonl``.
    Resume: a run of the same name appends.

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
        self._file = JSONLinesFile(Path(logging_dir, f"{run_name}.jsonl"))

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._file.path

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Open the file.

        Raises:
            TrackerFileError: it cannot be made.
        """
        self._file.open()
        self._file.write(start=self.run_name)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration; what JSON has no type for is written as text."""
        self._file.write(config=to_json_config(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line.

        Raises:
            SettingError: there are ``kwargs``: a file has no options.
            TrackerFileError: the disk is full, or gone. The lines before stay whole.
        """
        if runs_here(self):
            if kwargs:
                self.refuse_options("log", kwargs)
            self._file.write(step=step, values=values)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        self.refuse_options("log_table", kwargs)  # a file has none
        self._file.write(step=step, table=name, columns=table.columns, rows=table.rows)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Write the path and the size of a file, which is not copied."""
        path = os.path.abspath(local_path)
        self._file.write(artifact=path, bytes=os.path.getsize(path), folder=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if not self._file.is_open:
            return
        try:
            self._file.write(end="failed" if self.failed else "finished")
        finally:
            self._file.close()


PLUGIN = JSONLTracker
