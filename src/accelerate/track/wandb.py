"""Weights & Biases."""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar

from accelerate.track.base import ProjectTracker, on_main_process, to_json_config
from accelerate.track.protocol.logged_values import join_name


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
    def log_artifact(self, local_path: Any, artifact_path: str | None = None) -> None:
        """Store a file in an artifact of its name, of the type ``file``; a ``wandb.Artifact`` as it is."""
        if not isinstance(local_path, str | os.PathLike):
            self.run.log_artifact(local_path)
            return
        name = join_name(artifact_path, os.fspath(local_path))
        artifact = self._library.Artifact(re.sub(r"[^\w.-]", "-", name), type="file")
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
