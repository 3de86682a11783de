"""trackio."""

from __future__ import annotations

from accelerate.track.base import ProjectTracker


class TrackioTracker(ProjectTracker):
    """A run of the project ``run_name``. Run here: trackio 0.43, its local database read back.

    Args:
        run_name: name of the project; the run's own name is the option ``name``.
        kwargs: options of ``trackio.init``.
    """

    name = "trackio"
    packages = ("trackio",)


PLUGIN = TrackioTracker
