"""The strategy protocol: what ``prepare`` does to a bundle, and who runs backward, step and clip.

A strategy is one file of this folder with ``PLUGIN = <subclass of Strategy>``. It may leave the optimizer and
the step to the user (``single``, ``ddp``), or own them (an engine): then it replaces the whole bundle in its
steps and sets ``owns_step``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import nn

from accelerate.core.effects import Effect, Option, differing
from accelerate.core.errors import NotBuiltError
from accelerate.core.handler import KwargsHandler
from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

H = TypeVar("H", bound=KwargsHandler)
Kind = Literal["model", "optimizer", "scheduler", "loader", "other"]


@dataclass
class Bundle:
    """The objects of one ``prepare``, in the order they were given.

    Attributes:
        objects: what was given; steps replace items in place.
        kinds: the kind of each.
        training: False when the models are only evaluated.
        place: per object, whether it is moved to the device.
    """

    objects: list[Any]
    kinds: list[Kind]
    training: bool = True
    place: list[bool] = field(default_factory=list)

    def positions(self, kind: Kind) -> list[int]:
        """Indices of the objects of one kind."""
        return [index for index, item in enumerate(self.kinds) if item == kind]

    def of(self, kind: Kind) -> list[Any]:
        """The objects of one kind, in order."""
        return [self.objects[index] for index in self.positions(kind)]

    def replace(self, kind: Kind, function: Callable[[Any], Any]) -> None:
        """Replaces every object of one kind by ``function(object)``; one given twice is replaced once."""
        made: dict[int, tuple[Any, Any]] = {}
        for index in self.positions(kind):
            item = self.objects[index]
            if id(item) not in made:
                made[id(item)] = item, function(item)
            self.objects[index] = made[id(item)][1]


@dataclass(frozen=True)
class Step:
    """One thing that ``prepare`` will do; printed by a dry run, then applied.

    Attributes:
        name: what, in a word or two.
        reason: why, as one clause.
        apply: does it to the bundle.
        bytes_before, bytes_after: memory of the bundle on this process's device, 0 when it does not change.
    """

    name: str
    reason: str
    apply: Callable[[Bundle], None]
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True)
class Request:
    """What a strategy is chosen by.

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
        """The handler of that class, or one with its defaults."""
        return self.handlers.get(kind) or kind()


@dataclass(frozen=True)
class Share:
    """Which part of the data this process has.

    Attributes:
        count: into how many parts they are shared out.
        index: this process's part.
        speaks: of the processes that have the same part, this one counts where samples are counted once.
    """

    count: int
    index: int
    speaks: bool = True


class Written(Protocol):
    """What an engine has written of one model by itself, as one process would have it.

    Attributes:
        index: the number of the model in the checkpoint.
        folder: where it lies.
        shared: names of parameters that are tied, by the name under which they are kept.
        weights: by the names of the user's module; one is read whenever it is asked for.
        shapes: type and shape of each.
        trained: whether there is an optimizer's state.
    """

    index: int
    folder: Path
    shared: Mapping[str, str]
    weights: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]]
    trained: bool

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The optimizer's state; ``state`` in it is read late.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: those of its groups, for groups that nothing was saved of.
        """
        ...


# Entered in every step: made once.
NOTHING: AbstractContextManager[None] = nullcontext()


def leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """The parameters and other leaves that the graph of ``loss`` reaches."""
    found: set[torch.Tensor] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        ahead += [following for following, _ in node.next_functions]
    return found


class Strategy(ABC):
    """How one training is spread over processes.

    Attributes:
        name: its name, for reports.
        priority: of several that claim a request the highest wins.
        owns_step: it runs ``optimizer.step``, ``zero_grad``, the schedule and clipping itself; the wrappers
            around the user's optimizer and scheduler then only pass on to it.
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
    owns_step: ClassVar[bool] = False
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

    @abstractmethod
    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """What will be done to ``bundle``, in order. Must not change anything by itself."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs the backward pass of a loss that is scaled already."""
        loss.backward(**kwargs)

    def divides(self, kwargs: dict[str, Any]) -> bool:
        """Whether a loss is divided by its micro-batches before ``backward``, which gets ``kwargs``."""
        return not self.owns_step

    def shortened(self, factor: float) -> None:
        """The next micro-batch closes a window early: an engine multiplies what it holds by ``factor``."""

    def forget(self) -> None:
        """Everything that was prepared is used no more."""

    def advances(self, scheduler: Any) -> bool:
        """Whether the step of an engine advances this schedule too."""
        return False

    @property
    def accumulation(self) -> int | None:
        """How many micro-batches a step has, as an engine's own configuration says; None if it does not."""
        return None

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The plugins that configure it, by the names under which scripts look for them."""
        return {}

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a mesh of named dimensions, where there is more than one dimension."""
        return None

    @property
    def share(self) -> Share:
        """Which part of the data this process reads; processes that share a layer read the same."""
        return Share(self.world.size, self.world.rank)

    @property
    def peers(self) -> int:
        """How many processes, this one too, compute the very same loss: of the same tokens."""
        return 1

    @property
    def replicas(self) -> int:
        """Over how many processes reducing a gradient takes the mean."""
        return self.world.size // self.peers

    def share_of(self, loader: Any) -> Share:
        """The same for one loader, before it is prepared."""
        return self.share

    def part_of(self, loader: Any) -> Callable[[Any], Any] | None:
        """``own_part`` for the batches of ``loader``, before it is prepared; None where they stay whole."""
        return self.own_part

    def joined(self, values: Any) -> Any:
        """What processes with the same samples have computed, as one of them would have computed it alone.

        All processes must call it.
        """
        return values

    def own_part(self, batch: Any) -> Any:
        """What this process computes of a batch that is on its device: its part of each sequence, say."""
        return batch

    def sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Around forward and backward of whole sequences, which are cut where processes share them.

        Args:
            buffers: tensors with whole sequences, cut in place.
            dims: the dimension of each that counts tokens.
            kept: those that need not be whole again afterwards.
        """
        return NOTHING

    def adapted(self, loader: Any, model: nn.Module) -> Any:
        """A loader of whole sequences as one of this process's parts."""
        return loader

    def synchronises(self, model: nn.Module) -> bool:
        """Whether a backward through ``model`` now leaves gradients that are reduced over the processes."""
        return True

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """A backward that adds zero to gradients, in which other processes find what they wait for.

        Args:
            models: those concerned.
            parameters: their trained parameters.
            reached: what the graph of the loss reaches; parameters that it does not use are left alone.
            loss: a mean of nothing, which may be NaN.
        """
        used = [parameter for parameter in parameters if parameter in reached] or parameters
        torch.autograd.backward(tuple(used), tuple(torch.zeros_like(parameter) for parameter in used))

    def reached(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """The parameters and other leaves that the graph of ``loss`` reaches."""
        return leaves(loss)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """The parameters of ``model`` that optimizers hold, also between a forward and its backward."""
        return list(model.parameters())

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What has accumulated for ``parameters`` on this process; changing it changes the gradients."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def held(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """The parameters of prepared models that an optimizer changes."""
        return (p for group in optimizer.param_groups for p in group["params"])

    def holds(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """Whether anything but zeros has accumulated for ``parameters``: all those of ``models``."""
        return any(bool(grad.any()) for grad in self.gradients(parameters))

    def rescale(self, models: Iterable[nn.Module], factor: float) -> bool:
        """Multiplies what has accumulated for ``models``; False where that is done to ``gradients``."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether there may be gradients that ``zero_grad`` of an optimizer does not know."""
        return False

    def accumulating(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; ``sync`` False keeps gradients local."""
        return NOTHING

    def waiting(self, models: Iterable[nn.Module]) -> int:
        """Bytes that gradients take more on this process between the micro-batches of a window."""
        return 0

    def apart(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around steps that this process takes by itself: nothing of ``model`` is exchanged.

        Only where the strategy ``replicates``.
        """
        return self.accumulating((model,), sync=False)

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Makes the next backward reduce gradients though its forward ran without."""

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scales gradients so that their global norm is at most ``max_norm``; the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clamps each gradient element to ``[-limit, limit]``."""
        nn.utils.clip_grad_value_(parameters, limit)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Takes one optimizer step; ``step`` runs the user's optimizer through the precision."""
        return step()

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clears gradients; ``zero`` clears those of the user's optimizer."""
        zero()

    def state(self, model: nn.Module) -> dict[str, Any]:
        """The model's full state, by the names that checkpoints use."""
        return model.state_dict()

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads what ``state`` gave; the result lists missing and unexpected names."""
        return model.load_state_dict(state, strict=strict)

    def check_filled(self, models: Iterable[nn.Module], operation: str) -> None:
        """Refuses to save models that have no values yet. Where the strategy ``shards``, all call it.

        Args:
            models: prepared.
            operation: what is done.

        Raises:
            PrepareError: on all processes, with the names of what is empty.
        """

    def exact_state(self, model: nn.Module) -> dict[str, Any]:
        """What a checkpoint holds of the model, where it computes with other weights than it trains."""
        return self.state(model)

    def like(self, model: nn.Module) -> Mapping[str, Any]:
        """A state with the names, shapes and ties of the model; its values do not count."""
        return self.as_saved(model).state_dict()

    def own_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """What an engine writes into a checkpoint by itself, for those of ``models`` that it trains.

        Each has ``name``, ``save(folder)`` and ``load(folder)``, says by ``present(folder)`` whether it was
        written there, and has as ``objects`` what it stands for.

        Args:
            models: all prepared models.
            options: more arguments of the save or the load.
        """
        return []

    @classmethod
    def written(cls, folder: Path) -> Sequence[Written]:
        """What its engine has written into a checkpoint by itself, for other strategies and tools to read."""
        return ()

    def agreement(self) -> Callable[[torch.Tensor], None] | None:
        """Makes a flag of each process the greatest of all, in place; None where all find the same.

        A gradient that is not finite, say, is seen by the process that has it.
        """
        return None

    @property
    def saves_sharded(self) -> bool:
        """Whether checkpoints hold what each process has, unless somebody asks for whole files.

        Only where the strategy ``shards``.
        """
        return False

    def as_saved(self, model: nn.Module) -> Any:
        """The model as checkpoints in parts see it: a module by the user's names.

        What is cut is a distributed tensor, or a stand-in of one where only names and shapes count.
        """
        return self.unwrap(model)

    def elsewhere(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Where processes hold different parts of a model, and not of each parameter.

        Returns:
            Names of its state that this process has not; and those of buffers that it saves, for the first
            process has them not.
        """
        return frozenset(), frozenset()

    def made_for(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """The names in each group as it was made, where this process holds some of them only; else None."""
        return None

    def optimizer_as_saved(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as they see it: of the parameters that ``as_saved`` has."""
        return optimizer

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """The optimizer's full state, as its ``state_dict`` would be in one process.

        All processes must call it. It is complete on process 0; others may get less.

        Args:
            optimizer: the user's own.
            models: the prepared models, whose parameters it has.
        """
        return optimizer.state_dict()

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Loads what ``optimizer_state`` gave; every process gets it whole, and takes its part."""
        optimizer.load_state_dict(dict(state))

    @staticmethod
    def inner(model: Any) -> Any:
        """The module inside of what this strategy, or its library, puts around one; else ``model``."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        return model
