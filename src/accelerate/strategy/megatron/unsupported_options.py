"""Refuse unsupported plugin options, each with its reason, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.core import packages
from accelerate.core.errors import SettingError

if TYPE_CHECKING:
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin

_REPOSITORY = "it is part of Megatron-LM's repository, and not of the package megatron-core"
_KERNELS = "Megatron-LM needs TransformerEngine for it, which has no build for this machine's torch"
_UNTESTED = "nobody has run it here: it takes several devices of the vendor's"


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


# Field -> (which values are is_unsupported, why not, what to do).
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "context_parallel_size": (
        _above_one,
        "Megatron-LM shares sequences only inside TransformerEngine's attention",
        "ParallelismConfig(cp_size=...) shares sequences",
    ),
    "expert_model_parallel_size": (_above_one, "models with experts are not taken over", "leave it out"),
    "expert_tensor_parallel_size": (_above_one, "models with experts are not taken over", "leave it out"),
    "use_custom_fsdp": (bool, _UNTESTED, "shard by torch: FullyShardedDataParallelPlugin()"),
    "optimizer_cpu_offload": (bool, _KERNELS, "leave it out"),
    "overlap_cpu_optimizer_d2h_h2d": (bool, _KERNELS, "leave it out"),
    "use_precision_aware_optimizer": (bool, _KERNELS, "leave it out"),
    "num_layers_per_virtual_pipeline_stage": (
        _above_one,
        _UNTESTED,
        "leave it out: stages then take turns once",
    ),
    "pipeline_model_parallel_split_rank": (
        lambda value: value is not None,
        "only models with an encoder and a decoder have such a place",
        "leave it out",
    ),
    "custom_model_provider_function": (
        lambda value: value is not None,
        "the weights of a model that was not made of the user's cannot be told by the user's names",
        "change Megatron-LM's model in custom_prepare_model_function",
    ),
    "custom_megatron_datasets_provider_function": (
        lambda value: value is not None,
        _REPOSITORY,
        "give a DataLoader to prepare",
    ),
}


def check_options(plugin: MegatronLMPlugin, precision: str) -> None:
    """Refuse options that are not supported.

    Raises:
        SettingError: one of them is set.
    """
    for name, (is_unsupported, reason, fix) in _UNSUPPORTED.items():
        value = plugin.explicit_value(name)
        if is_unsupported(value):
            raise SettingError(
                f"Megatron-LM with {name}={_display_value(value)} does not work", why=reason, fix=fix
            )
    if plugin.sequence_parallelism:
        _check_sequence_parallel(plugin)
    if precision not in ("no", "bf16"):
        raise SettingError(
            f"Megatron-LM with mixed_precision={precision!r} does not work",
            why="8 bits need the vendor's kernels, and float16 a loss scale of Megatron-LM's own: nobody "
            "has run them here",
            fix="use mixed_precision='bf16' or 'no'",
        )


def _check_sequence_parallel(plugin: MegatronLMPlugin) -> None:
    if plugin.tp_degree < 2:
        raise SettingError(
            "sequence_parallelism without tensor parallelism",
            why="it splits activations over the processes that share a layer",
            fix="use tp_degree=2 or more, or leave sequence_parallelism out",
        )
    if not packages.is_installed("apex"):
        raise SettingError(
            "Megatron-LM with sequence_parallelism does not work without the package apex",
            why="Megatron-LM refuses it with torch's norms: it needs Apex's or TransformerEngine's",
            fix="install apex from its repository, or leave sequence_parallelism out",
        )


def _display_value(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", repr(value))
