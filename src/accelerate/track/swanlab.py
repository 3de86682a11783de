"""SwanLab."""

from __future__ import annotations

from typing import Any

from accelerate.track.base import ProjectTracker, on_main_process


class SwanLabTracker(ProjectTracker):
    """A run of the project ``run_name``. Run here: swanlab 0.10, ``mode="offline"``; its file is not parsed.

    Args:
        run_name: name of the project; the run's own name is the option ``experiment_name`` or ``name``.
        kwargs: options of ``swanlab.init``.
    """

    name = "swanlab"
    packages = ("swanlab",)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images: arrays, PIL images, paths."""
        import swanlab

        images = {key: [swanlab.Image(image) for image in pictures] for key, pictures in values.items()}
        self.run.log(images, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run; one that failed is marked so."""
        if self.failed:
            self.run.finish(state="crashed", error="the script ended by an error")
        else:
            self.run.finish()


PLUGIN = SwanLabTracker
