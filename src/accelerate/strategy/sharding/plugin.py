"""``FullyShardedDataParallelPlugin``: how a model is sharded, from code or from the launcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
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
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.core import environ
from accelerate.core.errors import NotBuiltError, SettingError, UnknownNameError
from accelerate.core.setting import Loaded, load
from accelerate.strategy.settings.fsdp import POLICIES, FSDPSettings

_POLICY: dict[str, Callable[..., bool] | None] = dict(
    zip(POLICIES, (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None), strict=True)
)
_DTYPES = {"no": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded over the processes; a field that is None takes its variable, then its default.

    Attributes:
        fsdp_version: 2, torch's ``fully_shard`` (``FSDP_VERSION``, 2).
        sharding_strategy: of version 1. ``"FULL_SHARD"`` and ``"SHARD_GRAD_OP"`` set
            ``reshard_after_forward``.
        reshard_after_forward: free whole parameters after the forward, and gather them again in the backward
            (``FSDP_RESHARD_AFTER_FORWARD``, True).
        backward_prefetch, forward_prefetch, use_orig_params, sync_module_states, limit_all_gathers: of
            version 1.
        mixed_precision_policy: a ``MixedPrecisionPolicy``, its fields as a dict, or ``"bf16"``/``"fp16"``;
            None follows the precision of the ``Accelerator``.
        auto_wrap_policy: which modules are gathered by themselves: ``"transformer_based_wrap"``,
            ``"size_based_wrap"``, ``"no_wrap"``, or a policy of ``torch.distributed.fsdp.wrap``
            (``FSDP_AUTO_WRAP_POLICY``, no_wrap).
        cpu_offload: keep parameters, gradients and optimizer state on the host (``FSDP_OFFLOAD_PARAMS``).
        ignored_modules: frozen modules that stay whole, or a regular expression of their names
            (``FSDP_IGNORED_MODULES``).
        state_dict_type: what checkpoints hold: ``"SHARDED_STATE_DICT"`` or ``"FULL_STATE_DICT"``
            (``FSDP_STATE_DICT_TYPE``, sharded).
        state_dict_config, optim_state_dict_config: follow ``state_dict_type``.
        param_init_fn: fills a module whose parameters are on the meta device on rank 0 too.
        activation_checkpointing: recompute the activations of each wrapped module in the backward
            (``FSDP_ACTIVATION_CHECKPOINTING``).
        activation_checkpointing_offload: keep what is left of them on the host
            (``FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD``).
        cpu_ram_efficient_loading: only rank 0 reads pretrained weights
            (``FSDP_CPU_RAM_EFFICIENT_LOADING``).
        transformer_cls_names_to_wrap: class names of the layers, a list or a text with commas; None takes the
            model's own ``_no_split_modules`` (``FSDP_TRANSFORMER_CLS_TO_WRAP``).
        min_num_params: parameters of a part under ``size_based_wrap`` (``FSDP_MIN_NUM_PARAMS``).

    Raises:
        SettingError: a value is wrong, contradicts another, or has no meaning in version 2.
        NotBuiltError: version 1, or copies of shards (HYBRID_SHARD), which will come.
    """

    fsdp_version: Any = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: Any = None
    activation_checkpointing: Any = None
    activation_checkpointing_offload: Any = None
    cpu_ram_efficient_loading: Any = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self._found = found = load(FSDPSettings, code=self._given())
        settings = found.value
        if settings.fsdp_version == 1:
            raise NotBuiltError(
                f"version 1 of sharded training is not built yet ({found.origin('fsdp_version').where})",
                why="its options will come with the other sharded strategies; version 2 trains to the same "
                "numbers",
                fix="use fsdp_version=2, or leave it out: 2 is the default here",
            )
        self.fsdp_version = 2
        self.reshard_after_forward = _reshards(found)
        self._settle_version_1(found)
        self._settle_policy(settings)
        self._settle_memory(settings)
        self.validate_mixed_precision_policy()
        word = _word(settings.fsdp_state_dict_type or "SHARDED_STATE_DICT", StateDictType, "state_dict_type")
        self.set_state_dict_type(word)

    def _given(self) -> dict[str, Any]:
        """The fields as settings: objects of torch by their names, those that no text can say left out."""
        names = self.transformer_cls_names_to_wrap
        policy, offload = self.auto_wrap_policy, self.cpu_offload
        text = self.fsdp_version
        return {
            "fsdp_version": int(text) if isinstance(text, str) and text.isdigit() else text,
            "fsdp_sharding_strategy": _named(self.sharding_strategy),
            "fsdp_reshard_after_forward": _named(self.reshard_after_forward),
            "fsdp_backward_prefetch": _named(self.backward_prefetch),
            "fsdp_state_dict_type": _named(self.state_dict_type),
            "fsdp_auto_wrap_policy": policy if isinstance(policy, str) else None,
            "fsdp_transformer_layer_cls_to_wrap": tuple(names) if isinstance(names, set | list) else names,
            "fsdp_min_num_params": self.min_num_params,
            "fsdp_offload_params": offload if isinstance(offload, bool | str) else None,
            "fsdp_forward_prefetch": self.forward_prefetch,
            "fsdp_use_orig_params": self.use_orig_params,
            "fsdp_sync_module_states": self.sync_module_states,
            "fsdp_activation_checkpointing": self.activation_checkpointing,
            "fsdp_activation_checkpointing_offload": self.activation_checkpointing_offload,
            "fsdp_cpu_ram_efficient_loading": self.cpu_ram_efficient_loading,
            "fsdp_ignored_modules": self.ignored_modules if isinstance(self.ignored_modules, str) else None,
        }

    def _settle_version_1(self, found: Loaded[FSDPSettings]) -> None:
        """Options without a meaning here: refused if they ask for something else, or reported as ignored."""
        settings = found.value
        if settings.fsdp_forward_prefetch:
            raise SettingError(
                f"forward_prefetch ({found.origin('fsdp_forward_prefetch').where}) is an option of version 1",
                why="version 2 gathers the next block ahead by itself where the device allows it",
                fix="leave it out",
            )
        ahead = settings.fsdp_backward_prefetch
        ignored = {
            "backward_prefetch": ahead is not None
            and _word(ahead, BackwardPrefetch, "backward_prefetch", "NO_PREFETCH") != "BACKWARD_PRE",
            "use_orig_params": settings.fsdp_use_orig_params is False,
            "sync_module_states": settings.fsdp_sync_module_states is False,
            "limit_all_gathers": self.limit_all_gathers is False,
        }
        self._ignored = {name for name, asked in ignored.items() if asked}
        self.sharding_strategy = self.backward_prefetch = self.use_orig_params = None
        self.sync_module_states = self.forward_prefetch = None

    def _settle_policy(self, settings: FSDPSettings) -> None:
        if self.auto_wrap_policy is None or isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy = _POLICY[settings.fsdp_auto_wrap_policy or "NO_WRAP"]
        names = settings.fsdp_transformer_layer_cls_to_wrap
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        self.transformer_cls_names_to_wrap = list(names) if names else None
        self.min_num_params = settings.fsdp_min_num_params
        if self.ignored_modules is None:
            self.ignored_modules = settings.fsdp_ignored_modules

    def _settle_memory(self, settings: FSDPSettings) -> None:
        if not isinstance(self.cpu_offload, OffloadPolicy | CPUOffload):
            self.cpu_offload = settings.fsdp_offload_params
        self.set_cpu_offload()
        self.activation_checkpointing = bool(settings.fsdp_activation_checkpointing)
        self.activation_checkpointing_offload = bool(settings.fsdp_activation_checkpointing_offload)
        if self.activation_checkpointing_offload:
            if not self.activation_checkpointing:
                raise SettingError(
                    "activation_checkpointing_offload without activation_checkpointing",
                    fix="add activation_checkpointing=True",
                )
            raise NotBuiltError(
                "activation_checkpointing_offload is not built yet",
                why="keeping the inputs of recomputed blocks on the host will come",
            )
        if self.cpu_ram_efficient_loading is not None:
            # Libraries that load pretrained models look there.
            environ.write({"FSDP_CPU_RAM_EFFICIENT_LOADING": str(bool(self.cpu_ram_efficient_loading))})
        self.cpu_ram_efficient_loading = bool(settings.fsdp_cpu_ram_efficient_loading)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """What checkpoints hold from now on; None only brings the two configurations in line.

        Raises:
            SettingError: there is no such type in version 2.
        """
        if state_dict_type is not None:
            name = _word(_named(state_dict_type), StateDictType, "state_dict_type")
            self.state_dict_type = StateDictType[name]
        if self.state_dict_type == StateDictType.LOCAL_STATE_DICT:
            raise SettingError(
                "state_dict_type LOCAL_STATE_DICT is one of version 1",
                fix="use SHARDED_STATE_DICT, a part per process, or FULL_STATE_DICT",
            )
        if self.state_dict_type == StateDictType.FULL_STATE_DICT:
            self.state_dict_config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            self.optim_state_dict_config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        else:
            self.state_dict_config = ShardedStateDictConfig(offload_to_cpu=True)
            self.optim_state_dict_config = ShardedOptimStateDictConfig(offload_to_cpu=True)

    def set_cpu_offload(self) -> None:
        """Brings ``cpu_offload`` into the form that torch takes."""
        if not isinstance(self.cpu_offload, OffloadPolicy):
            asked = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
            self.cpu_offload = CPUOffloadPolicy() if asked else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Refuses a ``cpu_offload`` that was assigned and is no policy.

        Raises:
            SettingError: it is none.
        """
        if not isinstance(self.cpu_offload, OffloadPolicy):
            raise SettingError(
                f"cpu_offload is a {type(self.cpu_offload).__name__}",
                fix="use True, False or an OffloadPolicy",
            )

    def validate_mixed_precision_policy(self) -> None:
        """Brings ``mixed_precision_policy`` into the form that torch takes.

        Raises:
            UnknownNameError: it names a number format or a field that does not exist.
        """
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = _precision(self.mixed_precision_policy)

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Makes blocks compute in a number format, reduce gradients in float32, and keep their weights.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"``, or a dtype.
            buffer_autocast: of version 1.
            override: also where a policy was given.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _precision(mixed_precision)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Looks up the classes that a policy by class names means in ``model``.

        Raises:
            UnknownNameError: the model has no module of a class that was named; the nearest is suggested.
            SettingError: no class was named, and the model names none itself.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = _layers(model, self.transformer_cls_names_to_wrap)
            self.auto_wrap_policy = functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls=classes
            )
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            self.auto_wrap_policy = functools.partial(
                size_based_auto_wrap_policy, min_num_params=self.min_num_params or 0
            )

    def policy_for(self, model: nn.Module) -> Any:
        """The policy for one model, with its own classes; the plugin stays as it is. None wraps nothing."""
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = _layers(model, self.transformer_cls_names_to_wrap)
            return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        if self.auto_wrap_policy is size_based_auto_wrap_policy:
            return functools.partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params or 0)
        return self.auto_wrap_policy


def _layers(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """The classes of that names in ``model``; with None those that it names as not to be split."""
    classes = {type(part).__name__: type(part) for part in model.modules()}
    if names is not None:
        for name in names:
            if name not in classes:
                raise UnknownNameError(
                    "class to wrap", name, classes, where=f"in the model {type(model).__name__}"
                )
        return {classes[name] for name in names}
    found = {classes[name] for name in getattr(model, "_no_split_modules", None) or () if name in classes}
    if not found:
        raise SettingError(
            f"auto_wrap_policy is transformer_based_wrap, and a {type(model).__name__} does not say what its "
            "layers are",
            fix=f"transformer_cls_names_to_wrap=[...], with some of {', '.join(sorted(classes))}",
        )
    return found


def _named(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def _word(value: Any, kind: type[Enum], field: str, *more: str) -> str:
    """The name that ``value`` is: in any case, or as a number counted from 1."""
    names = [*(member.name for member in kind), *more]
    text = str(value).upper()
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise UnknownNameError("value", str(value), names, where=f"of {field}")
    return text


def _reshards(found: Loaded[FSDPSettings]) -> bool:
    """Whether whole parameters are freed after the forward."""
    given = found.value.fsdp_reshard_after_forward
    if isinstance(given, str):
        raise SettingError(
            f"reshard_after_forward is {given!r}, a sharding strategy of version 1",
            fix="use true, as FULL_SHARD did, or false, as SHARD_GRAD_OP did",
        )
    if found.value.fsdp_sharding_strategy is None:
        return given is not False
    word = _word(found.value.fsdp_sharding_strategy, ShardingStrategy, "sharding_strategy")
    where = found.origin("fsdp_sharding_strategy").where
    if word == "NO_SHARD":
        raise SettingError(
            f"sharding_strategy NO_SHARD ({where}) shards nothing",
            fix="leave sharded training out: several processes then train replicas",
        )
    if word not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise NotBuiltError(
            f"sharding_strategy {word} ({where}) is not built yet",
            why="copies of shards will come with the device mesh of named dimensions",
            fix="use FULL_SHARD or SHARD_GRAD_OP, over all processes",
        )
    reshards = word == "FULL_SHARD"
    # Launchers write the default of both, whatever was asked: only what differs from it says something.
    both = [found.origin(f"fsdp_{name}").source for name in ("sharding_strategy", "reshard_after_forward")]
    if given is not None and given != reshards and "environment" not in both:
        raise SettingError(
            f"reshard_after_forward is {given}, but sharding_strategy is {word}, which means {reshards}",
            why="sharding_strategy is how version 1 says it",
            fix="keep reshard_after_forward",
        )
    return reshards and given is not False


def policy_of(precision: str) -> MixedPrecisionPolicy | None:
    """What a ``mixed_precision`` of the ``Accelerator`` means: weights in float32, reduction in float32."""
    return None if precision == "no" else _precision(precision)


def _precision(given: Any) -> MixedPrecisionPolicy | None:
    """A policy from one, from version 1's, from its fields, or from a number format."""
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, MixedPrecision):
        return MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
    if isinstance(given, Mapping):
        fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        for name in given:
            if name not in fields:
                raise UnknownNameError("key of mixed_precision_policy", str(name), fields)
        values: dict[str, Any] = {
            name: value if isinstance(value, bool) else _dtype(value)
            for name, value in given.items()
            if value is not None
        }
        return MixedPrecisionPolicy(**values)
    dtype = _dtype(given)
    return MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)


def _dtype(given: Any) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    name = str(given).removeprefix("torch.")
    found = _DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnknownNameError("number format", str(given), _DTYPES, where="in mixed_precision_policy")
    return found
