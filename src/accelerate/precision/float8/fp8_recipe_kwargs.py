"""The older recipe class, for TransformerEngine or MS-AMP."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.core import packages
from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import UnknownNameError
from accelerate.core.setting import load_settings
from accelerate.core.user_warning import warn_user
from accelerate.precision.float8.msamp import MSAMPRecipeKwargs
from accelerate.precision.float8.transformer_engine import TERecipeKwargs
from accelerate.precision.recipes.fp8 import FP8Settings


@check_arguments
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipe of either library in one class; deprecated for the classes above.

    Attributes:
        backend: ``TE`` or ``MSAMP``; None takes ``ACCELERATE_FP8_BACKEND``, then the one installed.

    Raises:
        UnknownNameError: another library.
        MissingExtraError: the library is not installed.
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        warn_user(
            "FP8RecipeKwargs is deprecated: use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs",
            FutureWarning,
        )
        backend = load_settings(FP8Settings, code={"fp8_backend": self.backend}).value.backend
        if backend is None:
            backend = "MSAMP" if packages.is_installed("msamp") else "TE"
        if backend not in ("MSAMP", "TE"):
            raise UnknownNameError("value of backend", str(backend), ("MSAMP", "TE"))
        self.backend = backend
        if self.backend == "TE":
            TERecipeKwargs.__post_init__(self)
        else:
            MSAMPRecipeKwargs.__post_init__(self)
