"""The options of 8-bit floats: fields of ``TERecipeKwargs`` and others, and settings of the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from accelerate.core import packages
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.core.setting import SettingOrigin, setting
from accelerate.core.value_types import PositiveInt, mutable_dataclass

Origins = Callable[[str], tuple[SettingOrigin, ...]]
BACKENDS = ("TE", "AO", "MSAMP", "NO")
# The package of each library, the one that is chosen first at the front.
PACKAGES = {"AO": "torchao", "TE": "transformer_engine"}
TENSORWISE = "tensorwise"
# Sources: its repository, msamp/common/utils/transformer_engine_wrapper.py, which the package imports at
# once; pull request 877 of TransformerEngine.
MSAMP_REFUSAL = (
    "no torch that is supported can import MS-AMP: it needs the module transformer_engine_extensions, which "
    "TransformerEngine has not had since 1.8 of 2024; it is no longer maintained, and no package index has it"
)
PARTS = ("fprop", "dgrad", "wgrad")
_TE, _AO, _MSAMP = ({"fp8_backend": (name,)} for name in ("TE", "AO", "MSAMP"))


def choose_backend(backend: str | None) -> str:
    """Return the library for 8-bit floats: the one asked for, else the first that is installed.

    Args:
        backend: the value of ``fp8_backend``; None or ``NO`` leaves the choice open.

    Where none is installed, it is the one to install.
    """
    if backend not in (None, "NO"):
        return backend
    first = next(iter(PACKAGES))
    return next((name for name, package in PACKAGES.items() if packages.is_installed(package)), first)


def require_library(backend: str, need: str) -> None:
    """Raise MissingExtraError when the package of a library for 8-bit floats is not installed."""
    if not packages.is_installed(PACKAGES[backend]):
        why = "it is NVIDIA's and needs CUDA; other devices take AORecipeKwargs()" if backend == "TE" else ""
        raise MissingExtraError(PACKAGES[backend], need, why)


@mutable_dataclass
class TEOptions:
    """The options of TransformerEngine, in the order of ``TERecipeKwargs``."""

    __section__ = "fp8_config"
    __prefix__ = "fp8_"

    use_autocast_during_eval: bool | None = setting(
        None, fallback=False, help="8 bits also in evaluation (TE)"
    )
    margin: int | None = setting(None, fallback=0, help="margin of the scaling factor, a power of two (TE)")
    interval: PositiveInt | None = setting(None, fallback=1, help="steps between two scaling factors (TE)")
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = setting(
        None,
        fallback="HYBRID",
        help="the 8-bit format; HYBRID: E4M3 forward, E5M2 backward (TE)",
        question="fp8 format?",
        when=_TE,
    )
    amax_history_len: PositiveInt | None = setting(
        None,
        fallback=1024,
        help="steps of the history of largest values (TE)",
        question="Length of the amax history?",
        when=_TE,
    )
    amax_compute_algo: Literal["max", "most_recent"] | None = setting(
        None,
        fallback="most_recent",
        help="what of that history makes the scaling factor (TE)",
        question="What of the amax history counts?",
        when=_TE,
    )
    override_linear_precision: tuple[bool, bool, bool] | None = setting(
        None,
        type=tuple[bool, ...] | bool,
        variable=None,
        switch=False,
        help="higher precision for forward, data gradient, weight gradient: true,false,true (TE)",
    )
    use_mxfp8_block_scaling: bool | None = setting(
        None, fallback=False, help="a scaling factor per block instead of per tensor: scaling mxfp8 (TE)"
    )
    scaling: Literal["delayed", "current", "block", "mxfp8"] | None = setting(
        None,
        help="scaling factors from the history, or from the tensor as it is; by blocks; by MXFP8 blocks (TE)",
        question="Scaling factors from what?",
        when=_TE,
    )


@mutable_dataclass
class AOOptions:
    """The options of torchao, in the order of ``AORecipeKwargs``; plain fields are for code only."""

    __section__ = "fp8_config"
    __prefix__ = "fp8_"

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = setting(
        None,
        switch=False,
        fallback=True,
        help="pad matrices to sizes that the hardware takes (AO)",
        question="Pad matrices to sizes that the hardware takes?",
        when=_AO,
    )
    enable_fsdp_float8_all_gather: bool | None = setting(
        None,
        switch=False,
        fallback=True,
        help="gather sharded weights in 8 bits (AO)",
        question="All-gather sharded weights in fp8?",
        when=_AO,
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = setting(
        None,
        fallback=TENSORWISE,
        help="a scale for each tensor or for each row; gw_hp: weight gradients in high precision (AO)",
        question="Scale for each tensor, or for each row?",
        when=_AO,
    )


@mutable_dataclass
class MSAMPOptions:
    """The options of MS-AMP."""

    __section__ = "fp8_config"
    __prefix__ = "fp8_"

    opt_level: Literal["O1", "O2"] | None = setting(
        None,
        fallback="O2",
        help="O1: weights and gradients in 8 bits; O2: optimizer state too (MSAMP)",
        question="MS-AMP optimization level?",
        when=_MSAMP,
    )


@mutable_dataclass
class FP8Settings(MSAMPOptions, AOOptions, TEOptions):
    """The options of matrix products in 8 bits.

    A script may choose the precision itself, so these need no ``--mixed_precision fp8`` beside them. Options
    without a value are not passed on.
    """

    __topic__ = "8-bit floats"
    __when__: ClassVar[Mapping[str, Any]] = {"mixed_precision": ("fp8",)}
    # The keys that the wizard of Accelerate 1.x wrote.
    __old_keys__: ClassVar[Mapping[str, str]] = {
        "amax_history_length": "fp8_amax_history_len",
        "amax_compute_algorithm": "fp8_amax_compute_algo",
        "optimization_level": "fp8_opt_level",
    }
    __first__: ClassVar[tuple[str, ...]] = ("backend",)

    backend: str | None = setting(
        None,
        choices=BACKENDS,
        help="the library that does it: TransformerEngine, torchao or MS-AMP",
        question="Library for fp8?",
    )
    override_fprop: bool | None = setting(
        None, flag=None, in_file=False, help="the first of fp8_override_linear_precision"
    )
    override_dgrad: bool | None = setting(
        None, flag=None, in_file=False, help="the second of fp8_override_linear_precision"
    )
    override_wgrad: bool | None = setting(
        None, flag=None, in_file=False, help="the third of fp8_override_linear_precision"
    )

    @staticmethod
    def check(origins: Origins) -> None:
        """Refuse an override that does not have three values.

        Raises:
            SettingError: it has another number of values.
        """
        origin = origins("fp8_override_linear_precision")[0]
        if isinstance(origin.value, tuple) and len(origin.value) != len(PARTS):
            raise SettingError(
                f"{origin.where} has {len(origin.value)} values, but {len(PARTS)} are needed",
                fix="give one each for forward, data gradient and weight gradient: true,false,true",
            )

    @staticmethod
    def check_library(precision: SettingOrigin, origins: Origins) -> None:
        """Refuse a launch whose script would find no library for 8-bit floats.

        Raises:
            SettingError: none is installed, or not the one that ``fp8_backend`` names.
        """
        asked = origins("fp8_backend")[0]
        package = PACKAGES.get(choose_backend(asked.value), "")
        if package and packages.is_installed(package):
            return
        if asked.value == "MSAMP":
            raise SettingError(
                f"{precision.where} is fp8, which does not train by {asked.where} MSAMP",
                why=MSAMP_REFUSAL,
                fix="use --fp8_backend AO: pip install torchao",
            )
        missing = f"and {asked.where} {asked.value} needs the package {package!r}"
        if asked.value in (None, "NO"):
            missing = f"but none of its libraries is installed: {', '.join(PACKAGES.values())}"
        raise SettingError(f"{precision.where} is fp8, {missing}", fix=f"pip install {package}, or use bf16")

    @staticmethod
    def launch_variables(origins: Origins) -> Mapping[str, str]:
        """Return the three variables of ``fp8_override_linear_precision``."""
        value = origins("fp8_override_linear_precision")[0].value
        if value is None:
            return {}
        flags = value if isinstance(value, tuple) else (value,) * len(PARTS)
        return {
            f"ACCELERATE_FP8_OVERRIDE_{part.upper()}": str(on).lower()
            for part, on in zip(PARTS, flags, strict=True)
        }


PLUGIN = FP8Settings
