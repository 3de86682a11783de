"""Settings of the ``Accelerator`` that the launcher reads and hands on. Imports no torch."""

from __future__ import annotations

from typing import Literal

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting
from accelerate.core.value_types import PositiveInt

AUTO = "auto"


@frozen_dataclass
class GradientAccumulationSettings:
    """The settings of gradient accumulation."""

    __topic__ = "Training"

    gradient_accumulation_steps: PositiveInt = setting(1, help="micro-batches per optimizer step")


@frozen_dataclass
class ResumeSettings:
    """The checkpoint that a training resumes from."""

    __topic__ = "Training"

    resume: str | None = setting(
        None,
        help="what the script finds in accelerator.resume_from: 'auto' is the newest complete checkpoint of "
        "its project, nothing on a first start; or a checkpoint, or a folder of them",
    )


@frozen_dataclass
class OptionReportSettings:
    """The settings of the report on requested options, printed after ``prepare``."""

    __topic__ = "Output"

    strict: bool = setting(
        False, help="raise an error, instead of a warning, when a requested option cannot be applied"
    )
    effects: Literal["line", "table", "none"] | None = setting(
        None,
        help="how to report on stderr which requested options were applied; by default a strict run prints a "
        "line, any other nothing: an option that cannot be applied is a warning",
    )
    explain: bool = setting(
        False, help="print a table of the requested options: which were applied, and why others were not"
    )
