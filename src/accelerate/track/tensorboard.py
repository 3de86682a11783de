"""TensorBoard event files, by torch's writer."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml

from accelerate.core import packages
from accelerate.track.base import LibraryTracker, flatten_config, on_main_process, to_json_config
from accelerate.track.protocol.logged_values import LoggedTable, to_array, to_markdown


class TensorBoardTracker(LibraryTracker):
    """Event files in ``logging_dir/run_name``. Run here: tensorboard 2.21, read back with its own reader.

    Online: nothing is sent.
    Offline: always; ``tensorboard --logdir logs`` shows the files.
    Files: ``logging_dir/run_name``, with the configuration as YAML in a folder below.
    Resume: a run of the same name adds an event file, and TensorBoard shows them as one.

    Args:
        run_name: name of the folder.
        logging_dir: where it lies.
        kwargs: options of ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    packages: ClassVar[tuple[str, ...]] = ("tensorboard", "tensorboardX")
    run_attribute = "writer"
    logging_dir_param: str | os.PathLike[str]
    logging_dir: str

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param, self.logging_dir = logging_dir, os.path.join(logging_dir, run_name)

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
        flat = flatten_config(values)
        nested = yaml.safe_dump(to_json_config(values))
        path = Path(self.logging_dir, str(time.time()), "hparams.yml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nested, encoding="utf-8")
        self.writer.add_hparams(flat, metric_dict={})
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
        """Log images: those of one size side by side under one name, others as ``name/0``, ``name/1``.

        Args:
            values: name -> an image or a list of them, or what ``dataformats`` says.
            step: of all of them.
            kwargs: options of ``add_images``; with ``dataformats`` it gets the values unchanged.
        """
        for key, value in values.items():
            if "dataformats" in kwargs:
                self.writer.add_images(key, value, global_step=step, **kwargs)
                continue
            arrays = [to_array(content) for content in self.drop_captions(key, value)]
            if len({array.shape for array in arrays}) == 1:
                batches = {key: np.stack(arrays)}
            else:
                batches = {f"{key}/{number}": array[None] for number, array in enumerate(arrays)}
            for name, batch in batches.items():
                self.writer.add_images(name, batch, global_step=step, dataformats="NHWC", **kwargs)
        self.writer.flush()

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        """Log a table as text in Markdown, which TensorBoard's page of texts shows as a table."""
        self.writer.add_text(name, to_markdown(table), global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


PLUGIN = TensorBoardTracker
