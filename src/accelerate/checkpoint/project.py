"""The folders of a project and the names of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.core.errors import SettingError


@dataclass
class ProjectConfiguration:
    """Folders of a project and the naming of its checkpoints.

    Attributes:
        project_dir: where everything of the project goes.
        logging_dir: where trackers log; ``project_dir`` when None.
        automatic_checkpoint_naming: ``save_state`` writes ``project_dir/checkpoints/checkpoint_<iteration>``.
        total_limit: how many of these to keep; the oldest go after a newer one is committed. None keeps all.
        iteration: number of the next one; ``load_state`` sets it so that numbering continues.
        save_on_each_node: each machine writes a whole checkpoint to a disk of its own; for folders that the
            machines do not share.
        async_save: ``save_state`` copies the state and returns; the copy is written while training goes on.

    Raises:
        SettingError: ``total_limit`` is below 1.
    """

    project_dir: str = None  # type: ignore[assignment]  # the public signature
    logging_dir: str = None  # type: ignore[assignment]
    automatic_checkpoint_naming: bool = False
    total_limit: int = None  # type: ignore[assignment]
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` if it has none yet."""
        self.project_dir = project_dir  # type: ignore[assignment]
        if self.logging_dir is None:
            self.logging_dir = project_dir  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise SettingError(
                f"total_limit is {self.total_limit}, but the newest checkpoint is always kept",
                fix="use 1 or more, or None to keep all",
            )
        self.set_directories(self.project_dir)
