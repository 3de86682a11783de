"""The recipes of FP8 training: options of torchao, TransformerEngine and MS-AMP.

A field that is None takes its environment variable, then its default. The options that a launch can give are
declared in ``precision/recipes/fp8.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.core import packages
from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import MissingExtraError, SettingError, UnknownNameError
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.setting import describe_fields, load_fields, load_settings
from accelerate.core.user_warning import warn_user
from accelerate.precision.recipes.fp8 import AOOptions, FP8Settings, MSAMPOptions, TEOptions


@check_arguments
@describe_fields
@dataclass
class AORecipeKwargs(AOOptions, KwargsHandler):
    """A recipe for torchao.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``; None makes one from the other fields.
        module_filter_func: ``(module, name) -> bool`` says which linear layers are converted; None takes all
            but the first and the last.

    Raises:
        MissingExtraError: torchao is not installed.
        SettingError: ``config`` is given together with fields that would be put into it.
    """

    def __post_init__(self) -> None:
        if not packages.is_installed("torchao"):
            raise MissingExtraError("torchao", "AORecipeKwargs")
        if self.config is not None:
            if (self.pad_inner_dim, self.enable_fsdp_float8_all_gather) != (None, None):
                raise SettingError(
                    "config is given, and so are fields that belong into it", fix="set them in config"
                )
            return
        from torchao.float8 import Float8LinearConfig

        load_fields(self)
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@check_arguments
@describe_fields
@dataclass
class TERecipeKwargs(TEOptions, KwargsHandler):
    """A recipe for TransformerEngine (its ``DelayedScaling``).

    Raises:
        MissingExtraError: TransformerEngine is not installed.
        UnknownNameError: a format or algorithm that does not exist.
    """

    def __post_init__(self) -> None:
        if not packages.is_installed("transformer_engine"):
            raise MissingExtraError("transformer_engine", "TERecipeKwargs")
        load_fields(self, TEOptions)
        if self.override_linear_precision is None:
            settings = load_settings(FP8Settings).value
            self.override_linear_precision = (
                bool(settings.override_fprop),
                bool(settings.override_dgrad),
                bool(settings.override_wgrad),
            )


@check_arguments
@describe_fields
@dataclass
class MSAMPRecipeKwargs(MSAMPOptions, KwargsHandler):
    """A recipe for MS-AMP.

    Raises:
        UnknownNameError: another level.
    """

    def __post_init__(self) -> None:
        load_fields(self, MSAMPOptions)


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
