"""8-bit floats by MS-AMP: its recipe; training by it is refused: see ``MSAMP_REFUSAL``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.core.argument_checks import check_arguments
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.option_report import keep_requests
from accelerate.core.setting import declared_settings, describe_fields, load_fields
from accelerate.precision.recipes.fp8 import MSAMPOptions


@check_arguments
@describe_fields
@dataclass
class MSAMPRecipeKwargs(MSAMPOptions, KwargsHandler):
    """A recipe for MS-AMP.

    Raises:
        UnknownNameError: another level.
    """

    def __post_init__(self) -> None:
        keep_requests(self, load_fields(self, MSAMPOptions))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from MS-AMP's own defaults, also where a variable set them."""
        defaults = {row.field: row.fallback for row in declared_settings(MSAMPOptions)}
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}
