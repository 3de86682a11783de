"""``accelerate launch --resume``: which checkpoint a script is to go on from."""

from __future__ import annotations

from accelerate.core.frozen import frozen
from accelerate.core.setting import setting

AUTO = "auto"


@frozen
class ResumeSettings:
    """Where a training goes on."""

    __topic__ = "Training"

    resume: str | None = setting(
        None,
        help="what the script finds in accelerator.resume_from: 'auto' is the newest complete checkpoint of "
        "its project, nothing on a first start; or a checkpoint, or a folder of them",
    )
