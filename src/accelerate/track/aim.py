"""Aim."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, ClassVar

from accelerate.track.base import LibraryTracker, on_main_process, to_json_config
from accelerate.track.protocol.logged_values import (
    flatten_mappings,
    is_own_object,
    join_name,
    to_images,
    to_pil,
)


class AimTracker(LibraryTracker):
    """A run in the repository of ``logging_dir``. Run here: aim 3.28, read back with its own SDK.

    Online: a server's repository as ``logging_dir``, ``aim://host:53800``.
    Offline: any other ``logging_dir``. aim 3.29 was seen to read back nothing of what it had written:
        take 3.28.
    Files: ``.aim`` in ``logging_dir``, stored files in ``artifacts`` beside it; ``aim up --repo logs``
        shows them.
    Resume: ``init_kwargs={"aim": {"run_hash": HASH}}``, with ``get_tracker("aim").tracker.hash`` of the
        first run.

    Args:
        run_name: name of the run.
        logging_dir: where the repository lies.
        kwargs: options of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True
    packages: ClassVar[tuple[str, ...]] = ("aim",)
    run_attribute = "writer"
    aim_repo_path: str | os.PathLike[str] | None

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        self.writer: Any = self._library.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as ``hparams``; what the library cannot store is stored as text."""
        self.writer["hparams"] = to_json_config(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts, the library's own objects, lists of these, and dicts of them as ``name/key``.

        ``kwargs`` go to ``Run.track``.
        """
        track, others = functools.partial(self.writer.track, step=step, **kwargs), dict[str, Any]()
        for key, value in flatten_mappings(values).items():
            objects = value if isinstance(value, list | tuple) else [value]
            if objects and all(is_own_object(self.name, each) for each in objects):
                track(value, name=key)
            else:
                others[key] = value
        self.log_by_kind(
            others,
            number=lambda key, value: track(value, name=key),
            text=lambda key, value: track(self._library.Text(value), name=key),
        )

    @on_main_process
    def log_images(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images.

        Args:
            values: name -> an image or a list of them; ``protocol/logged_values.py`` says what is an image.
            step: of all of them.
            kwargs: options of ``aim.Image`` under ``"aim_image"``, of ``Run.track`` under ``"track"``.
        """
        image, options = self._library.Image, kwargs or {}
        for key, value in values.items():
            pictures = [
                content
                if is_own_object(self.name, content)
                else image(to_pil(content), caption=caption, **options.get("aim_image", {}))
                for content, caption in to_images(key, value)
            ]
            self.writer.track(pictures, name=key, step=step, **options.get("track", {}))

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file, in the folder ``artifacts`` of the repository unless the run has another place."""
        if not self.writer.artifacts_uri:
            self.writer.set_artifacts_uri(Path(self.aim_repo_path or ".", "artifacts").absolute().as_uri())
        self.writer.log_artifact(local_path, name=join_name(artifact_path, local_path), block=True)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()


PLUGIN = AimTracker
