"""``FullyShardedDataParallelPlugin``: how a model is sharded, from code or from the launcher.

The options are declared in ``launch_settings/fsdp.py``; their meaning stands in ``fsdp1_options.py`` and
``fsdp2_options.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.core import environ
from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import SettingError, UnknownNameError, warn_user
from accelerate.core.setting import SettingsWithOrigins, describe_fields, load_fields
from accelerate.strategy.launch_settings.fsdp import POLICIES, FSDPSettings, implied_versions
from accelerate.strategy.sharding import fsdp1_options, fsdp2_options
from accelerate.strategy.sharding.fsdp2_options import parse_enum_name

_POLICY: dict[str, Callable[..., bool] | None] = dict(
    zip(POLICIES, (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None), strict=True)
)
_VERSIONS: dict[int, ModuleType] = {1: fsdp1_options, 2: fsdp2_options}


@check_arguments
@describe_fields
@dataclass
class FullyShardedDataParallelPlugin(FSDPSettings):
    """The options of FSDP; a field that is None takes its environment variable, then its default.

    Beside texts, fields take torch's own objects: members of its enumerations, a policy of
    ``torch.distributed.fsdp.wrap``, an offload policy, and the ignored modules themselves, which are frozen
    or hold DTensors of the program. In FSDP2 ``sharding_strategy`` sets ``reshard_after_forward``, and
    HYBRID is HSDP.

    Attributes:
        limit_all_gathers: of FSDP1: prefetch only a few units.
        mixed_precision_policy: a ``MixedPrecisionPolicy`` (FSDP1: ``MixedPrecision``), its fields as a dict,
            or ``"bf16"``/``"fp16"``; None follows the precision of the ``Accelerator``, which sets it.
        state_dict_config, optim_state_dict_config: torch's; they decide ``state_dict_type`` where it is not
            given. Those of another type are replaced.
        param_init_fn: fills the parameters and buffers of one module, some of which are on the meta device
            on rank 0 too. What it leaves without values needs a load before the first forward.
        hybrid: whether there are replicas (HSDP); follows ``sharding_strategy``.

    Raises:
        SettingError: a value is wrong, contradicts another, or is an option of the other version.
    """

    __distributed_type__ = "FSDP"

    def __post_init__(self) -> None:
        # Libraries that load pretrained models read the variable: what code says is written there.
        rank0_loading = self.cpu_ram_efficient_loading
        objects = {
            "auto_wrap_policy": Callable[..., Any],
            "cpu_offload": CPUOffload | OffloadPolicy,
            "ignored_modules": Iterable[nn.Module],
        }
        version = self.fsdp_version
        self._settings = loaded = load_fields(
            self,
            objects=objects,
            fsdp_version=int(version) if isinstance(version, str) and version.isdigit() else version,
        )
        self.hybrid = False
        self._prefetch_flags: tuple[bool, bool] = False, True
        # The buffer dtype of an FSDP1 policy; FSDP2 does not cast buffers.
        self._buffer_dtype: Any = None
        self._ignored_options: set[str] = set()
        # The precision of the Accelerator that has set the policy, and that policy.
        self._implied: tuple[str, Any] = "no", None
        # Of ``transformer_cls_names_to_wrap``, the classes of some model that was prepared.
        self._layer_names: set[str] = set()
        self._models_without_layers: set[str] = set()
        if loaded.value.fsdp_version is None:
            self.fsdp_version = self._imply_version(loaded)
        options = _VERSIONS[self.fsdp_version]
        options.apply_settings(self, loaded)
        if isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy: Any = _POLICY[self.auto_wrap_policy]
        names = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        self.transformer_cls_names_to_wrap: Any = list(names) if names else None
        self.cpu_offload: Any = options.parse_offload(self.cpu_offload)
        if rank0_loading is not None:
            environ.set_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": str(self.cpu_ram_efficient_loading)})
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        if self.state_dict_type is None:
            # FullStateDictConfig, ShardedOptimStateDictConfig, ...: programs give one without the type.
            configs = (self.state_dict_config, self.optim_state_dict_config)
            words = {type(config).__name__.partition("State")[0].removesuffix("Optim") for config in configs}
            kinds = [kind.name for kind in StateDictType if kind.name.partition("_")[0].title() in words]
            # 1.x has version 1, and so its type, where no version is given. transformers' Trainer saves
            # weights only under the full one, and else nothing, without a word.
            default = (fsdp1_options if loaded.value.fsdp_version is None else options).STATE_DICT_TYPE
            self.state_dict_type: Any = StateDictType[kinds[0] if kinds else default]
            self.set_state_dict_type()
        else:
            self.set_state_dict_type(self.state_dict_type)

    def _imply_version(self, loaded: SettingsWithOrigins[FSDPSettings]) -> int:
        """Return 1 where an option or an object of FSDP1 is given, and none of FSDP2; else 2."""
        versions = implied_versions(loaded)
        policy = self.mixed_precision_policy
        objects = (self.cpu_offload, policy, self.state_dict_config, self.optim_state_dict_config)
        for version, options in _VERSIONS.items():
            if any(isinstance(value, options.CLASSES) for value in objects):
                versions.add(version)
        if not self.limit_all_gathers or (isinstance(policy, Mapping) and "buffer_dtype" in policy):
            versions.add(1)
        return 1 if 1 in versions and 2 not in versions else 2

    @property
    def offloads_params(self) -> bool:
        """True if parameters are offloaded to the host."""
        offload = self.cpu_offload  # torch's object, of FSDP2 or of FSDP1
        return isinstance(offload, CPUOffloadPolicy) or bool(getattr(offload, "offload_params", False))

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
            # More than one replica, and two ranks or more that shard each.
            divisors = [n for n in range(2, size // 2 + 1) if size % n == 0] or [1]
            raise SettingError(
                f"HYBRID_SHARD with {copies} replicas, and {size} processes",
                why="each replica is sharded over as many processes as any other",
                fix=f"replicate_size: {' or '.join(map(str, divisors))}",
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

        Configurations of that type stay, but without an accelerator nothing is moved to the host in FSDP1.

        Raises:
            SettingError: there is no such type in this FSDP version.
        """
        if state_dict_type is not None:
            name = parse_enum_name(state_dict_type, StateDictType, "state_dict_type")
            self.state_dict_type = StateDictType[name]
        defaults = _VERSIONS[self.fsdp_version].state_dict_configs(self.state_dict_type)
        given = (self.state_dict_config, self.optim_state_dict_config)
        self.state_dict_config: Any
        self.optim_state_dict_config: Any
        self.state_dict_config, self.optim_state_dict_config = (
            replace(config, offload_to_cpu=config.offload_to_cpu and default.offload_to_cpu)
            if type(config) is type(default)
            else default
            for config, default in zip(given, defaults, strict=True)
        )

    def set_cpu_offload(self) -> None:
        """Convert ``cpu_offload`` to torch's object."""
        self.cpu_offload = _VERSIONS[self.fsdp_version].parse_offload(self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Refuse a ``cpu_offload`` that was assigned and is no offload policy.

        Raises:
            SettingError: it is none.
        """
        kind = type(_VERSIONS[self.fsdp_version].parse_offload(None))
        if not isinstance(self.cpu_offload, kind):
            raise SettingError(
                f"cpu_offload is a {type(self.cpu_offload).__name__}",
                fix=f"use True, False or, in FSDP{self.fsdp_version}, an object {kind.__name__}",
            )

    def validate_mixed_precision_policy(self) -> None:
        """Convert ``mixed_precision_policy`` to torch's object.

        Raises:
            UnknownNameError: it names a dtype or a field that does not exist.
        """
        if (policy := self.mixed_precision_policy) is not None:
            self._buffer_dtype = getattr(policy, "buffer_dtype", self._buffer_dtype)
            self.mixed_precision_policy: Any = _VERSIONS[self.fsdp_version].parse_precision(policy)

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
            self.mixed_precision_policy = _VERSIONS[self.fsdp_version].parse_precision(
                mixed_precision, buffer_autocast
            )

    def imply_mixed_precision(self, precision: str) -> None:
        """Set the policy of an ``Accelerator`` where none was given; that of another one is replaced."""
        known, policy = self._implied
        if precision != known and self.mixed_precision_policy is policy:
            policy = None if precision == "no" else _VERSIONS[self.fsdp_version].parse_precision(precision)
            self.mixed_precision_policy, self._implied = policy, (precision, policy)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace a policy by class names with one that has the classes of ``model``.

        Raises:
            UnknownNameError: the model has no module of a class that was named; the nearest is suggested.
        """
        self.auto_wrap_policy = self.policy_for(model)

    def policy_for(self, model: nn.Module) -> Any:
        """Return the wrap policy for one model, with its classes; None wraps nothing.

        As in 1.x, a model without layers of a known class is one unit.
        """
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = find_layer_classes(model, self.transformer_cls_names_to_wrap, self._layer_names)
            if not classes and (kind := type(model).__name__) not in self._models_without_layers:
                self._models_without_layers.add(kind)
                warn_user(
                    f"auto_wrap_policy is transformer_based_wrap, and no layers of a {kind} are known: the "
                    "whole model is one FSDP unit, and each all-gather takes all of its memory. To cut it: "
                    "transformer_cls_names_to_wrap (--fsdp_transformer_layer_cls_to_wrap): some of "
                    f"{', '.join(sorted({type(part).__name__ for part in model.modules()}))}"
                )
            return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        if self.auto_wrap_policy is size_based_auto_wrap_policy:
            # As in 1.15: without a number, or with 0, the model is one unit. The launcher gives a number.
            least = self.min_num_params
            return functools.partial(size_based_auto_wrap_policy, min_num_params=least) if least else None
        return self.auto_wrap_policy


def find_layer_classes(
    model: nn.Module, names: Iterable[str] | None, elsewhere: Container[str] = ()
) -> set[type[nn.Module]]:
    """Return the classes of these names in ``model``; with None those in its ``_no_split_modules``.

    A wrapper that names none itself has those of the models in it. Without any, the set is empty.

    Args:
        model: the model.
        names: the names.
        elsewhere: of these names, those of classes in other models, which this one may lack.

    Raises:
        UnknownNameError: no model has a module of a class that was named.
    """
    classes = {type(part).__name__: type(part) for part in model.modules()}
    for name in names or ():
        if name not in classes and name not in elsewhere:
            raise UnknownNameError(
                "class to wrap", name, classes, where=f"in the model {type(model).__name__}"
            )
    if names is None:
        own: Any = getattr(model, "_no_split_modules", None)
        names = own or {n for part in model.modules() for n in getattr(part, "_no_split_modules", None) or ()}
    return {classes[name] for name in names or () if name in classes}
