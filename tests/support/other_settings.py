"""A way of training that another package brings: its switch and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.core.setting import setting


@dataclass(frozen=True)
class OtherSwitch:
    """A second way of training."""

    __distributed_type__: ClassVar[str] = "OTHER"

    use_other: bool = setting(False, in_file=False, help="train in another way")


@dataclass(frozen=True)
class OtherSettings:
    """Its options."""

    __switch__: ClassVar[str] = "use_other"
    __section__: ClassVar[str] = "other_config"

    other_speed: int = setting(1, help="how fast")
