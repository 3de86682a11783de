"""The FSDP options in FSDP2 (``fully_shard``): their meaning, and how the option report reads them back.

They are declared in ``launch_settings/fsdp.py``. ``READ_BACKS`` at the end has the function of each option
that the prepared models can show.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.option_report import OptionStatus, RequestedOption, requested_options
from accelerate.core.setting import SettingsWithOrigins, declared_settings
from accelerate.strategy.launch_settings.fsdp import FSDPSettings
from accelerate.strategy.sharding.activation_checkpointing import checkpoint, offloads_inputs
from accelerate.strategy.sharding.grads import fsdp_param_groups, unsharded_param

_DTYPES = {"no": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def parse_enum_name(value: Any, kind: type[Enum], field: str) -> str:
    """Return the member name that ``value`` means: a member, or its name in any case or number from 1.

    A leading underscore, with which torch marks unstable members, is ignored.

    Raises:
        UnknownNameError: there is no such member.
    """
    names = [member.name.lstrip("_") for member in kind]
    text = str(value.name if isinstance(value, Enum) else value).upper().lstrip("_")
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise UnknownNameError("value", str(value), names, where=f"of {field}")
    return text


def parse_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a name such as ``"bf16"`` or ``"bfloat16"``.

    Raises:
        UnknownNameError: there is no such dtype.
    """
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    dtype = _DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnknownNameError("number format", str(value), _DTYPES, where="in mixed_precision_policy")
    return dtype


def parse_policy_fields(policy: dict[Any, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a mixed precision policy with dtypes; those that are None are left out.

    Raises:
        UnknownNameError: a field or a dtype does not exist.
    """
    for name in policy:
        if name not in fields:
            raise UnknownNameError("key of mixed_precision_policy", str(name), fields)
    return {
        name: value if isinstance(value, bool) else parse_dtype(value)
        for name, value in policy.items()
        if value is not None
    }


STATE_DICT_TYPE = "SHARDED_STATE_DICT"
# The classes of torch for FSDP2 in fields of the plugin.
CLASSES = (OffloadPolicy, MixedPrecisionPolicy)
_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def apply_settings(plugin: Any, loaded: SettingsWithOrigins[FSDPSettings]) -> None:
    """Set the fields of ``plugin`` from the loaded settings.

    Raises:
        SettingError: an option contradicts another, or has no meaning in FSDP2.
    """
    strategy, plugin.reshard_after_forward = _parse_resharding(loaded)
    plugin.hybrid = "HYBRID" in (strategy or "") or (plugin.replicate_size or 1) > 1
    if plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        raise SettingError(
            "activation_checkpointing_offload without activation_checkpointing",
            fix="add activation_checkpointing=True",
        )
    # Options of FSDP1: whether units are prefetched, in the forward and in the backward; others are ignored.
    plugin._prefetch_flags = plugin.forward_prefetch, plugin.backward_prefetch == "BACKWARD_PRE"
    names = ("use_orig_params", "sync_module_states", "limit_all_gathers")
    plugin._ignored_options = {name for name in names if getattr(plugin, name) is False}
    plugin.sharding_strategy = plugin.backward_prefetch = plugin.use_orig_params = None
    plugin.sync_module_states = plugin.forward_prefetch = None


def _parse_resharding(loaded: SettingsWithOrigins[FSDPSettings]) -> tuple[str | None, bool]:
    """Return FSDP1's name of the strategy, if one is given, and whether to reshard after the forward.

    Raises:
        SettingError: the strategy shards nothing, or two options contradict each other.
    """
    name, strategy = "sharding_strategy", loaded.value.sharding_strategy
    value = loaded.value.reshard_after_forward
    if isinstance(value, str):
        name, strategy = "reshard_after_forward", _parse_fsdp1_name(loaded, value)
    if strategy is None:
        return None, value is not False
    if strategy == "NO_SHARD":
        origin = loaded.origin(f"fsdp_{name}").where
        raise SettingError(
            f"{name} NO_SHARD ({origin}) shards nothing",
            fix="leave FSDP out: several processes then train by DDP",
        )
    reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    if isinstance(value, str):
        return strategy, reshards
    # Launchers write the default of both: only values that differ from it count as given.
    both = [loaded.origin(f"fsdp_{name}").source for name in ("sharding_strategy", "reshard_after_forward")]
    if value is not None and value != reshards and "environment" not in both:
        raise SettingError(
            f"reshard_after_forward is {value}, but sharding_strategy is {strategy}, which means {reshards}",
            why="sharding_strategy is the option of FSDP1 for the same",
            fix="keep reshard_after_forward",
        )
    return strategy, reshards and value is not False


def _parse_fsdp1_name(loaded: SettingsWithOrigins[FSDPSettings], value: str) -> str:
    """Return the sharding strategy of FSDP1 that files may have at ``reshard_after_forward``.

    Raises:
        UnknownNameError: there is no such strategy.
        SettingError: code names one there, and has to use the words of its version.
    """
    name = "reshard_after_forward"
    if loaded.origin(f"fsdp_{name}").source == "code":
        raise SettingError(
            f"{name} is {value!r}, a sharding strategy of FSDP1",
            fix="use true, as FULL_SHARD did, or false, as SHARD_GRAD_OP did",
        )
    return parse_enum_name(value, ShardingStrategy, name)


def state_dict_configs(kind: StateDictType, *, offload: bool = True) -> tuple[Any, Any]:
    """Return torch's state dict configurations of that type, for models and for optimizers.

    Args:
        kind: the type.
        offload: values of state dicts go to the host.

    Raises:
        SettingError: there is no such type in FSDP2.
    """
    if kind == StateDictType.LOCAL_STATE_DICT:
        raise SettingError(
            "state_dict_type LOCAL_STATE_DICT is one of FSDP1",
            fix="use SHARDED_STATE_DICT, a shard per rank, or FULL_STATE_DICT",
        )
    if kind == StateDictType.FULL_STATE_DICT:
        return (
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        )
    return ShardedStateDictConfig(offload_to_cpu=offload), ShardedOptimStateDictConfig(offload_to_cpu=offload)


def parse_offload(value: Any) -> Any:
    """Return torch's offload policy for a truth value, or for FSDP1's object."""
    if isinstance(value, OffloadPolicy):
        return value
    offloads = getattr(value, "offload_params", value)
    return CPUOffloadPolicy() if offloads else OffloadPolicy()


def parse_precision(value: Any, buffer_autocast: bool = False) -> MixedPrecisionPolicy:
    """Return a ``MixedPrecisionPolicy`` for one, for FSDP1's, for a dict of its fields, or for a dtype.

    Raises:
        UnknownNameError: it names a dtype or a field that does not exist.
    """
    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, MixedPrecision):
        return MixedPrecisionPolicy(value.param_dtype, value.reduce_dtype)
    if isinstance(value, Mapping):
        return MixedPrecisionPolicy(**parse_policy_fields(dict(value), _FIELDS))
    dtype = parse_dtype(value)
    return MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)


# --- the option report, read from torch's FSDP state of the prepared models

# Batch norms that are FSDP units whatever the options say (``ShardingLayout.norms``), in FSDP1 too. The
# options are read back from the other units.
NORM_UNITS: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_IGNORED = (
    "it is an option of FSDP1; FSDP2 always keeps the user's own parameters, and begins with the weights of "
    "rank 0"
)


def option_statuses(
    switch: Iterable[RequestedOption],
    plugin: Any,
    models: Sequence[nn.Module],
) -> Iterator[OptionStatus]:
    """Return the status of the switch and of each option of the plugin.

    Args:
        switch: the options that ask for FSDP.
        plugin: the other options.
        models: the sharded models.
    """
    sharded = sum(len(group.fsdp_params) for model in models for group in fsdp_param_groups(model))
    for option in switch:
        if option.value is not True:  # the plugin itself
            continue
        applied = option.report_applied(f"{sharded} parameters are sharded")
        yield applied if models else option.report_pending(NO_TRAINED_MODEL)
    policy = plugin.mixed_precision_policy
    implied = policy if policy is plugin._implied[1] else None
    objects = {"mixed_precision_policy": policy, "buffer_dtype": plugin._buffer_dtype}
    given = ((name, value) for name, value in objects.items() if value not in (None, implied))
    for option in (
        *plugin_options(plugin),
        *(RequestedOption(name, value, type(plugin).__name__) for name, value in given),
    ):
        look = READ_BACKS.get(option.name)
        if option.name.removeprefix("fsdp_") in plugin._ignored_options:
            yield option.report_not_applied(_IGNORED)
        elif look is None:
            yield option.report_applied()
        elif not models:
            yield option.report_pending(NO_TRAINED_MODEL)
        else:
            yield look(option, models)
    dtypes = used_dtypes(models) if implied is not None else None
    wrong = dtypes.differences(implied) if dtypes is not None and implied is not None else ""
    if wrong:
        yield RequestedOption("mixed_precision", str(implied), "the precision").report_not_applied(wrong)


NO_TRAINED_MODEL = "no model that trains is prepared"


def plugin_options(plugin: Any) -> Iterator[RequestedOption]:
    """Return the options that were given, also objects in fields of the plugin.

    "No" is a request where the option is on by itself.
    """
    named = {option.name: option for option in requested_options(plugin._settings)}
    fallbacks = {row.name: row.fallback for row in declared_settings(type(plugin))}
    yield from (o for name, o in named.items() if o.value is not False or fallbacks[name] is True)
    origin = type(plugin).__name__
    if plugin.offloads_params and "fsdp_offload_params" not in named:
        yield RequestedOption("fsdp_offload_params", True, origin)
    if not plugin.limit_all_gathers:
        yield RequestedOption("limit_all_gathers", False, origin)
    if plugin.auto_wrap_policy is not None and "fsdp_auto_wrap_policy" not in named:
        yield RequestedOption("fsdp_auto_wrap_policy", "a policy", origin)


def _unit_count(models: Sequence[nn.Module]) -> int:
    """Return the number of FSDP units that the wrap policy has chosen."""
    parts = (part for model in models for part in model.modules() if isinstance(part, FSDPModule))
    return sum(part not in NORM_UNITS for part in parts) - len(models)


def wrap_status(option: RequestedOption, parts: int) -> OptionStatus:
    """Return the status of the wrap policy, by the number of units that it has chosen."""
    if str(option.value) == "NO_WRAP":
        return option.report_unless(f"{parts} FSDP units" if parts else "")
    if not parts:
        return option.report_not_applied("it matches no module: the whole model is one FSDP unit")
    return option.report_applied(f"{parts} FSDP units")


def _offload_status(option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
    records: list[Any] = [
        p for model in models for group in fsdp_param_groups(model) for p in group.fsdp_params
    ]
    offloaded = [p for p in records if p.offload_to_cpu and p.sharded_param.to_local().device.type == "cpu"]
    return option.report_count(
        len(offloaded), len(records), "parameters are on the host", "others are on the device"
    )


def recompute_status(option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
    """Return the status of activation checkpointing, by the number of checkpointed modules."""
    modules = (module for model in models for module in model.modules())
    # torch's other way wraps a module in one of this class; programs take it.
    parts = [m for m in modules if checkpoint.state(m) is not None or type(m).__name__ == "CheckpointWrapper"]
    reason = "no module of the model has activation checkpointing"
    return option.report_applied(f"{len(parts)} units") if parts else option.report_not_applied(reason)


def _activation_offload_status(option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
    parts = [part for model in models for part in model.modules() if offloads_inputs(part)]
    if not parts:
        return option.report_not_applied("no module of the model has activation checkpointing")
    param_device = next((p.device.type for model in models for p in model.parameters()), "cpu")
    device = next((group.device.type for model in models for group in fsdp_param_groups(model)), param_device)
    if device == "cpu":
        return option.report_applied(f"the inputs of {len(parts)} units are on the host anyway")
    return option.report_applied(f"the inputs of {len(parts)} units wait there for the backward")


def _buffers(option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
    dtypes = {b.dtype for model in models for b in model.buffers() if b.is_floating_point()} - {option.value}
    shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return option.report_unless(f"FSDP2 leaves buffers as they are: {shown}" if dtypes else "")


def _dtype_status(option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
    # The dtypes after a forward, against the policy.
    dtypes = used_dtypes(models)
    if dtypes is None:
        return option.report_pending("no forward has run")
    wrong = dtypes.differences(option.value)
    return option.report_not_applied(wrong) if wrong else option.report_applied(str(dtypes))


@dataclass(frozen=True)
class ShardedDtypes:
    """The dtypes of sharded models; several where FSDP units differ.

    Attributes:
        parameters: of the sharded parameters, which optimizers step.
        compute: of the unsharded parameters in the forward.
        reduction: in which gradients are reduced.
        buffers: of the models' buffers, which are not cast.
        outputs: to which outputs are cast; None leaves them as they are computed.
    """

    parameters: frozenset[torch.dtype]
    compute: frozenset[torch.dtype]
    reduction: frozenset[torch.dtype]
    buffers: frozenset[torch.dtype]
    outputs: frozenset[torch.dtype | None]

    def __str__(self) -> str:
        parts = [
            f"parameters {_dtype_names(self.parameters)}",
            f"computed in {_dtype_names(self.compute)}",
            f"gradients reduced in {_dtype_names(self.reduction)}",
        ]
        if self.buffers:
            parts.append(f"buffers {_dtype_names(self.buffers)}")
        parts.append(f"outputs {_dtype_names(self.outputs) or 'as computed'}")
        return ", ".join(parts)

    def differences(self, policy: MixedPrecisionPolicy) -> str:
        """Describe how the dtypes differ from ``policy``; empty when they do not."""
        reduced = policy.reduce_dtype or policy.param_dtype
        expected = (
            ("computed", self.compute, policy.param_dtype),
            ("reduced", self.reduction, reduced),
            ("output cast", self.outputs, policy.output_dtype),
        )
        wrong = [
            f"{label} in {_dtype_names(used)}, not {_dtype_name(target)}"
            for label, used, target in expected
            if target is not None and used - {target}
        ]
        return "; ".join(wrong)


def _policy_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the FSDP parameter groups but for those of batch norms."""
    return (group for group in fsdp_param_groups(model) if group.modules[0] not in NORM_UNITS)


def used_dtypes(models: Sequence[nn.Module]) -> ShardedDtypes | None:
    """Return the dtypes of sharded models without batch norms that are units; None before a forward.

    Args:
        models: the sharded models.
    """
    groups = [group for model in models for group in _policy_groups(model)]
    trained = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
    whole = [unsharded_param(p) for p in trained]
    if not trained or any(each is None for each in whole):
        return None
    pairs: list[tuple[Any, Any]] = list(zip(trained, whole, strict=True))
    floating = [(p, each) for p, each in pairs if each.is_floating_point()]
    buffers = [b for model in models for b in model.buffers() if b.is_floating_point()]
    outputs = {model._get_fsdp_state()._mp_policy.output_dtype for model in models}  # type: ignore[operator]
    return ShardedDtypes(
        parameters=_dtypes_of(p.sharded_param for p in trained),
        compute=_dtypes_of(each for _, each in floating),
        # Torch keeps a reduce dtype only where it differs from the compute dtype.
        reduction=frozenset(p.reduce_dtype or each.dtype for p, each in floating),
        buffers=_dtypes_of(buffers),
        outputs=frozenset(outputs),
    )


def _dtypes_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.dtype]:
    return frozenset(tensor.dtype for tensor in tensors)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: Iterable[torch.dtype | None]) -> str:
    return "/".join(sorted(_dtype_name(dtype) for dtype in dtypes if dtype is not None))


def _reshard_status(option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
    # Torch never reshards the root unit after the forward: its backward begins at once.
    inner = [group for model in models for group in _policy_groups(model) if group not in _root_groups(model)]
    reshards = str(option.value).lower() in ("true", "1", "full_shard", "hybrid_shard", "4")
    other = [group for group in inner if group._reshard_after_forward != reshards]
    verb = "keep" if reshards else "free"
    return option.report_unless(
        f"{len(other)} of {len(inner)} units {verb} unsharded parameters after the forward" if other else ""
    )


def _root_groups(model: Any) -> list[Any]:
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else list(groups)


READ_BACKS: dict[str, Callable[[RequestedOption, Sequence[nn.Module]], OptionStatus]] = {
    "fsdp_auto_wrap_policy": lambda option, models: wrap_status(option, _unit_count(models)),
    "fsdp_offload_params": _offload_status,
    "fsdp_activation_checkpointing": recompute_status,
    "fsdp_activation_checkpointing_offload": _activation_offload_status,
    "fsdp_forward_prefetch": lambda option, models: option.report_unless(
        "" if _unit_count(models) else "the whole model is one FSDP unit"
    ),
    "mixed_precision_policy": _dtype_status,
    "buffer_dtype": _buffers,
    "fsdp_reshard_after_forward": _reshard_status,
    "fsdp_sharding_strategy": _reshard_status,
}
