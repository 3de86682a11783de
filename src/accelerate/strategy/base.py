"""The strategy protocol: what ``prepare`` does to a bundle, and who runs backward, step and clip.

A strategy is one file of this folder with ``PLUGIN = <subclass of Strategy>``. It may leave the optimizer and
the step to the user (``single``, ``ddp``), or own them (an engine): then it replaces the whole bundle in its
steps and sets ``owns_step``. What it is asked besides stands in the files of ``protocol``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from accelerate.core.effects import Effect, Option, differing
from accelerate.core.errors import NotBuiltError
from accelerate.core.handler import KwargsHandler
from accelerate.strategy.protocol.data import NOTHING, Share, SharesData
from accelerate.strategy.protocol.request import Bundle, Kind, Request, Step
from accelerate.strategy.protocol.states import HasStates, Written
from accelerate.strategy.protocol.training import Trains, leaves
from accelerate.world.world import World

__all__ = ["NOTHING", "Bundle", "Kind", "Request", "Share", "Step", "Strategy", "Written", "leaves"]


class Strategy(SharesData, Trains, HasStates, ABC):
    """How one training is spread over processes.

    Attributes:
        name: its name, for reports.
        priority: of several that claim a request the highest wins.
        owns_precision: it casts and scales by itself; the precision then leaves models and loss alone.
        handler_class: the kwargs handler that configures it, if any.
        planned: what will come, for a strategy that is not built yet; it claims its requests to refuse them.
        instead: what to do until then.
        proved: it has run on what it is made for, not only with something that stands in for it.
        replicates: every process holds a whole copy of each model, and could train it by itself for a while.
        trains_apart: that is so now: gradients stay on their process.
        shards: every process holds a part of each parameter, and of what optimizers keep for it.
        weighs: gradients may be scaled between backward and step, as losses that are weighted by items want.
        spreads: checkpoints may hold what each process has, by names of parameters; an engine has a form of
            its own.
        wrappers: for an engine, the classes that stand before its ``"optimizer"`` and ``"scheduler"``, as
            ``"module:class"``.
        owner: the ``Accelerator`` that trains by it; None before there is one.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    owns_precision: ClassVar[bool] = False
    handler_class: ClassVar[type[KwargsHandler] | None] = None
    planned: ClassVar[str] = ""
    instead: ClassVar[str] = ""
    proved: ClassVar[bool] = True
    replicates: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    spreads: ClassVar[bool] = True
    wrappers: ClassVar[Mapping[str, str]] = {}
    owner: Any = None

    def __init__(self, request: Request) -> None:
        self.request = request
        self.world = request.world
        self.handler: Any = request.handler(self.handler_class) if self.handler_class else None
        self.trains_apart = False

    @classmethod
    @abstractmethod
    def claims(cls, request: Request) -> bool:
        """Whether this strategy is meant by ``request``."""

    @classmethod
    def idle(cls, request: Request) -> str:
        """Why it does not claim ``request`` although it is asked for; empty if that is not so.

        It is worth a warning.
        """
        return ""

    @classmethod
    def asked(cls, request: Request) -> Iterable[Option]:
        """The options by which ``request`` asks for it, and those that are only its own."""
        return differing(request.handlers.get(cls.handler_class)) if cls.handler_class else ()

    def effects(self, models: Sequence[nn.Module]) -> Iterable[Effect]:
        """What became of its options, seen on prepared models (none yet: they are pending).

        Called after each ``prepare``; it must neither change nor exchange anything.
        """
        return (option.applied() for option in self.asked(self.request))

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """The contract's name for this strategy on the world's device."""
        return world.hardware.distributed_type

    def check(self) -> None:
        """Refuses, with the reason, what cannot work here.

        Raises:
            SettingError, WorldError, NotBuiltError: by what is wrong.
        """
        if self.planned:
            what = f"the strategy {self.name} is not built yet"
            raise NotBuiltError(what, why=self.planned, fix=self.instead)

    def check_compiler(self) -> None:
        """Refuses models that are to be compiled, where they cannot be.

        Raises:
            SettingError: with the reason.
        """

    @abstractmethod
    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """What will be done to ``bundle``, in order. Must not change anything by itself."""

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The plugins that configure it, by the names under which scripts look for them."""
        return {}

    def forget(self) -> None:
        """Everything that was prepared is used no more."""
