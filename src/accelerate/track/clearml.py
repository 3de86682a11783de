"""ClearML."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.track.base import (
    LibraryTracker,
    explain_missing_account,
    on_main_process,
    to_json_config,
    unwrap_scalars,
)
from accelerate.track.protocol.logged_values import LoggedTable, join_name, number_names

# Prefixes of names that are the series of a plot, as scripts write them: eval_loss is loss of "eval".
SERIES = ("eval", "test", "train")


class ClearMLTracker(LibraryTracker):
    """A task. Run here: clearml 2.1, offline mode, its file of metrics read back.

    A task that the script has opened itself is used, and left open at the end.

    Online: ``clearml-init``, or ``CLEARML_API_ACCESS_KEY``, ``CLEARML_API_SECRET_KEY`` and
        ``CLEARML_API_HOST``.
    Offline: ``CLEARML_OFFLINE_MODE=1``; ``clearml-task --import-offline-session FILE.zip`` sends the file
        later.
    Files: ``~/.clearml/cache/offline/TASK.zip``.
    Resume: ``init_kwargs={"clearml": {"continue_last_task": TASK_ID}}``; online only.

    Args:
        run_name: name of project and task, unless ``CLEARML_PROJECT`` and ``CLEARML_TASK`` say others.
        kwargs: options of ``Task.init``.
    """

    name = "clearml"
    packages: ClassVar[tuple[str, ...]] = ("clearml",)
    run_attribute = "task"
    user_provided_run_name: str | None

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name, self._initialized_externally = run_name, False

    @on_main_process
    def start(self) -> None:
        """Open the task, or take the one that is open.

        Raises:
            SettingError: there is no account.
        """
        self.task: Any = self._library.Task.current_task()
        self._initialized_externally = self.task is not None
        if self.task is None:
            names = {
                "project_name": environ.get("CLEARML_PROJECT", self.user_provided_run_name),
                "task_name": environ.get("CLEARML_TASK", self.user_provided_run_name),
            }
            fix = (
                "clearml-init, or export CLEARML_OFFLINE_MODE=1 to write a file that "
                "`clearml-task --import-offline-session` sends later"
            )
            with explain_missing_account("clearml", "not configured", fix):
                self.task = self._library.Task.init(**{**names, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, nested as it is."""
        self.task.connect_configuration(to_json_config(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers: ``eval_loss`` is the series eval of the plot loss; without a step, a single value.

        A dict of numbers is one plot, its keys are the series. Texts go to the console log of the task.
        ``kwargs`` go to the method that reports.
        """
        report = self.task.get_logger()
        for key, value in unwrap_scalars(values).items():
            rows = value if isinstance(value, dict) else {None: value}
            for inner, each in rows.items():
                title, series = self._get_title_series(key) if inner is None else (key, inner)
                name = key if inner is None else f"{key}/{inner}"
                if isinstance(each, str):
                    at = "" if step is None else f"step {step}, "
                    report.report_text(f"{at}{name}: {each}", print_console=False)
                elif not isinstance(each, int | float):
                    self.refuse(name, each)
                elif step is None:
                    report.report_single_value(name=name, value=each, **kwargs)
                else:
                    report.report_scalar(title=title, series=series, value=each, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, several as ``series_0``, ``series_1``; ``kwargs`` go to ``report_image``.

        Captions are left out.
        """
        report = self.task.get_logger()
        for key, value in values.items():
            title, series = self._get_title_series(key)
            for name, content in number_names(series, self.drop_captions(key, value), "_"):
                picture = {"local_path" if isinstance(content, str) else "image": content}
                report.report_image(title=title, series=name, iteration=step, **picture, **kwargs)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        title, series = self._get_title_series(name)
        rows = [table.columns, *table.rows]
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=rows, iteration=step, **kwargs
        )

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file as an artifact."""
        self.task.upload_artifact(
            join_name(artifact_path, local_path), artifact_object=os.path.abspath(local_path)
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task, unless the script opened it; one that failed is marked so."""
        if self._initialized_externally:
            return
        if self.failed:
            # After an error close() does not wait for what was reported, and loses it.
            self.task.flush(wait_for_uploads=True)
            self.task.mark_failed(status_reason="the script ended by an error")
        self.task.close()

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        """(plot, series) of a name."""
        for series in SERIES:
            if name.startswith(f"{series}_"):
                return name.removeprefix(f"{series}_"), series
        return name, "train"


PLUGIN = ClearMLTracker
