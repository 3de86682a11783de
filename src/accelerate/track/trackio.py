"""trackio."""

from __future__ import annotations

from typing import Any

from accelerate.track.base import GeneralTracker, on_main_process, plain, scalars


class TrackioTracker(GeneralTracker):
    """A run of the project ``run_name``. Run here: trackio 0.43, its local database read back.

    Args:
        run_name: name of the project; the run's own name is the option ``name``.
        kwargs: options of ``trackio.init``.
    """

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False
    packages = ("trackio",)

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
        import trackio

        self.run: Any = trackio.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the configuration, nested as it is."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs whatever the library takes; ``kwargs`` go to ``Run.log``."""
        self.run.log(scalars(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Ends the run."""
        self.run.finish()


PLUGIN = TrackioTracker
