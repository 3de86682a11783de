"""SwanLab."""

from __future__ import annotations

import glob
import os
from typing import Any, ClassVar

from accelerate.track.base import ProjectTracker, on_main_process, unwrap_scalars
from accelerate.track.protocol.logged_values import LoggedTable, flatten_mappings, is_own_object


class SwanLabTracker(ProjectTracker):
    """A run of the project ``run_name``. Run here: swanlab 0.10, offline, read back with its own reader.

    Online: ``swanlab login``, or ``SWANLAB_API_KEY``.
    Offline: ``init_kwargs={"swanlab": {"mode": "offline"}}``; ``swanlab sync FOLDER`` sends the folder
        later.
    Files: ``run-*`` in the folder of ``{"log_dir": FOLDER}``.
    Resume: ``{"id": ID, "resume": "must"}``, with ``get_tracker("swanlab").tracker.id`` of the first run.

    Args:
        run_name: name of the project; the run's own name is the option ``experiment_name`` or ``name``.
        kwargs: options of ``swanlab.init``.
    """

    name = "swanlab"
    packages: ClassVar[tuple[str, ...]] = ("swanlab",)
    missing_account: ClassVar[tuple[str, str] | None] = (
        "interactive login",
        "swanlab login, or export SWANLAB_MODE=offline to write files that `swanlab sync` sends later",
    )

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts, dicts of them as ``name/key``, and the library's own objects."""
        logged: dict[str, Any] = {}
        for key, value in flatten_mappings(unwrap_scalars(values)).items():
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(value, str):
                logged[key] = self._library.Text(value)
            elif isinstance(first, int | float) or is_own_object(self.name, first):
                logged[key] = value
            else:
                self.refuse(key, value)
        self.run.log(logged, step=step, **kwargs)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        chart = self._library.echarts.Table().add(table.columns, table.rows)
        self.run.log({name: chart}, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file under its own name; there are no folders."""
        if artifact_path:
            self.leave_out("folders of files")
        path = os.path.realpath(local_path)  # it leaves out what a link leads to
        base = os.path.dirname(path)
        while base != glob.escape(base):  # it takes a pattern, which lies below the folder by its letters
            base = os.path.dirname(base)
        self.run.save(glob.escape(path), base_path=base, policy="now")

    @on_main_process
    def finish(self) -> None:
        """End the run; one that failed is marked so."""
        if self.failed:
            self.run.finish(state="crashed", error="the script ended by an error")
        else:
            self.run.finish()


PLUGIN = SwanLabTracker
