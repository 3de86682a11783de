"""The recipes of FP8 training: options of torchao, TransformerEngine and MS-AMP.

A field that is None takes its environment variable, then the default given beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.core import packages
from accelerate.core.errors import MissingExtraError, SettingError, UnknownNameError
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.setting import load_settings
from accelerate.precision.recipes.fp8 import FP8Settings


def _load_fp8_settings(**code: Any) -> FP8Settings:
    """Load the FP8 settings from the code, then from variables; a field not given is None.

    Raises:
        UnknownNameError: a choice that does not exist.
        SettingError: a value of the wrong type.
    """
    return load_settings(FP8Settings, code={f"fp8_{name}": value for name, value in code.items()}).value


def _default_if_none(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass
class AORecipeKwargs(KwargsHandler):
    """A recipe for torchao.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``; None makes one from the other fields.
        module_filter_func: ``(module, name) -> bool`` says which linear layers are converted; None takes all
            but the first and the last.
        pad_inner_dim: pad matrices to the sizes that the hardware needs (true).
        enable_fsdp_float8_all_gather: gather sharded weights in 8 bits (true).

    Raises:
        MissingExtraError: torchao is not installed.
        SettingError: ``config`` is given together with fields that would be put into it.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

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

        settings = _load_fp8_settings(
            pad_inner_dim=self.pad_inner_dim,
            enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
        )
        self.pad_inner_dim = _default_if_none(settings.fp8_pad_inner_dim, True)
        self.enable_fsdp_float8_all_gather = _default_if_none(
            settings.fp8_enable_fsdp_float8_all_gather, True
        )
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@dataclass
class TERecipeKwargs(KwargsHandler):
    """A recipe for TransformerEngine (its ``DelayedScaling``).

    Attributes:
        use_autocast_during_eval: compute in 8 bits also in evaluation (false).
        margin: of the scaling factor, a power of two (0).
        interval: steps between updates of the scaling factor (1).
        fp8_format: ``HYBRID`` (E4M3 forward, E5M2 backward), ``E4M3`` or ``E5M2``.
        amax_history_len: steps of the history of largest values (1024).
        amax_compute_algo: of that history take ``max`` or ``most_recent``.
        override_linear_precision: compute forward, data gradient, weight gradient in higher precision.
        use_mxfp8_block_scaling: a scaling factor per block instead of per tensor (false).

    Raises:
        MissingExtraError: TransformerEngine is not installed.
        UnknownNameError: a format or algorithm that does not exist.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        if not packages.is_installed("transformer_engine"):
            raise MissingExtraError("transformer_engine", "TERecipeKwargs")
        settings = _load_fp8_settings(
            use_autocast_during_eval=self.use_autocast_during_eval,
            margin=self.margin,
            interval=self.interval,
            format=self.fp8_format,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            use_mxfp8_block_scaling=self.use_mxfp8_block_scaling,
        )
        self.use_autocast_during_eval = _default_if_none(settings.fp8_use_autocast_during_eval, False)
        self.margin = _default_if_none(settings.fp8_margin, 0)
        self.interval = _default_if_none(settings.fp8_interval, 1)
        self.fp8_format = _default_if_none(settings.fp8_format, "HYBRID")
        self.amax_history_len = _default_if_none(settings.fp8_amax_history_len, 1024)
        self.amax_compute_algo = _default_if_none(settings.fp8_amax_compute_algo, "most_recent")
        if self.override_linear_precision is None:
            parts = (settings.fp8_override_fprop, settings.fp8_override_dgrad, settings.fp8_override_wgrad)
            self.override_linear_precision = tuple(map(bool, parts))  # type: ignore[assignment]
        self.use_mxfp8_block_scaling = _default_if_none(settings.fp8_use_mxfp8_block_scaling, False)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """A recipe for MS-AMP.

    Attributes:
        opt_level: ``O1`` (weights and gradients travel in 8 bits) or ``O2`` (optimizer state too).

    Raises:
        UnknownNameError: another level.
    """

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        self.opt_level = _default_if_none(_load_fp8_settings(opt_level=self.opt_level).fp8_opt_level, "O2")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipe of either library in one class; deprecated for the classes above.

    Attributes:
        backend: ``TE`` or ``MSAMP``; None takes ``ACCELERATE_FP8_BACKEND``, then the one installed.

    Raises:
        UnknownNameError: another library.
        MissingExtraError: the library is not installed.
    """

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is deprecated: use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs",
            FutureWarning,
            stacklevel=3,
        )
        default = "MSAMP" if packages.is_installed("msamp") else "TE"
        backend = _default_if_none(_load_fp8_settings(backend=self.backend).fp8_backend, default)
        if backend not in ("MSAMP", "TE"):
            raise UnknownNameError("value of backend", str(backend), ("MSAMP", "TE"))
        self.backend = backend
        if self.backend == "TE":
            TERecipeKwargs.__post_init__(self)
        else:
            MSAMPRecipeKwargs.__post_init__(self)
