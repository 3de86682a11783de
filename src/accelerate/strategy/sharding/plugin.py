"""``FullyShardedDataParallelPlugin``: how a model is sharded, from code or from the launcher.

What an option means in either version of torch's sharding stands in ``version1.py`` and ``version2.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, OffloadPolicy, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.core.setting import load
from accelerate.strategy.settings.fsdp import POLICIES, FSDPSettings
from accelerate.strategy.sharding import version1, version2
from accelerate.strategy.sharding.words import layers, named, word

_POLICY: dict[str, Callable[..., bool] | None] = dict(
    zip(POLICIES, (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None), strict=True)
)
_VERSIONS: dict[int, ModuleType] = {1: version1, 2: version2}


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded over the processes; a field that is None takes its variable, then its default.

    Attributes:
        fsdp_version: 2, torch's ``fully_shard``, or 1, its class ``FullyShardedDataParallel``
            (``FSDP_VERSION``, 2).
        sharding_strategy: of version 1: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"``, ``"NO_SHARD"``,
            ``"HYBRID_SHARD"`` or ``"HYBRID_SHARD_ZERO2"`` (``FSDP_SHARDING_STRATEGY``, FULL_SHARD). In
            version 2 they set ``reshard_after_forward``, and HYBRID keeps copies of the shards.
        reshard_after_forward: of version 2: free whole parameters after the forward, and gather them again in
            the backward (``FSDP_RESHARD_AFTER_FORWARD``, True).
        backward_prefetch: of version 1: gather the next part before (``"BACKWARD_PRE"``) or after
            (``"BACKWARD_POST"``) the gradients of this one, or ``"NO_PREFETCH"``
            (``FSDP_BACKWARD_PREFETCH``, BACKWARD_PRE).
        forward_prefetch: of version 1: gather the next part while one computes (``FSDP_FORWARD_PREFETCH``).
        use_orig_params: of version 1: the user's own parameters stay, so that frozen ones and several groups
            of an optimizer may share a part (``FSDP_USE_ORIG_PARAMS``, True).
        sync_module_states: of version 1: begin with the weights of rank 0; False saves the exchange where all
            ranks have read the same, which is looked at (``FSDP_SYNC_MODULE_STATES``, True).
        limit_all_gathers: of version 1: gather only a few parts ahead.
        mixed_precision_policy: a ``MixedPrecisionPolicy`` (version 1: ``MixedPrecision``), its fields as a
            dict, or ``"bf16"``/``"fp16"``; None follows the precision of the ``Accelerator``.
        auto_wrap_policy: which modules are gathered by themselves: ``"transformer_based_wrap"``,
            ``"size_based_wrap"``, ``"no_wrap"``, or a policy of ``torch.distributed.fsdp.wrap``
            (``FSDP_AUTO_WRAP_POLICY``, no_wrap).
        cpu_offload: keep parameters, gradients and optimizer state on the host (``FSDP_OFFLOAD_PARAMS``).
        ignored_modules: frozen modules that stay whole, or a regular expression of their names
            (``FSDP_IGNORED_MODULES``).
        state_dict_type: what checkpoints hold: ``"SHARDED_STATE_DICT"``, ``"FULL_STATE_DICT"``, or in version
            1 ``"LOCAL_STATE_DICT"`` (``FSDP_STATE_DICT_TYPE``; sharded in version 2, full in version 1).
        state_dict_config, optim_state_dict_config: follow ``state_dict_type``.
        param_init_fn: fills a module whose parameters are on the meta device on rank 0 too.
        activation_checkpointing: recompute the activations of each wrapped module in the backward
            (``FSDP_ACTIVATION_CHECKPOINTING``).
        activation_checkpointing_offload: of version 2: keep what is left of them on the host
            (``FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD``).
        cpu_ram_efficient_loading: only rank 0 reads pretrained weights
            (``FSDP_CPU_RAM_EFFICIENT_LOADING``).
        transformer_cls_names_to_wrap: class names of the layers, a list or a text with commas; None takes the
            model's own ``_no_split_modules`` (``FSDP_TRANSFORMER_CLS_TO_WRAP``).
        min_num_params: parameters of a part under ``size_based_wrap`` (``FSDP_MIN_NUM_PARAMS``).
        replicate_size: copies of the shards under HYBRID (``FSDP_REPLICATE_SIZE``, one for each machine).
        hybrid: whether there are such copies; follows ``sharding_strategy``.

    Raises:
        SettingError: a value is wrong, contradicts another, or is an option of the other version.
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
    replicate_size: int | None = None

    def __post_init__(self) -> None:
        self._found = found = load(FSDPSettings, code=self._given())
        settings = found.value
        self.fsdp_version = settings.fsdp_version or 2
        self.hybrid = False
        self._ahead: tuple[bool, bool] = False, True
        # What version 1's policy asked of buffers; version 2 leaves them alone.
        self._buffers: Any = getattr(self.mixed_precision_policy, "buffer_dtype", None)
        self._ignored: set[str] = set()
        self._meaning.settle(self, found)
        self._settle_policy(settings)
        self._settle_memory(settings)
        self.replicate_size = settings.fsdp_replicate_size
        self.validate_mixed_precision_policy()
        self.set_state_dict_type(settings.fsdp_state_dict_type or self._meaning.STATE_DICT_TYPE)

    @property
    def _meaning(self) -> ModuleType:
        return _VERSIONS[self.fsdp_version]

    def _given(self) -> dict[str, Any]:
        """The fields as settings: objects of torch by their names, those that no text can say left out."""
        names = self.transformer_cls_names_to_wrap
        policy, offload = self.auto_wrap_policy, self.cpu_offload
        text = self.fsdp_version
        return {
            "fsdp_version": int(text) if isinstance(text, str) and text.isdigit() else text,
            "fsdp_sharding_strategy": named(self.sharding_strategy),
            "fsdp_reshard_after_forward": named(self.reshard_after_forward),
            "fsdp_backward_prefetch": named(self.backward_prefetch),
            "fsdp_state_dict_type": named(self.state_dict_type),
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
            "fsdp_replicate_size": self.replicate_size,
            "fsdp_ignored_modules": self.ignored_modules if isinstance(self.ignored_modules, str) else None,
        }

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
        if self.cpu_ram_efficient_loading is not None:
            # Libraries that load pretrained models look there.
            environ.write({"FSDP_CPU_RAM_EFFICIENT_LOADING": str(bool(self.cpu_ram_efficient_loading))})
        self.cpu_ram_efficient_loading = bool(settings.fsdp_cpu_ram_efficient_loading)

    @property
    def offloads(self) -> bool:
        """Whether parameters rest on the host."""
        return self._meaning.offloads(self.cpu_offload)

    def copies(self, size: int, nodes: int) -> int:
        """Into how many groups with a copy of the shards each the processes fall; 1 shares over all.

        Args:
            size: processes.
            nodes: machines.

        Raises:
            SettingError: the processes cannot be divided so.
        """
        if not self.hybrid:
            return 1
        copies = nodes if self.replicate_size is None else self.replicate_size
        if copies < 1 or size % copies:
            raise SettingError(
                f"HYBRID_SHARD with {copies} copies of the shards, and {size} processes",
                why="each copy is shared by as many processes as any other",
                fix=f"replicate_size: {' or '.join(map(str, _divisors(size)))}",
            )
        if size > 1 and size == copies and self.fsdp_version == 1:
            raise SettingError(
                f"HYBRID_SHARD with {copies} copies for {size} processes shares nothing",
                why="every process would hold a whole copy, which replicas do with less traffic",
                fix="leave sharded training out to train replicas, set replicate_size (FSDP_REPLICATE_SIZE) "
                f"below {size}, or use FULL_SHARD, which shares over all processes",
            )
        return copies

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """What checkpoints hold from now on; None only brings the two configurations in line.

        Raises:
            SettingError: there is no such type in this version.
        """
        if state_dict_type is not None:
            name = word(named(state_dict_type), StateDictType, "state_dict_type")
            self.state_dict_type = StateDictType[name]
        configs = self._meaning.state_configs(self.state_dict_type)
        self.state_dict_config, self.optim_state_dict_config = configs

    def set_cpu_offload(self) -> None:
        """Brings ``cpu_offload`` into the form that torch takes."""
        self.cpu_offload = self._meaning.offload(self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Refuses a ``cpu_offload`` that was assigned and is no policy.

        Raises:
            SettingError: it is none.
        """
        kind = type(self._meaning.offload(None)).__name__
        if not isinstance(self.cpu_offload, type(self._meaning.offload(None))):
            raise SettingError(
                f"cpu_offload is a {type(self.cpu_offload).__name__}",
                fix=f"use True, False or, in version {self.fsdp_version}, an object {kind}",
            )

    def validate_mixed_precision_policy(self) -> None:
        """Brings ``mixed_precision_policy`` into the form that torch takes.

        Raises:
            UnknownNameError: it names a number format or a field that does not exist.
        """
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = self._meaning.precision(self.mixed_precision_policy)

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Makes blocks compute in a number format, reduce gradients in float32, and keep their weights.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"``, or a dtype.
            buffer_autocast: of version 1: buffers have it too.
            override: also where a policy was given.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = self._meaning.precision(mixed_precision, buffer_autocast)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Looks up the classes that a policy by class names means in ``model``.

        Raises:
            UnknownNameError: the model has no module of a class that was named; the nearest is suggested.
            SettingError: no class was named, and the model names none itself.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = layers(model, self.transformer_cls_names_to_wrap)
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
            classes = layers(model, self.transformer_cls_names_to_wrap)
            return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        if self.auto_wrap_policy is size_based_auto_wrap_policy:
            return functools.partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params or 0)
        return self.auto_wrap_policy


def _divisors(size: int) -> list[int]:
    """Numbers of copies, more than one, that leave two processes or more to share each."""
    return [n for n in range(2, size // 2 + 1) if size % n == 0] or [1]


def policy_of(precision: str, version: int = 2) -> Any:
    """What a ``mixed_precision`` of the ``Accelerator`` means: weights in float32, reduction in float32."""
    return None if precision == "no" else _VERSIONS[version].precision(precision)
