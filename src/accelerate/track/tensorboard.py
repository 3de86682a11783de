"""TensorBoard event files, by torch's writer."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import yaml

from accelerate.core import packages
from accelerate.track.base import (
    GeneralTracker,
    flatten_config,
    on_main_process,
    to_json_types,
)


class TensorBoardTracker(GeneralTracker):
    """Event files in ``logging_dir/run_name``. Run here: tensorboard 2.21, read back with its own reader.

    Args:
        run_name: name of the folder.
        logging_dir: where it lies.
        kwargs: options of ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    packages = ("tensorboard", "tensorboardX")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.logging_dir_param, self.init_kwargs = run_name, logging_dir, kwargs
        self.logging_dir = os.path.join(logging_dir, run_name)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        if packages.is_installed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        else:
            from tensorboardX import SummaryWriter
        self.writer: Any = SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters, without nesting, and as it is in ``hparams.yml``."""
        nested = yaml.safe_dump(to_json_types(values))
        path = Path(self.logging_dir, str(time.time()), "hparams.yml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nested, encoding="utf-8")
        self.writer.add_hparams(flatten_config(values), metric_dict={})
        self.writer.flush()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts, and dicts of numbers; ``kwargs`` go to ``add_scalar`` and similar methods."""
        board, options = self.writer, {"global_step": step, **kwargs}
        self.log_by_kind(
            values,
            number=functools.partial(board.add_scalar, **options),
            mapping=functools.partial(board.add_scalars, **options),
            text=functools.partial(board.add_text, **options),
        )
        board.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images, ``(n, 3, height, width)`` unless ``dataformats="NHWC"`` is given."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


PLUGIN = TensorBoardTracker
