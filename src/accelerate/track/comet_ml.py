"""Comet."""

from __future__ import annotations

import functools
from typing import Any

from accelerate.track.base import GeneralTracker, on_main_process, to_json_types


class CometMLTracker(GeneralTracker):
    """An experiment of the project ``run_name``. Run here: comet_ml 3.58, offline, archive read back.

    Args:
        run_name: name of the project.
        kwargs: options of ``comet_ml.start``.
    """

    name = "comet_ml"
    requires_logging_directory = False
    packages = ("comet_ml",)

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        import comet_ml

        self.writer: Any = comet_ml.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration; the library removes its nesting."""
        self.writer.log_parameters(to_json_types(values))

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
        """Log lists of images: arrays, PIL images, paths; ``kwargs`` go to ``log_image``."""
        for key, images in values.items():
            for image in images:
                self.writer.log_image(image, name=key, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()


PLUGIN = CometMLTracker
