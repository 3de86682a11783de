"""SwanLab."""

from __future__ import annotations

from typing import Any

from accelerate.track.base import GeneralTracker, on_main_process, plain, scalars


class SwanLabTracker(GeneralTracker):
    """A run of the project ``run_name``. Run here: swanlab 0.10, ``mode="offline"``; its file is not parsed.

    Args:
        run_name: name of the project; the run's own name is the option ``experiment_name`` or ``name``.
        kwargs: options of ``swanlab.init``.
    """

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False
    packages = ("swanlab",)

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begins the run."""
        import swanlab

        self.run: Any = swanlab.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the configuration, nested as it is."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs whatever the library takes; ``kwargs`` go to ``Run.log``."""
        self.run.log(scalars(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists of images: arrays, PIL images, paths."""
        import swanlab

        images = {key: [swanlab.Image(image) for image in given] for key, given in values.items()}
        self.run.log(images, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Ends the run; one that failed is marked so."""
        if self.failed:
            self.run.finish(state="crashed", error="the script ended by an error")
        else:
            self.run.finish()


PLUGIN = SwanLabTracker
