"""``FullyShardedDataParallelPlugin``: how a model is sharded, from code or from the launcher.

The meaning of the options stands in ``fsdp1_options.py`` and ``fsdp2_options.py``.
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
from accelerate.core.setting import load_settings
from accelerate.strategy.launch_settings.fsdp import POLICIES, FSDPSettings
from accelerate.strategy.sharding import fsdp1_options, fsdp2_options
from accelerate.strategy.sharding.parsing import enum_name, find_layer_classes, parse_enum_name

_POLICY: dict[str, Callable[..., bool] | None] = dict(
    zip(POLICIES, (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None), strict=True)
)
_VERSIONS: dict[int, ModuleType] = {1: fsdp1_options, 2: fsdp2_options}


@dataclass
class FullyShardedDataParallelPlugin:
    """The options of FSDP; a field that is None takes its environment variable, then its default.

    Attributes:
        fsdp_version: 2 (FSDP2, torch's ``fully_shard``) or 1 (FSDP1, its class ``FullyShardedDataParallel``)
            (``FSDP_VERSION``, 2).
        sharding_strategy: of FSDP1: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"``, ``"NO_SHARD"``,
            ``"HYBRID_SHARD"`` or ``"HYBRID_SHARD_ZERO2"`` (``FSDP_SHARDING_STRATEGY``, FULL_SHARD). In
            FSDP2 they set ``reshard_after_forward``, and HYBRID is HSDP.
        reshard_after_forward: of FSDP2: free unsharded parameters after the forward, and all-gather them
            again in the backward (``FSDP_RESHARD_AFTER_FORWARD``, True).
        backward_prefetch: of FSDP1: all-gather the next unit before (``"BACKWARD_PRE"``) or after
            (``"BACKWARD_POST"``) the gradients of this one, or ``"NO_PREFETCH"``
            (``FSDP_BACKWARD_PREFETCH``, BACKWARD_PRE).
        forward_prefetch: of FSDP1: all-gather the next unit while one computes (``FSDP_FORWARD_PREFETCH``).
        use_orig_params: of FSDP1: keep the user's own parameters, so that frozen ones and several groups of
            an optimizer may share a unit (``FSDP_USE_ORIG_PARAMS``, True).
        sync_module_states: of FSDP1: begin with the weights of rank 0; False saves the broadcast where all
            ranks have read the same weights, which is checked (``FSDP_SYNC_MODULE_STATES``, True).
        limit_all_gathers: of FSDP1: prefetch only a few units.
        mixed_precision_policy: a ``MixedPrecisionPolicy`` (FSDP1: ``MixedPrecision``), its fields as a dict,
            or ``"bf16"``/``"fp16"``; None follows the precision of the ``Accelerator``.
        auto_wrap_policy: which modules are FSDP units: ``"transformer_based_wrap"``, ``"size_based_wrap"``,
            ``"no_wrap"``, or a policy of ``torch.distributed.fsdp.wrap`` (``FSDP_AUTO_WRAP_POLICY``,
            no_wrap).
        cpu_offload: keep parameters, gradients and optimizer state on the host (``FSDP_OFFLOAD_PARAMS``).
        ignored_modules: frozen modules that are not sharded, or a regular expression of their names
            (``FSDP_IGNORED_MODULES``).
        state_dict_type: what checkpoints hold: ``"SHARDED_STATE_DICT"``, ``"FULL_STATE_DICT"``, or in FSDP1
            ``"LOCAL_STATE_DICT"`` (``FSDP_STATE_DICT_TYPE``; sharded in FSDP2, full in FSDP1).
        state_dict_config, optim_state_dict_config: follow ``state_dict_type``.
        param_init_fn: fills a module whose parameters are on the meta device on rank 0 too.
        activation_checkpointing: recompute the activations of each FSDP unit in the backward
            (``FSDP_ACTIVATION_CHECKPOINTING``).
        activation_checkpointing_offload: of FSDP2: keep the checkpointed inputs on the host
            (``FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD``).
        cpu_ram_efficient_loading: only rank 0 reads pretrained weights
            (``FSDP_CPU_RAM_EFFICIENT_LOADING``).
        transformer_cls_names_to_wrap: class names of the layers, a list or a text with commas; None takes the
            model's own ``_no_split_modules`` (``FSDP_TRANSFORMER_CLS_TO_WRAP``).
        min_num_params: parameters of a unit under ``size_based_wrap`` (``FSDP_MIN_NUM_PARAMS``).
        replicate_size: replicas under HYBRID (``FSDP_REPLICATE_SIZE``, one for each machine).
        hybrid: whether there are replicas (HSDP); follows ``sharding_strategy``.

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
        self._settings = loaded = load_settings(FSDPSettings, code=self._code_settings())
        settings = loaded.value
        self.fsdp_version = settings.fsdp_version or 2
        self.hybrid = False
        self._prefetch_flags: tuple[bool, bool] = False, True
        # The buffer dtype of an FSDP1 policy; FSDP2 does not cast buffers.
        self._buffer_dtype: Any = getattr(self.mixed_precision_policy, "buffer_dtype", None)
        self._ignored_options: set[str] = set()
        self._version_options.apply_settings(self, loaded)
        self._apply_wrap_policy(settings)
        self._apply_memory(settings)
        self.replicate_size = settings.fsdp_replicate_size
        self.validate_mixed_precision_policy()
        self.set_state_dict_type(settings.fsdp_state_dict_type or self._version_options.STATE_DICT_TYPE)

    @property
    def _version_options(self) -> ModuleType:
        return _VERSIONS[self.fsdp_version]

    def _code_settings(self) -> dict[str, Any]:
        """Return the fields as settings: torch's enumerations by their names, other objects left out."""
        names = self.transformer_cls_names_to_wrap
        policy, offload = self.auto_wrap_policy, self.cpu_offload
        text = self.fsdp_version
        return {
            "fsdp_version": int(text) if isinstance(text, str) and text.isdigit() else text,
            "fsdp_sharding_strategy": enum_name(self.sharding_strategy),
            "fsdp_reshard_after_forward": enum_name(self.reshard_after_forward),
            "fsdp_backward_prefetch": enum_name(self.backward_prefetch),
            "fsdp_state_dict_type": enum_name(self.state_dict_type),
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

    def _apply_wrap_policy(self, settings: FSDPSettings) -> None:
        if self.auto_wrap_policy is None or isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy = _POLICY[settings.fsdp_auto_wrap_policy or "NO_WRAP"]
        names = settings.fsdp_transformer_layer_cls_to_wrap
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        self.transformer_cls_names_to_wrap = list(names) if names else None
        self.min_num_params = settings.fsdp_min_num_params
        if self.ignored_modules is None:
            self.ignored_modules = settings.fsdp_ignored_modules

    def _apply_memory(self, settings: FSDPSettings) -> None:
        if not isinstance(self.cpu_offload, OffloadPolicy | CPUOffload):
            self.cpu_offload = settings.fsdp_offload_params
        self.set_cpu_offload()
        if self.cpu_ram_efficient_loading is not None:
            # Libraries that load pretrained models look there.
            environ.set_variables(
                {"FSDP_CPU_RAM_EFFICIENT_LOADING": str(bool(self.cpu_ram_efficient_loading))}
            )
        self.cpu_ram_efficient_loading = bool(settings.fsdp_cpu_ram_efficient_loading)

    @property
    def offloads_params(self) -> bool:
        """True if parameters are offloaded to the host."""
        return self._version_options.offloads_params(self.cpu_offload)

    def replicate_count(self, size: int, nodes: int) -> int:
        """Return the number of replicas (HSDP); 1 shards over all ranks.

        Args:
            size: the world size.
            nodes: machines.

        Raises:
            SettingError: the replicas do not divide the world size.
        """
        if not self.hybrid:
            return 1
        copies = nodes if self.replicate_size is None else self.replicate_size
        if copies < 1 or size % copies:
            raise SettingError(
                f"HYBRID_SHARD with {copies} replicas, and {size} processes",
                why="each replica is sharded over as many processes as any other",
                fix=f"replicate_size: {' or '.join(map(str, _divisors(size)))}",
            )
        if size > 1 and size == copies and self.fsdp_version == 1:
            raise SettingError(
                f"HYBRID_SHARD with {copies} replicas for {size} processes shards nothing",
                why="every process would hold a whole model, which DDP does with less communication",
                fix="leave FSDP out to train by DDP, set replicate_size (FSDP_REPLICATE_SIZE) below "
                f"{size}, or use FULL_SHARD, which shards over all processes",
            )
        return copies

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set what checkpoints hold; None only updates the two configurations.

        Raises:
            SettingError: there is no such type in this FSDP version.
        """
        if state_dict_type is not None:
            name = parse_enum_name(enum_name(state_dict_type), StateDictType, "state_dict_type")
            self.state_dict_type = StateDictType[name]
        configs = self._version_options.state_dict_configs(self.state_dict_type)
        self.state_dict_config, self.optim_state_dict_config = configs

    def set_cpu_offload(self) -> None:
        """Convert ``cpu_offload`` to torch's object."""
        self.cpu_offload = self._version_options.parse_offload(self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Refuse a ``cpu_offload`` that was assigned and is no offload policy.

        Raises:
            SettingError: it is none.
        """
        kind = type(self._version_options.parse_offload(None)).__name__
        if not isinstance(self.cpu_offload, type(self._version_options.parse_offload(None))):
            raise SettingError(
                f"cpu_offload is a {type(self.cpu_offload).__name__}",
                fix=f"use True, False or, in FSDP{self.fsdp_version}, an object {kind}",
            )

    def validate_mixed_precision_policy(self) -> None:
        """Convert ``mixed_precision_policy`` to torch's object.

        Raises:
            UnknownNameError: it names a dtype or a field that does not exist.
        """
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = self._version_options.parse_precision(self.mixed_precision_policy)

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set a policy that computes in one dtype, reduces gradients in float32, and keeps the weights.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"``, or a dtype.
            buffer_autocast: of FSDP1: cast buffers too.
            override: also where a policy was given.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = self._version_options.parse_precision(
                mixed_precision, buffer_autocast
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace a policy by class names with one that has the classes of ``model``.

        Raises:
            UnknownNameError: the model has no module of a class that was named; the nearest is suggested.
            SettingError: no class was named, and the model names none itself.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = find_layer_classes(model, self.transformer_cls_names_to_wrap)
            self.auto_wrap_policy = functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls=classes
            )
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            self.auto_wrap_policy = functools.partial(
                size_based_auto_wrap_policy, min_num_params=self.min_num_params or 0
            )

    def policy_for(self, model: nn.Module) -> Any:
        """Return the wrap policy for one model, with its classes; None wraps nothing. Changes nothing."""
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = find_layer_classes(model, self.transformer_cls_names_to_wrap)
            return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        if self.auto_wrap_policy is size_based_auto_wrap_policy:
            return functools.partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params or 0)
        return self.auto_wrap_policy


def _divisors(size: int) -> list[int]:
    """Return numbers of replicas, more than one, that leave two ranks or more to shard each."""
    return [n for n in range(2, size // 2 + 1) if size % n == 0] or [1]


def precision_policy(precision: str, version: int = 2) -> Any:
    """Return the FSDP policy of a ``mixed_precision``: weights and gradient reduction in float32."""
    return None if precision == "no" else _VERSIONS[version].parse_precision(precision)
