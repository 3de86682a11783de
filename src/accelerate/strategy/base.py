"""The strategy protocol: what ``prepare`` does to a bundle, and how gradients and states are shared.

A strategy is one file of this folder with ``PLUGIN = <subclass of Strategy>``, or the ``strategy.py`` of a
folder. Its methods about gradients stand in ``protocol/gradient_sync.py``. It may have more capabilities,
which callers find by its type: ``EngineStrategy`` owns the optimizer and the step, ``DataSharding`` has ranks
that read the same samples, ``ReductionMonitor`` knows gradients that no reduction has seen, ``OpenGradients``
can save and restore the gradients of an incomplete window, and more at the end of this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import nn

from accelerate.core.argument_checks import KwargsHandler
from accelerate.core.option_report import (
    OptionStatus,
    RequestedOption,
    non_default_options,
    requested_options,
)
from accelerate.core.setting import load_settings
from accelerate.strategy.protocol.gradient_sync import GradientSync
from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

H = TypeVar("H", bound=KwargsHandler)
# "prepared" is what a program's own ``prepare_model`` or the like has returned; "other" is none of these.
ObjectKind = Literal["model", "optimizer", "scheduler", "loader", "prepared", "other"]


@dataclass
class PrepareBundle:
    """The objects of one ``prepare``, in the order of the call.

    Attributes:
        objects: the objects; steps replace items in place, and append models that they prepare anew,
            and the plan the optimizer of DeepSpeed's configuration.
        kinds: the kind of each.
        training: False when the models are only evaluated.
        place_on_device: per object, whether it is moved to the device.
        accumulation_steps: micro-batches per optimizer step.
        split_batches: a batch of a loader is that of all ranks together.
        step_scheduler_once: an optimizer step advances a schedule once, also without ``split_batches``.
        program_shards_sequences: context parallelism is the program's, in batches and in attention.
        program_reduces_gradients: so is the mean of gradients: it has set ``distributed_type`` to NO. A rank
            may prepare alone, and have another optimizer.
        strict: an option that cannot take effect is an error, not a warning.
        given_unwrapped: prepared models for which the user's own object was given, as after ``unwrap_model``.
    """

    objects: list[Any]
    kinds: list[ObjectKind]
    training: bool = True
    place_on_device: list[bool] = field(default_factory=list)
    accumulation_steps: int = 1
    split_batches: bool = False
    step_scheduler_once: bool = False
    program_shards_sequences: bool = False
    program_reduces_gradients: bool = False
    strict: bool = False
    given_unwrapped: list[nn.Module] = field(default_factory=list)

    def schedule_advances(self, data_shards: int) -> int:
        """Return how often an optimizer step advances a schedule: once, or once for each data shard."""
        return 1 if self.split_batches or self.step_scheduler_once else data_shards

    def batch_sizes(self, data_shards: int) -> list[int]:
        """Return the samples per rank of a batch of each loader that tells its batch size."""
        shared_by, sizes = data_shards if self.split_batches else 1, list[int]()
        for loader in self.objects_of("loader"):
            holders = loader, getattr(loader, "batch_sampler", None)
            size = next(filter(None, (getattr(each, "batch_size", None) for each in holders)), None)
            # One that is prepared already has joined so many batches of the user's.
            joined = getattr(getattr(loader, "data_shard", None), "micro_batches", 1)
            if isinstance(size, int):
                sizes.append(max(1, size // (shared_by * joined)))
        return sizes

    def positions(self, kind: ObjectKind) -> list[int]:
        """Return the indices of the objects of one kind."""
        return [index for index, item in enumerate(self.kinds) if item == kind]

    def objects_of(self, kind: ObjectKind) -> list[Any]:
        """Return the objects of one kind, in order."""
        return [item for item, is_a in zip(self.objects, self.kinds, strict=True) if is_a == kind]

    def replace(self, kind: ObjectKind, function: Callable[[Any], Any]) -> None:
        """Replace every object of one kind by ``function(object)``; a repeated object once."""
        replacements: dict[int, tuple[Any, Any]] = {}
        for index, item in enumerate(self.objects):
            if self.kinds[index] == kind:
                if id(item) not in replacements:
                    replacements[id(item)] = item, function(item)
                self.objects[index] = replacements[id(item)][1]


@dataclass(frozen=True)
class PrepareStep:
    """One step of ``prepare``: a dry run prints it, ``prepare`` applies it.

    Attributes:
        name: the action, in a word or two.
        reason: why, as one clause; a function returns one that takes a walk over the model.
        apply: changes the bundle.
        memory: returns the bytes of the bundle on this process's device before and after, if they change.
    """

    name: str
    reason: str | Callable[[], str]
    apply: Callable[[PrepareBundle], None]
    memory: Callable[[], tuple[int, int]] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason if isinstance(self.reason, str) else self.reason()}"


@dataclass(frozen=True)
class StrategyRequest:
    """The request by which a strategy is chosen.

    Attributes:
        world: the open world.
        plugins: the strategy plugins given to the ``Accelerator``, without the absent ones.
        handlers: the kwargs handlers given to it, by class.
        precision: name of the precision.
        autocast_format: the 16-bit format in which it computes, ``"no"`` for the format of the weights; None
            where that is the precision itself.
        parallelism: the sizes of the dimensions of a mesh, a ``ParallelismConfig``.
        passed_over: strategies that it asks for and that cannot serve it, once one is chosen.
    """

    world: World
    plugins: tuple[Any, ...] = ()
    handlers: Mapping[type, Any] = field(default_factory=dict)
    precision: str = "no"
    autocast_format: str | None = None
    parallelism: Any = None
    passed_over: list[Any] = field(default_factory=list)

    @property
    def compute_format(self) -> str:
        """The format of all that no layer converts by itself: ``"bf16"``, ``"fp16"`` or ``"no"``."""
        return self.autocast_format or self.precision

    def handler(self, kind: type[H]) -> H:
        """Return the handler of that class, or one with its defaults."""
        return self.handlers.get(kind) or kind()


@dataclass(frozen=True)
class RankDataShard:
    """The part of the data that this process reads.

    Attributes:
        count: the number of parts.
        index: this process's part.
        counts_samples: of the ranks with the same part (tensor or pipeline parallel), this one counts the
            samples where each is counted once.
        micro_batches: the batches of the user's loader that make one batch of the prepared one.
    """

    count: int
    index: int
    counts_samples: bool = True
    micro_batches: int = 1


@dataclass(frozen=True)
class StrategySelection:
    """The settings and the plugin that ask for a strategy; everything asks for one without either.

    Attributes:
        settings: the launcher's settings that are its own; the first class holds the switch.
        plugin_class: the name of its plugin's class, whose module may be slow to import.
        plugin_argument: the argument of ``Accelerator`` that takes the plugin, for reports.
        min_world_size: it is not used with fewer ranks.
        device_type: it is for devices of this type; empty for all.
        unused_reason: why not, where somebody has asked for it.
    """

    settings: tuple[type[Any], ...] = ()
    plugin_class: str = ""
    plugin_argument: str = ""
    min_world_size: int = 1
    device_type: str = ""
    unused_reason: str = ""

    def plugins(self, request: StrategyRequest) -> list[Any]:
        """Return its plugins in ``request``, also those in a dict of several."""
        given = (*request.plugins, request.parallelism)
        flat = (item for each in given for item in (each.values() if isinstance(each, Mapping) else [each]))
        return [item for item in flat if self.plugin_class in {kind.__name__ for kind in type(item).__mro__}]

    def is_requested(self, request: StrategyRequest) -> bool:
        """Return whether the device is of its type, and the plugin or the launcher's switch asks for it."""
        if self.device_type not in ("", request.world.device.type):
            return False
        if not self.settings or self.plugins(request):
            return True
        return any(vars(load_settings(self.settings[0]).value).values())

    def options(self, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Yield the given settings and plugins as requested options."""
        for settings in self.settings:
            yield from requested_options(load_settings(settings))
        for plugin in self.plugins(request) if self.plugin_argument else ():
            yield RequestedOption(
                self.plugin_argument, type(plugin).__name__, f"the argument {self.plugin_argument}"
            )


class Strategy(GradientSync, ABC):
    """The way in which one training is distributed over processes.

    Attributes:
        name: its name, for reports.
        selection: the settings and the plugin by which it is chosen.
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
    selection: ClassVar[StrategySelection] = StrategySelection()
    priority: ClassVar[int] = 0
    handler_class: ClassVar[type[KwargsHandler] | None] = None
    replicates_model: ClassVar[bool] = False
    shards_params: ClassVar[bool] = False
    supports_loss_weighting: ClassVar[bool] = True
    owns_step: ClassVar[bool] = False
    world: World

    def __init__(self, request: StrategyRequest) -> None:
        self.request = request
        self.world = request.world
        self.handler: Any = request.handler(self.handler_class) if self.handler_class else None
        self.local_training = False
        self._requested_options = list(self.requested_options(request))

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Return whether it can serve ``request``, which asks for it as ``selection`` says."""
        return request.world.size >= cls.selection.min_world_size

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Yield the options by which ``request`` asks for it, and those that are only its own."""
        yield from cls.selection.options(request)
        if cls.handler_class is not None:
            yield from non_default_options(request.handlers.get(cls.handler_class))

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterable[OptionStatus]:
        """Return the status of each option, read from prepared models (none yet: pending).

        Called after each ``prepare``; it must neither change anything nor communicate.
        """
        return (option.report_applied() for option in self._requested_options)

    def distributed_type(self, world: World) -> str:
        """Return the ``DistributedType``: that of its switch in files, of a plugin, or of the world's device.

        A plugin counts if it is asked for: a device mesh shards by FSDP, also where nobody says FSDP.
        """
        for switch in self.selection.settings[:1]:
            if hasattr(switch, "__distributed_type__"):
                return str(switch.__distributed_type__)
        for name, plugin in self.plugins.items() if not self.selection.device_type else ():
            names = name, getattr(plugin, "__switch__", "")
            asked = any(option.value and option.name in names for option in self._requested_options)
            if asked and hasattr(plugin, "__distributed_type__"):
                return str(plugin.__distributed_type__)
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

    # --- states: by default each process has the full state

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's full state dict, by the names that checkpoints use."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load what ``model_state`` returned; the result lists missing and unexpected names."""
        return model.load_state_dict(state, strict=strict)

    def check_materialized(self, model: nn.Module) -> None:
        """Refuse to save a prepared model that has no values yet; each rank checks its own part.

        Raises:
            PrepareError: with the names of what is empty.
        """

    @property
    def saves_sharded(self) -> bool:
        """True if checkpoints are sharded by default; only where the strategy ``shards_params``."""
        return False

    def model_checkpoint_view(self, model: nn.Module) -> Any:
        """Return the model as sharded checkpoints see it: a module with the user's names.

        A sharded parameter is a ``DTensor``, or a stand-in of one where only names and shapes count.
        """
        return self.unwrap(model)

    def optimizer_checkpoint_view(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer as sharded checkpoints see it, over ``model_checkpoint_view``'s parameters."""
        return optimizer

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Return the optimizer's full state, as its ``state_dict`` would be in one process; collective.

        It is complete on rank 0; other ranks may get less.

        Args:
            optimizer: the user's own.
            models: the prepared models, whose parameters it has.
        """
        return optimizer.state_dict()

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load what ``optimizer_state`` returned; every rank passes the full state, and keeps its shard."""
        optimizer.load_state_dict(dict(state))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return model


class SubclassGathering:
    """A capability: all-gathers go through ``fsdp_pre_all_gather`` of a parameter's tensor subclass."""

    @property
    def gathers_tensor_subclasses(self) -> bool:
        """Return whether they do in this layout."""
        return True


class CustomSharding:
    """A capability: programs may change or shard models by functions of their own, before it does."""

    def adapt_objects(self, accelerator: Any, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the objects that ``prepare`` gets, with models sharded that a program shards by itself."""
        raise NotImplementedError


class ModuleWrapping:
    """A capability: a model trains inside a module of the back end, which a program may make by itself."""

    @staticmethod
    def inner_module(model: Any) -> Any:
        """Return the module inside such a wrapper; any other model as it is."""
        raise NotImplementedError


class WrapperNames:
    """A capability: torch's class around a model has other names in its state than the user's module."""

    def wrapped_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict by the names of the class that torch wraps around a model."""
        raise NotImplementedError


class BatchPlacement:
    """A capability: prepared loaders are adapted to the back end, and batches annotated on the device."""

    def batch_placer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Adapt a prepared loader in place; return what is called with each batch on the device, or None."""
        raise NotImplementedError


class DataSharding:
    """A capability: ranks hold parts of one model or of one sequence, and read the same samples.

    ``Strategy.data_shard`` and ``Strategy.model_parallel_size`` say how many read the same; these methods
    say what is done with the samples.
    """

    def data_shard_for(self, loader: Any) -> RankDataShard:
        """Return the ``data_shard`` of one loader, before it is prepared."""
        raise NotImplementedError

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Return what cuts a batch of ``loader`` to what this rank computes; None where it stays whole."""
        raise NotImplementedError

    def merge_model_parallel(self, values: Any, *, as_objects: bool = False) -> Any:
        """Merge the outputs of ranks with the same samples into what one rank would compute; collective."""
        raise NotImplementedError

    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context for forward and backward in which whole sequences are sharded (context parallel).

        Args:
            buffers: tensors with whole sequences, sharded in place.
            dims: the dimension of each that counts tokens.
            kept: those that need not be whole again afterwards.
        """
        raise NotImplementedError

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader of whole sequences into a loader of this rank's slices."""
        raise NotImplementedError

    def check_compiler(self) -> None:
        """Refuse models that are to be compiled, where they cannot be.

        Raises:
            SettingError: with the reason.
        """
        raise NotImplementedError

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names that this rank lacks, where ranks hold different layers (pipeline parallel).

        Returns:
            Names of its state that this process has not; and those of buffers that it saves, for the first
            process has them not.
        """
        raise NotImplementedError

    def original_group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Return the names in each group as the user made it, where this rank holds only some; else None."""
        raise NotImplementedError


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the first name of its parameter."""
    names = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(p)] for name, p in every if names[id(p)] != name}


def number_groups(groups: Iterable[Mapping[str, Any]], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Return an optimizer's groups with numbers for their parameters, which count on from group to group."""
    numbered: list[dict[str, Any]] = []
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        numbered.append({**options, "params": list(range(start, start + size))})
        start += size
    return numbered


class EngineCheckpoint(Protocol):
    """A checkpoint in an engine's own format (DeepSpeed), read as full state dicts.

    Attributes:
        index: the number of the model in the checkpoint.
        folder: the folder of the engine's files.
        tied_names: names of parameters that are tied, by the name under which they are kept.
        weights: by the names of the user's module; one is read whenever it is asked for.
        shapes: dtype and shape of each weight; files that are missing are an error.
        has_optimizer_state: whether there is an optimizer's state.
    """

    index: int
    folder: Path
    tied_names: Mapping[str, str]
    has_optimizer_state: bool

    @property
    def shapes(self) -> Mapping[str, tuple[torch.dtype, torch.Size]]: ...

    @property
    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the optimizer's state dict; its ``state`` is read lazily.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: those of its groups, for groups that nothing was saved of.
        """
        ...


class EarlyPartitioning:
    """A capability: models may be partitioned while they are made, before there is an ``Accelerator``."""

    @classmethod
    def join_world(cls, world: World) -> None:
        """Make the ranks of a world that opens known to its library; called where its switch asks for it."""
        raise NotImplementedError


class EngineStrategy(Strategy):
    """A strategy that replaces the whole bundle in its steps by an engine: DeepSpeed and Megatron-LM.

    The engine casts and scales by itself, runs ``optimizer.step``, ``zero_grad``, the schedule and clipping,
    and may have a checkpoint format of its own. The wrappers around the user's objects only pass on to it.
    """

    owns_step: ClassVar[bool] = True
    # The classes around its "optimizer" and "scheduler", as "module:class": they are of the floor above.
    _wrapper_classes: ClassVar[Mapping[str, str]] = {}

    def wrapper_class(self, kind: str) -> Any:
        """Return the class that wraps an ``"optimizer"`` or ``"scheduler"``; None for the usual one."""
        module, _, name = self._wrapper_classes.get(kind, "").partition(":")
        return getattr(import_module(module), name) if module else None

    def forget(self) -> None:
        """Release everything that was prepared."""

    @property
    def accumulation_steps(self) -> int | None:
        """The micro-batches per step in the engine's own configuration; None if it does not say."""
        return None

    @property
    def configured_kinds(self) -> Sequence[str]:
        """The kinds of objects that its own configuration makes: ``"optimizer"``, ``"scheduler"``."""
        return ()

    # --- the loop

    def should_divide_loss(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the loss is divided by the number of micro-batches before ``backward(**kwargs)``."""
        return False

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Take one optimizer step; ``step`` runs the user's optimizer through the precision."""
        return step()

    def advances_scheduler(self, scheduler: Any) -> bool:
        """Return whether the step of the engine advances this schedule too."""
        return False

    def optimizer_params(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """Return the parameters of prepared models that an optimizer changes."""
        return (p for group in optimizer.param_groups for p in group["params"])

    def has_nonzero_grads(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether ``parameters``, all those of ``models``, have gradients that are not zero."""
        return any(bool(grad.any()) for grad in self.gradients(parameters))

    def rescale_gradients(self, models: Iterable[nn.Module], factor: float) -> bool:
        """Multiply the gradients of ``models``; return False where the caller multiplies ``gradients``."""
        return False

    def rescale_short_window(self, factor: float) -> None:
        """Multiply accumulated gradients by ``factor``: the next micro-batch closes the window early."""

    # --- states

    def master_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state for a checkpoint: the master weights, where the compute weights are narrower."""
        return self.model_state(model)

    def state_template(self, model: nn.Module) -> Mapping[str, Any]:
        """Return a state dict with the names, shapes and ties of the model; its values do not count."""
        return self.model_checkpoint_view(model).state_dict()

    def engine_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """Return the writers of the engine's own checkpoint files, one for each of ``models`` that it trains.

        Each has ``name``, ``save(folder)`` and ``load(folder)``, says by ``present(folder)`` whether it was
        written there, and has as ``objects`` what it stands for.

        Args:
            models: all prepared models.
            options: more arguments of the save or the load; those of a load have ``strict`` too.
        """
        return []

    @classmethod
    def read_engine_checkpoints(cls, folder: Path) -> Sequence[EngineCheckpoint]:
        """Return the engine checkpoints in ``folder``, for other strategies and tools to read."""
        return ()
