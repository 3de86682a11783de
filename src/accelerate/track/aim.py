"""Aim."""

from __future__ import annotations

import os
from typing import Any

from accelerate.track.base import GeneralTracker, on_main_process, to_json_types, unwrap_scalars


class AimTracker(GeneralTracker):
    """A run in the repository of ``logging_dir``. Run here: aim 3.28, read back with its own SDK.

    Args:
        run_name: name of the run.
        logging_dir: where the repository lies.
        kwargs: options of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True
    packages = ("aim",)

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name, self.aim_repo_path, self.init_kwargs = run_name, logging_dir, kwargs

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import aim

        self.writer: Any = aim.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as ``hparams``; what the library cannot store is stored as text."""
        self.writer["hparams"] = to_json_types(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and dicts of them as ``name/key``; ``kwargs`` go to ``Run.track``."""
        for key, value in unwrap_scalars(values).items():
            if isinstance(value, dict):
                self.log({f"{key}/{inner}": each for inner, each in value.items()}, step, **kwargs)
            elif value is None:
                self.refuse(key, value)
            elif isinstance(value, str):
                import aim

                self.writer.track(aim.Text(value), name=key, step=step, **kwargs)
            else:
                self.writer.track(value, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images, each alone or as ``(image, caption)``.

        Args:
            values: name -> image: an array, a PIL image, a path.
            step: of all of them.
            kwargs: options of ``aim.Image`` under ``"aim_image"``, of ``Run.track`` under ``"track"``.
        """
        import aim

        options = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(picture, name=key, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()


PLUGIN = AimTracker
