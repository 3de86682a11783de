"""The strategy protocol: what ``prepare`` does to a bundle, and who runs backward, step and clipping.

A strategy is one file of this folder with ``PLUGIN = <subclass of Strategy>``, or the ``strategy.py`` of a
folder. It may leave the optimizer and the step to the user (``single``, ``ddp``), or own them (an engine such
as DeepSpeed): then it replaces the whole bundle in its steps and sets ``owns_step``. Its methods about data,
states and the loop stand in the files of ``protocol``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from accelerate.core.errors import FeatureNotBuiltError
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.option_report import OptionStatus, RequestedOption, non_default_options
from accelerate.strategy.protocol.data_sharding import NO_CONTEXT, DataSharding, RankDataShard
from accelerate.strategy.protocol.request import ObjectKind, PrepareBundle, PrepareStep, StrategyRequest
from accelerate.strategy.protocol.state_methods import EngineCheckpoint, StrategyStateDictBase
from accelerate.strategy.protocol.training_methods import (
    StrategyTrainingBase,
    ZeroBackward,
    graph_leaves,
    run_with_zero_gradients,
)
from accelerate.world.world import World

__all__ = [
    "NO_CONTEXT",
    "EngineCheckpoint",
    "ObjectKind",
    "PrepareBundle",
    "PrepareStep",
    "RankDataShard",
    "Strategy",
    "StrategyRequest",
    "ZeroBackward",
    "graph_leaves",
    "run_with_zero_gradients",
]


class Strategy(DataSharding, StrategyTrainingBase, StrategyStateDictBase, ABC):
    """The way in which one training is distributed over processes.

    Attributes:
        name: its name, for reports.
        priority: of several that claim a request the highest wins.
        owns_precision: it casts and scales by itself; the precision then leaves models and loss alone.
        handler_class: the kwargs handler that configures it, if any.
        planned_feature: what will come, for a strategy that is not built yet; it claims requests to refuse
            them.
        alternative: what to use until then.
        hardware_tested: it has run on the hardware it is made for, not only on a simulation.
        replicates_model: every rank holds a whole copy of each model, and can take local steps.
        local_training: ranks take local steps now; gradients are not reduced.
        shards_params: every rank holds a shard of each parameter and of the optimizer state.
        supports_loss_weighting: gradients may be scaled between backward and step (``num_items``).
        supports_sharded_save: checkpoints may hold the shard of each rank, by names of parameters; an engine
            has its own format.
        wrapper_classes: for an engine, the classes around its ``"optimizer"`` and ``"scheduler"``, as
            ``"module:class"``.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    owns_precision: ClassVar[bool] = False
    handler_class: ClassVar[type[KwargsHandler] | None] = None
    planned_feature: ClassVar[str] = ""
    alternative: ClassVar[str] = ""
    hardware_tested: ClassVar[bool] = True
    replicates_model: ClassVar[bool] = False
    shards_params: ClassVar[bool] = False
    supports_loss_weighting: ClassVar[bool] = True
    supports_sharded_save: ClassVar[bool] = True
    wrapper_classes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, request: StrategyRequest) -> None:
        self.request = request
        self.world = request.world
        self.handler: Any = request.handler(self.handler_class) if self.handler_class else None
        self.local_training = False

    @classmethod
    @abstractmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Return whether ``request`` asks for this strategy."""

    @classmethod
    def unused_reason(cls, request: StrategyRequest) -> str:
        """Return why it does not claim ``request`` although it is asked for, or an empty string."""
        return ""

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterable[RequestedOption]:
        """Return the options by which ``request`` asks for it, and those that are only its own."""
        return non_default_options(request.handlers.get(cls.handler_class)) if cls.handler_class else ()

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterable[OptionStatus]:
        """Return the status of each option, read from prepared models (none yet: pending).

        Called after each ``prepare``; it must neither change anything nor communicate.
        """
        return (option.report_applied() for option in self.requested_options(self.request))

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """Return the ``DistributedType`` of this strategy on the world's device."""
        return world.hardware.distributed_type

    def check(self) -> None:
        """Refuse, with the reason, what cannot work here.

        Raises:
            SettingError, WorldError, FeatureNotBuiltError: by what is wrong.
        """
        if self.planned_feature:
            message = f"the strategy {self.name} is not built yet"
            raise FeatureNotBuiltError(message, why=self.planned_feature, fix=self.alternative)

    def check_compiler(self) -> None:
        """Refuse models that are to be compiled, where they cannot be.

        Raises:
            SettingError: with the reason.
        """

    @abstractmethod
    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return what will be done to ``bundle``, in order; it must not change anything by itself."""

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The plugins that configure it, by the names that scripts use."""
        return {}

    def forget(self) -> None:
        """Release everything that was prepared."""
