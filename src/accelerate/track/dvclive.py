"""DVCLive."""

from __future__ import annotations

import functools
import os
import re
from typing import Any, ClassVar

from accelerate.track.base import LibraryTracker, on_main_process, to_json_config
from accelerate.track.protocol.logged_values import flatten_mappings, join_name, number_names

# Endings of files that the library, or its Pillow, writes.
_FORMATS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp")


class DVCLiveTracker(LibraryTracker):
    """Metrics in the folder ``dvclive``. Run here: dvclive 3.49, its files read back.

    Online: nothing is sent. In a Git repository with DVC a run is an experiment, which ``dvc exp push``
        sends.
    Offline: outside of one, ``init_kwargs={"dvclive": {"save_dvc_exp": False}}``.
    Files: ``dvclive`` in the working folder, or ``{"dir": FOLDER}``: TSV, JSON, YAML and PNG.
    Resume: ``init_kwargs={"dvclive": {"resume": True}}`` with the same folder.

    Args:
        run_name: not used: a folder holds one run.
        live: a ``dvclive.Live`` that is there already.
        kwargs: options of ``dvclive.Live``.
    """

    name = "dvclive"
    packages: ClassVar[tuple[str, ...]] = ("dvclive",)
    run_attribute = "live"
    live: Any

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    @on_main_process
    def start(self) -> None:
        """Open the folder."""
        self.live = self.live if self.live is not None else self._library.Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration, nested as it is."""
        self.tracker.log_params(to_json_config(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts, and dicts of them as ``name/key``; then the step is over.

        ``kwargs`` go to ``log_metric``.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        metric = functools.partial(live.log_metric, **kwargs)
        self.log_by_kind(flatten_mappings(values), number=metric, text=metric)
        live.next_step()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images, several as ``name/0.png``, ``name/1.png``. Captions are left out.

        The name is the file's name; it becomes a PNG unless the name ends in another format.

        Raises:
            SettingError: there are ``kwargs``: the library has no options.
        """
        self.refuse_options("log_images", kwargs)
        if step is not None:
            self.tracker.step = step
        for key, value in values.items():
            stem, ending = os.path.splitext(key)
            if ending.lower() not in _FORMATS:
                stem, ending = key, ".png"
            for name, content in number_names(stem, self.drop_captions(key, value)):
                self.tracker.log_image(f"{name}{ending}", content)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file, which stays where it is; the library refuses it outside of a DVC repository."""
        name = re.sub(r"[^\w-]", "-", join_name(artifact_path, local_path))
        self.tracker.log_artifact(local_path, name=name)

    @on_main_process
    def finish(self) -> None:
        """Write the summary."""
        self.tracker.end()


PLUGIN = DVCLiveTracker
