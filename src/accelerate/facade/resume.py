"""``accelerate launch --resume``: which checkpoint a script is to go on from."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.core.setting import setting

AUTO = "auto"


@dataclass(frozen=True)
class ResumeSettings:
    """Where a training goes on."""

    __topic__ = "Training"

    resume: str | None = setting(
        None,
        help="what the script finds in accelerator.resume_from: 'auto' is the newest complete checkpoint of "
        "its project, nothing on a first start; or a checkpoint, or a folder of them",
    )
