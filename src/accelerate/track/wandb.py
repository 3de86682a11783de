"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accelerate.track.base import ProjectTracker, on_main_process, to_json_types


class WandBTracker(ProjectTracker):
    """A run of the project ``run_name``. Run here: wandb 0.31, ``WANDB_MODE=offline``, its file read back.

    Args:
        run_name: name of the project; the run's own name is the option ``name``.
        kwargs: options of ``wandb.init``.
    """

    name = "wandb"
    packages = ("wandb",)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, nested as it is."""
        self.run.config.update(to_json_types(values), allow_val_change=True)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images: arrays, PIL images, paths."""
        import wandb

        images = {key: [wandb.Image(image) for image in pictures] for key, pictures in values.items()}
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
        """Log a table, given by its rows or as a data frame."""
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run; one that failed is marked so."""
        if self.failed:
            self.run.finish(exit_code=1)
        else:
            self.run.finish()


PLUGIN = WandBTracker
