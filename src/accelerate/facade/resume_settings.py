"""The setting of ``accelerate launch --resume``: the checkpoint to resume from."""

from __future__ import annotations

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting

AUTO = "auto"


@frozen_dataclass
class ResumeSettings:
    """The checkpoint that a training resumes from."""

    __topic__ = "Training"

    resume: str | None = setting(
        None,
        help="what the script finds in accelerator.resume_from: 'auto' is the newest complete checkpoint of "
        "its project, nothing on a first start; or a checkpoint, or a folder of them",
    )
