"""The settings of 8-bit floats: flags of the launcher, their variables and file keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from accelerate.core.errors import SettingError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import SettingOrigin, setting

Origins = Callable[[str], tuple[SettingOrigin, ...]]
BACKENDS = ("TE", "AO", "MSAMP", "NO")
FORMATS = ("HYBRID", "E4M3", "E5M2")
ALGORITHMS = ("max", "most_recent")
LEVELS = ("O1", "O2")
PARTS = ("fprop", "dgrad", "wgrad")
_TE = {"fp8_backend": ("TE",)}


@frozen_dataclass
class FP8Settings:
    """The options of matrix products in 8 bits; see ``TERecipeKwargs``, ``AORecipeKwargs``.

    A script may choose the precision itself, so these need no ``--mixed_precision fp8`` beside them. Options
    without a value are not passed on: each reader has its own defaults.
    """

    __topic__ = "8-bit floats"
    __section__ = "fp8_config"
    __prefix__ = "fp8_"
    __when__: ClassVar[Mapping[str, Any]] = {"mixed_precision": ("fp8",)}
    # The keys that the wizard of Accelerate 1.x wrote.
    __old_keys__: ClassVar[Mapping[str, str]] = {
        "amax_history_length": "fp8_amax_history_len",
        "amax_compute_algorithm": "fp8_amax_compute_algo",
        "optimization_level": "fp8_opt_level",
    }

    fp8_backend: str | None = setting(
        None,
        choices=BACKENDS,
        help="the library that does it: TransformerEngine, torchao or MS-AMP",
        question="Which library?",
    )
    fp8_use_autocast_during_eval: bool | None = setting(None, help="8 bits also in evaluation (TE)")
    fp8_margin: int | None = setting(None, help="margin of the scaling factor, a power of two (TE)")
    fp8_interval: int | None = setting(None, help="steps between two scaling factors (TE)")
    fp8_format: str | None = setting(
        None,
        choices=FORMATS,
        help="the 8-bit format; HYBRID: E4M3 forward, E5M2 backward (TE)",
        question="Which format?",
        when=_TE,
    )
    fp8_amax_history_len: int | None = setting(
        None, help="steps of the history of largest values (TE)", question="How long a history?", when=_TE
    )
    fp8_amax_compute_algo: str | None = setting(
        None,
        choices=ALGORITHMS,
        help="what of that history makes the scaling factor (TE)",
        question="What of the history counts?",
        when=_TE,
    )
    fp8_override_linear_precision: tuple[bool, ...] | bool | None = setting(
        None,
        variable=None,
        switch=False,
        help="higher precision for forward, data gradient, weight gradient: true,false,true (TE)",
    )
    fp8_override_fprop: bool | None = setting(
        None, flag=None, in_file=False, help="the first of fp8_override_linear_precision"
    )
    fp8_override_dgrad: bool | None = setting(
        None, flag=None, in_file=False, help="the second of fp8_override_linear_precision"
    )
    fp8_override_wgrad: bool | None = setting(
        None, flag=None, in_file=False, help="the third of fp8_override_linear_precision"
    )
    fp8_use_mxfp8_block_scaling: bool | None = setting(
        None, help="a scaling factor per block instead of per tensor (TE)"
    )
    fp8_opt_level: str | None = setting(
        None,
        choices=LEVELS,
        help="O1: weights and gradients in 8 bits; O2: optimizer state too (MSAMP)",
        question="Which level?",
        when={"fp8_backend": ("MSAMP",)},
    )
    fp8_enable_fsdp_float8_all_gather: bool | None = setting(
        None,
        switch=False,
        help="gather sharded weights in 8 bits (AO)",
        question="Gather sharded weights in 8 bits?",
        when={"fp8_backend": ("AO",)},
    )
    fp8_pad_inner_dim: bool | None = setting(
        None,
        switch=False,
        help="pad matrices to sizes that the hardware takes (AO)",
        question="Pad matrices to sizes that the hardware takes?",
        when={"fp8_backend": ("AO",)},
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
