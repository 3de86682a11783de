"""MLflow."""

from __future__ import annotations

import json
import os
import posixpath
import re
from itertools import islice
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.track.base import LibraryTracker, flatten_config, on_main_process
from accelerate.track.protocol.logged_values import LoggedTable, flatten_mappings, to_array

# A server takes no more parameters in one request (mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH).
BATCH = 100
# Names that a server takes; one other name would cost all metrics of its request. They are also paths in
# normal form: path_not_unique and MAX_ENTITY_KEY_LENGTH of mlflow.utils.validation.
NAMES = re.compile(r"[/\w.\- :]{1,250}")


class MLflowTracker(LibraryTracker):
    """A run of an experiment. Run here: mlflow 3.17, SQLite store, read back with its client.

    Variables win over arguments, so that a job's environment decides where it is logged:
    ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` (JSON), ``MLFLOW_NESTED_RUN``.

    Online: ``MLFLOW_TRACKING_URI=https://host``.
    Offline: ``MLFLOW_TRACKING_URI=sqlite:///mlflow.db``; MLflow 3 takes folders of files only with
        ``MLFLOW_ALLOW_FILE_STORE=true``.
    Files: the database; stored files in ``mlruns``, or in ``logging_dir`` of a new experiment.
    Resume: ``init_kwargs={"mlflow": {"run_id": RUN_ID}}``, or ``MLFLOW_RUN_ID``.

    Args:
        experiment_name: the experiment; made if it does not exist.
        logging_dir: where the artifacts of a new experiment go.
        run_id: continues this run.
        tags: of the run, and of a new experiment; a dict, or JSON.
        nested_run: make it a child of the run that is active.
        run_name: the run's name.
        description: the run's description.

    Raises:
        SettingError: the tags are not a JSON object.
    """

    name = "mlflow"
    packages: ClassVar[tuple[str, ...]] = ("mlflow",)
    run_attribute = "active_run"
    experiment_name: str | None
    run_id: str | None
    nested_run: bool
    description: str | None

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        self.experiment_name = environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = environ.get("MLFLOW_RUN_ID", run_id)
        tags = environ.get("MLFLOW_TAGS") or tags
        self.tags: dict[str, Any] | None = _parse_tags(tags) if isinstance(tags, str) else tags
        nested = environ.get("MLFLOW_NESTED_RUN") or nested_run
        self.nested_run = (
            environ.parse_bool(nested, where="nested_run") if isinstance(nested, str) else bool(nested)
        )
        self.description = description

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        existing: Any = self._library.get_experiment_by_name(self.experiment_name)
        if existing is not None:
            experiment: Any = existing.experiment_id
        else:
            location = None if self.logging_dir is None else str(self.logging_dir)
            experiment = self._library.create_experiment(
                name=self.experiment_name, artifact_location=location, tags=self.tags
            )
        self.active_run: Any = self._library.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters, without nesting, in batches that a server takes."""
        rows = iter(flatten_config(values).items())
        while batch := dict(islice(rows, BATCH)):
            self._library.log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, dicts of them as ``name/key``, and texts as tags of the run.

        ``kwargs`` go to ``log_metrics``. A name that the library refuses is left out, and said.
        """
        metrics: dict[str, Any] = {}
        flat = flatten_mappings(values)
        named = {key: value for key, value in flat.items() if _is_name(key)}
        for key in flat.keys() - named.keys():
            names = "paths as train/loss of up to 250 letters, digits and _ - . : / and spaces"
            self._warn_once(key, f"mlflow cannot log {key!r}: its names are {names}; it is left out")
        self.log_by_kind(named, number=metrics.__setitem__, text=self._library.set_tag)
        self._library.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; ``kwargs`` go to ``log_image``. Captions are left out."""
        for key, value in values.items():
            for content in self.drop_captions(key, value):
                picture = to_array(content) if isinstance(content, str) else content
                self._library.log_image(picture, key=key, step=step, **kwargs)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        """Store a table as ``name.json``, at a step as ``name-step.json``."""
        rows = {column: [row[number] for row in table.rows] for number, column in enumerate(table.columns)}
        file = f"{name}.json" if step is None else f"{name}-{step}.json"
        self._library.log_table(rows, artifact_file=file, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly as ``artifact_file``, saved with ``save_kwargs``."""
        options = {"save_kwargs": save_kwargs} if save_kwargs else {}
        self._library.log_figure(figure=figure, artifact_file=artifact_file, **options)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file, in the folder ``artifact_path`` of the run."""
        self._library.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store what a folder holds, in the folder ``artifact_path`` of the run."""
        self._library.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run; one that failed is marked so."""
        if self.failed:
            self._library.end_run(status="FAILED")
        else:
            self._library.end_run()


def _is_name(key: str) -> bool:
    outside = key == "." or key.startswith(("/", ".."))
    return NAMES.fullmatch(key) is not None and posixpath.normpath(key) == key and not outside


def _parse_tags(text: str) -> dict[str, Any]:
    try:
        tags = json.loads(text)
    except json.JSONDecodeError:
        tags = None
    if not isinstance(tags, dict):
        raise SettingError(f"the tags {text!r} are no JSON object", fix='write them as {"name": "value"}')
    return tags


PLUGIN = MLflowTracker
