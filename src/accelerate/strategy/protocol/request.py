"""The inputs of a strategy: the request it is chosen by, the objects of one ``prepare``, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.world.world import World

H = TypeVar("H", bound=KwargsHandler)
ObjectKind = Literal["model", "optimizer", "scheduler", "loader", "other"]


@dataclass
class PrepareBundle:
    """The objects of one ``prepare``, in the order of the call.

    Attributes:
        objects: the objects; steps replace items in place.
        kinds: the kind of each.
        training: False when the models are only evaluated.
        place_on_device: per object, whether it is moved to the device.
        accumulation_steps: micro-batches per optimizer step.
        split_batches: a batch of a loader is that of all ranks together.
    """

    objects: list[Any]
    kinds: list[ObjectKind]
    training: bool = True
    place_on_device: list[bool] = field(default_factory=list)
    accumulation_steps: int = 1
    split_batches: bool = False

    def positions(self, kind: ObjectKind) -> list[int]:
        """Return the indices of the objects of one kind."""
        return [index for index, item in enumerate(self.kinds) if item == kind]

    def objects_of(self, kind: ObjectKind) -> list[Any]:
        """Return the objects of one kind, in order."""
        return [self.objects[index] for index in self.positions(kind)]

    def replace(self, kind: ObjectKind, function: Callable[[Any], Any]) -> None:
        """Replace every object of one kind by ``function(object)``; a repeated object once."""
        replacements: dict[int, tuple[Any, Any]] = {}
        for index in self.positions(kind):
            item = self.objects[index]
            if id(item) not in replacements:
                replacements[id(item)] = item, function(item)
            self.objects[index] = replacements[id(item)][1]


@dataclass(frozen=True)
class PrepareStep:
    """One step of ``prepare``: a dry run prints it, ``prepare`` applies it.

    Attributes:
        name: the action, in a word or two.
        reason: why, as one clause.
        apply: changes the bundle.
        bytes_before, bytes_after: memory of the bundle on this process's device, 0 when it does not change.
    """

    name: str
    reason: str
    apply: Callable[[PrepareBundle], None]
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True)
class StrategyRequest:
    """The request by which a strategy is chosen.

    Attributes:
        world: the open world.
        plugins: the strategy plugins given to the ``Accelerator``, without the absent ones.
        handlers: the kwargs handlers given to it, by class.
        precision: name of the precision.
        parallelism: the sizes of the dimensions of a mesh, a ``ParallelismConfig``.
    """

    world: World
    plugins: tuple[Any, ...] = ()
    handlers: Mapping[type, Any] = field(default_factory=dict)
    precision: str = "no"
    parallelism: Any = None

    def handler(self, kind: type[H]) -> H:
        """Return the handler of that class, or one with its defaults."""
        return self.handlers.get(kind) or kind()
