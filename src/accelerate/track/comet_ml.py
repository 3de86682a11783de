"""Comet."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.track.base import LibraryTracker, explain_missing_account, on_main_process, to_json_config
from accelerate.track.protocol.logged_values import LoggedTable, join_name, to_images, to_pil


class CometMLTracker(LibraryTracker):
    """An experiment of the project ``run_name``. Run here: comet_ml 3.58, offline, archive read back.

    Online: ``COMET_API_KEY``, or ``comet login``.
    Offline: ``COMET_START_ONLINE=false``, or ``init_kwargs={"comet_ml": {"online": False}}``;
        ``comet upload FILE.zip`` sends the file later.
    Files: ``EXPERIMENT-*.zip`` in the folder of ``COMET_OFFLINE_DIRECTORY``; one for each part of a
        resumed run.
    Resume: ``{"experiment_key": KEY, "mode": "get"}``, with
        ``get_tracker("comet_ml").tracker.get_key()``.

    Args:
        run_name: name of the project.
        kwargs: options of ``comet_ml.start``.
    """

    name = "comet_ml"
    packages: ClassVar[tuple[str, ...]] = ("comet_ml",)
    run_attribute = "writer"

    @on_main_process
    def start(self) -> None:
        """Begin the experiment.

        Raises:
            SettingError: there is no key of an account.
        """
        mode = environ.get("COMET_MODE")
        why = f"it knows no variable COMET_MODE (it is {mode!r})" if mode else ""
        fix = (
            "comet login, or export COMET_START_ONLINE=false to write a file that `comet upload` sends later"
        )
        with explain_missing_account("comet_ml", "API key", fix, why):
            self.writer: Any = self._library.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration; the library removes its nesting."""
        self.writer.log_parameters(to_json_config(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, dicts of numbers, and texts; ``kwargs`` go to the method that logs each."""
        experiment = self.writer
        if step is not None:
            experiment.set_step(step)
        self.log_by_kind(
            values,
            number=functools.partial(experiment.log_metric, step=step, **kwargs),
            mapping=lambda _, metrics: experiment.log_metrics(metrics, step=step, **kwargs),
            text=functools.partial(experiment.log_other, **kwargs),
        )

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, captions as their metadata; ``kwargs`` go to ``log_image``."""
        for key, value in values.items():
            for content, caption in to_images(key, value):
                options = {"metadata": {"caption": caption}, **kwargs} if caption else kwargs
                # Of an array it stretches the levels to the whole range.
                self.writer.log_image(to_pil(content), name=key, step=step, **options)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        """Log a table as a file ``name.csv``."""
        if step is not None:
            self.writer.set_step(step)
        self.writer.log_table(f"{name}.csv", tabular_data=table.rows, headers=table.columns, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file as an asset."""
        self.writer.log_asset(local_path, file_name=join_name(artifact_path, local_path))

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()


PLUGIN = CometMLTracker
