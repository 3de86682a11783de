"""DVCLive."""

from __future__ import annotations

import os
from typing import Any

from accelerate.track.base import GeneralTracker, on_main_process, to_json_types, unwrap_scalars


class DVCLiveTracker(GeneralTracker):
    """Metrics in the folder ``dvclive``. Run here: dvclive 3.49, its files read back.

    Args:
        run_name: not used: a folder holds one run.
        live: a ``dvclive.Live`` that is there already.
        kwargs: options of ``dvclive.Live``.
    """

    name = "dvclive"
    requires_logging_directory = False
    packages = ("dvclive",)

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.live, self.init_kwargs = live, kwargs

    @property
    def tracker(self) -> Any:
        """The ``Live``."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Open the folder."""
        from dvclive import Live

        self.live = self.live if self.live is not None else Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration, nested as it is."""
        self.tracker.log_params(to_json_types(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts, and dicts of them as ``name/key``; then the step is over.

        ``kwargs`` go to ``log_metric``.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        self._metrics(unwrap_scalars(values), kwargs)
        live.next_step()

    def _metrics(self, values: dict[str, Any], options: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                self._metrics({f"{key}/{inner}": each for inner, each in value.items()}, options)
            elif isinstance(value, int | float | str):
                self.tracker.log_metric(key, value, **options)
            else:
                self.refuse(key, value)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write images, each an array, a PIL image, a figure or a path.

        The name is the file's name; it becomes a PNG unless the name ends in another format.
        """
        if step is not None:
            self.tracker.step = step
        for key, image in values.items():
            self.tracker.log_image(key if os.path.splitext(key)[1] else f"{key}.png", image)

    @on_main_process
    def finish(self) -> None:
        """Write the summary."""
        self.tracker.end()


PLUGIN = DVCLiveTracker
