"""trackio."""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar

from accelerate.track.base import ProjectTracker, on_main_process
from accelerate.track.protocol.logged_values import is_own_object, join_name, number_names, to_images


class TrackioTracker(ProjectTracker):
    """A run of the project ``run_name``. Run here: trackio 0.43, its local database read back.

    Online: ``init_kwargs={"trackio": {"space_id": "user/space"}}``, after ``hf auth login``.
    Offline: without ``space_id``; ``trackio show`` shows the runs.
    Files: the folder of ``TRACKIO_DIR``, or ``trackio`` in the Hugging Face cache; one SQLite database
        per project.
    Resume: ``{"name": NAME, "resume": "must"}`` with the name of the first run; give the configuration again,
        since the library forgets that of the first run.

    Args:
        run_name: name of the project; the run's own name is the option ``name``.
        kwargs: options of ``trackio.init``.
    """

    name = "trackio"
    packages: ClassVar[tuple[str, ...]] = ("trackio",)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, several as ``name/0``, ``name/1``; ``kwargs`` go to the run's ``log``."""
        pictures: dict[str, Any] = {}
        for key, value in values.items():
            for name, (content, caption) in number_names(key, to_images(key, value)):
                is_own = is_own_object(self.name, content)
                pictures[name] = content if is_own else self._library.Image(content, caption=caption or None)
        self.run.log(pictures, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: Any, artifact_path: str | None = None) -> None:
        """Store a file as an artifact of its name, of the type ``file``; an artifact as it is."""
        if not isinstance(local_path, str | os.PathLike):
            self.run.log_artifact(local_path)
            return
        name = re.sub(r"[^\w.-]", "-", join_name(artifact_path, os.fspath(local_path)))
        self.run.log_artifact(local_path, name=name, type="file")


PLUGIN = TrackioTracker
