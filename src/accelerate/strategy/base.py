"""The strategy protocol: what ``prepare`` does to a bundle, and how gradients and states are shared.

A strategy is one file of this folder with ``PLUGIN = <subclass of Strategy>``, or the ``strategy.py`` of a
folder. Its methods about gradients and states stand in the files of ``protocol``. It may have more
capabilities, which callers find by its type: ``EngineStrategy`` owns the optimizer and the step
(``protocol/engine_strategy.py``), ``DataSharding`` has ranks that read the same samples, ``ReductionMonitor``
knows gradients that no reduction has seen, and ``OpenGradients`` can save and restore the gradients of an
incomplete window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.option_report import OptionStatus, RequestedOption, non_default_options
from accelerate.strategy.protocol.data_sharding import DataSharding, RankDataShard
from accelerate.strategy.protocol.gradient_sync import (
    NO_CONTEXT,
    GradientSync,
    ReductionMonitor,
    ZeroBackward,
    graph_leaves,
    run_with_zero_gradients,
)
from accelerate.strategy.protocol.open_gradients import OpenGradients
from accelerate.strategy.protocol.request import ObjectKind, PrepareBundle, PrepareStep, StrategyRequest
from accelerate.strategy.protocol.state_io import StateIO
from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "NO_CONTEXT",
    "DataSharding",
    "ObjectKind",
    "OpenGradients",
    "PrepareBundle",
    "PrepareStep",
    "RankDataShard",
    "ReductionMonitor",
    "Strategy",
    "StrategyRequest",
    "ZeroBackward",
    "graph_leaves",
    "run_with_zero_gradients",
]


class Strategy(GradientSync, StateIO, ABC):
    """The way in which one training is distributed over processes.

    Attributes:
        name: its name, for reports.
        priority: of several that claim a request the highest wins.
        handler_class: the kwargs handler that configures it, if any.
        replicates_model: every rank holds a whole copy of each model, and can take local steps.
        local_training: ranks take local steps now, and gradients are not reduced; LocalSGD and DiLoCo set it.
        shards_params: every rank holds a shard of each parameter and of the optimizer state. Then the
            strategy places the model itself, ``model_state`` is collective, and all ranks take part in each
            backward, also those without items.
        supports_loss_weighting: gradients may be scaled between backward and step (``num_items``).
        owns_step: an engine runs the step and scales by itself: it is an ``EngineStrategy``.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    handler_class: ClassVar[type[KwargsHandler] | None] = None
    replicates_model: ClassVar[bool] = False
    shards_params: ClassVar[bool] = False
    supports_loss_weighting: ClassVar[bool] = True
    owns_step: ClassVar[bool] = False

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

    @abstractmethod
    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return what will be done to ``bundle``, in order; it must not change anything by itself."""

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The plugins that configure it, by the names that scripts use."""
        return {}

    # --- ranks and samples

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh with named dimensions; None where there is only one dimension."""
        return None

    @property
    def data_shard(self) -> RankDataShard:
        """The part of the data that this rank reads; tensor parallel ranks read the same."""
        return RankDataShard(self.world.size, self.world.rank)

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks, with this one, that compute the same loss from the same tokens."""
        return 1
