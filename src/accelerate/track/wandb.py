"""Weights & Biases."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from accelerate.track.base import ProjectTracker, on_main_process, to_json_config
from accelerate.track.protocol.media import join_name, to_images, to_table


class WandBTracker(ProjectTracker):
    """A run of the project ``run_name``. Run here: wandb 0.31, ``WANDB_MODE=offline``, its file read back.

    Online: ``wandb login``, or ``WANDB_API_KEY``.
    Offline: ``WANDB_MODE=offline``, or ``init_kwargs={"wandb": {"mode": "offline"}}``; ``wandb sync
        FOLDER`` sends later.
    Files: ``wandb/offline-run-*`` in the working folder, or in that of ``{"dir": FOLDER}``.
    Resume: ``{"id": ID, "resume": "must"}``, with ``get_tracker("wandb").tracker.id``; offline, each part
        is a folder.

    Args:
        run_name: name of the project; the run's own name is the option ``name``.
        kwargs: options of ``wandb.init``.
    """

    name = "wandb"
    packages: ClassVar[tuple[str, ...]] = ("wandb",)
    missing_account: ClassVar[tuple[str, str] | None] = (
        "No API key",
        "wandb login, or export WANDB_MODE=offline to write files that `wandb sync` sends later",
    )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, nested as it is."""
        self.run.config.update(to_json_config(values), allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; ``kwargs`` go to the run's ``log``."""
        import wandb

        images = {
            key: [wandb.Image(content, caption=text or None) for content, text in to_images(key, value)]
            for key, value in values.items()
        }
        self.log(images, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; ``kwargs`` go to the run's ``log``."""
        import wandb

        table = to_table(table_name, columns, data, dataframe)
        self.log({table_name: wandb.Table(columns=table.columns, data=table.rows)}, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file in an artifact of its name, of the type ``file``."""
        import wandb

        name = join_name(artifact_path, local_path)
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), type="file")
        artifact.add_file(local_path, name=name)
        self.run.log_artifact(artifact)

    @on_main_process
    def finish(self) -> None:
        """End the run; one that failed is marked so."""
        if self.failed:
            self.run.finish(exit_code=1)
        else:
            self.run.finish()


PLUGIN = WandBTracker
