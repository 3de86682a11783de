"""``Accelerator``: the object a training script holds. Its components do the work; it delegates."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast, overload

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accelerate.checkpoint.discovery import Address, ProjectConfiguration
from accelerate.checkpoint.load import CheckpointLoadResult
from accelerate.checkpoint.rank_group import BackgroundSaveError
from accelerate.checkpoint.weight_files import save as save_object
from accelerate.core.argument_checks import (
    KwargsHandler,
    LazyClass,
    check_arguments,
    refuse_assignments,
)
from accelerate.core.errors import SettingError, WorldError, warn_user
from accelerate.core.option_report import OptionReport
from accelerate.core.setting import load_settings
from accelerate.core.value_types import PathText, PositiveInt
from accelerate.data.active_loaders import ActiveLoaders
from accelerate.data.prepare import DataLoaderConfiguration
from accelerate.data.skip_first_batches import skip_first_batches as skip
from accelerate.facade import runtime as runtimes
from accelerate.facade.checkpoint_manager import CheckpointManager, register_hook
from accelerate.facade.compilation import TorchDynamoPlugin
from accelerate.facade.enums import DistributedType, FP8BackendType, RNGName
from accelerate.facade.gradient_state import GradientAccumulationPlugin, GradientState
from accelerate.facade.launch_settings import ResumeSettings
from accelerate.facade.metrics import gather_for_metrics, mean_loss
from accelerate.facade.micro_batch_windows import GradientAccumulationWindows
from accelerate.facade.module_queries import extract_model_from_parallel
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.option_report import OptionReporter
from accelerate.facade.preemption import Preemption
from accelerate.facade.preparer import (
    PreparedObjects,
    PrepareOptions,
    PreparePlan,
    Preparer,
    object_kind,
)
from accelerate.facade.processes import ProcessMixin
from accelerate.facade.run_recorder import start_recorder
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.facade.state import AcceleratorState
from accelerate.facade.tracker_set import TrackerSet
from accelerate.facade.train_loop import AccumulationContext, TrainLoop, WatchedTrainLoop
from accelerate.facade.uneven_inputs import join_uneven_inputs
from accelerate.precision.autocast import AutocastKwargs, detach_autocast
from accelerate.precision.base import FORWARD_CONTEXTS, Precision
from accelerate.precision.fp16 import GradScalerKwargs
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import CustomSharding, DataSharding, EngineStrategy, ObjectKind, Strategy
from accelerate.track.base import GeneralTracker
from accelerate.watch.batch_size_search import release_memory, restore_after_failure
from accelerate.watch.profile import ProfileKwargs, record_profile, write_holders
from accelerate.world import collective
from accelerate.world.preemption import PreemptionKwargs
from accelerate.world.world import InitProcessGroupKwargs, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypeVarTuple, Unpack

    from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin
    from accelerate.strategy.parallelism.config import ParallelismConfig, TorchTensorParallelPlugin
    from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

    T2 = TypeVar("T2")
    Ts = TypeVarTuple("Ts")
else:  # slow to import: the types of arguments that most scripts do not give
    DeepSpeedPlugin = LazyClass("accelerate.strategy.deepspeed.plugin:DeepSpeedPlugin")
    MegatronLMPlugin = LazyClass("accelerate.strategy.megatron.plugin:MegatronLMPlugin")
    ParallelismConfig = LazyClass("accelerate.strategy.parallelism.config:ParallelismConfig")
    TorchTensorParallelPlugin = LazyClass("accelerate.strategy.parallelism.config:TorchTensorParallelPlugin")
    FullyShardedDataParallelPlugin = LazyClass(
        "accelerate.strategy.sharding.plugin:FullyShardedDataParallelPlugin"
    )

_UNSET: Any = object()
_DATA_OPTION = "The option of ``DataLoaderConfiguration``; used by the next ``prepare``."
T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)
HandlerT = TypeVar("HandlerT", bound=KwargsHandler)
logger = logging.getLogger(__name__)


class ComponentAttribute(Generic[T]):
    """A public attribute of ``Accelerator`` that a component holds: it is read and set there.

    Args:
        path: the attributes from the ``Accelerator`` to it, such as ``"_trackers.log_with"``.
        doc: its docstring.
    """

    def __init__(self, path: str, doc: str) -> None:
        holder, _, self._name = path.rpartition(".")
        self._holder, self._value, self.__doc__ = attrgetter(holder), attrgetter(path), doc

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        return self if instance is None else self._value(instance)  # type: ignore[return-value]

    def __set__(self, instance: Any, value: T) -> None:
        setattr(self._holder(instance), self._name, value)

    def __delete__(self, instance: Any) -> None:
        """Delete it where it is held: ``mock.patch.object`` deletes what it has set, and sets it again."""
        delattr(self._holder(instance), self._name)


class TypedProperty(property, Generic[T]):
    """A property whose values have a type, for those that a function makes."""

    if TYPE_CHECKING:

        def __get__(  # pyright: ignore[reportIncompatibleMethodOverride] - typeshed's gives itself
            self, instance: Any, owner: type | None = None
        ) -> T: ...


def _handler_property(
    kind: type[HandlerT], doc: str, *, assignable: bool = False
) -> TypedProperty[HandlerT | None]:
    """Return a property with the kwargs handler of a class; None where none was given."""

    def assign(self: Accelerator, handler: HandlerT | None) -> None:
        if not isinstance(handler, kind | None):
            raise SettingError(
                f"an options object of {type(handler).__name__} is assigned, not of {kind.__name__}",
                fix=f"assign a {kind.__name__}(...), or None for the defaults",
            )
        for handlers in (self.handlers, self.precision.handlers):
            handlers.pop(kind, None)
            if handler is not None:
                handlers[kind] = handler

    return TypedProperty(lambda self: self.handlers.get(kind), assign if assignable else None, doc=doc)


def _mesh_rank_property(dimension: str, doc: str) -> TypedProperty[int]:
    """Return a property with this process's rank along one dimension of the device mesh."""
    return TypedProperty(lambda self: _mesh_rank(self.strategy.mesh, dimension), doc=doc)


@check_arguments
class Accelerator(ProcessMixin):
    """Runs a training loop on whatever it is launched on.

    Several may be in use at once, each with its own choices. One that is given no precision, plugin, mesh or
    compiler has those of the one before, as in 1.15, while that is in use.

    Args:
        device_placement: move models and batches to the device.
        split_batches: see ``DataLoaderConfiguration``; ``dataloader_config`` counts first.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; None takes the launcher's choice.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU.
        dataloader_config: how loaders share data.
        deepspeed_plugin: trains with DeepSpeed, with these options; a dict has one for each kind of model.
        fsdp_plugin: trains with FSDP2, or FSDP1, with these options.
        torch_tp_plugin: tensor parallel by its size alone; ``parallelism_config`` says more.
        megatron_lm_plugin: trains with Megatron-LM, with these options.
        rng_types: random number generators that rank 0 broadcasts at the start of every epoch; the
            order of the samples is the same on all ranks without them.
        log_with: the trackers that ``init_trackers`` starts: a name, a ``GeneralTracker``, or several;
            ``"all"`` is every one whose package is installed.
        project_dir: folder of checkpoints and logs; ``project_config`` may give it too.
        project_config: names, number and place of checkpoints.
        gradient_accumulation_plugin: accumulation with all its options.
        step_scheduler_with_optimizer: schedulers advance with the optimizer, not at every call.
        kwargs_handlers: options of DDP, autocast, the gradient scaler, the profiler, ...
        dynamo_backend: compile prepared models in place, with this back end of ``torch.compile``.
        dynamo_plugin: likewise, with all options of ``torch.compile``.
        deepspeed_plugins: another name of ``deepspeed_plugin``.
        parallelism_config: sizes of the device mesh: data, tensor, context, sequence and pipeline parallel.
        strict: an option that cannot be applied is an error, not a warning; None takes ``--strict``.

    Attributes:
        state: the ``AcceleratorState`` that shows the choices of this object.
        handlers: the kwargs handlers that were given, by class.
        strategy, precision: how the training is distributed, and the number format of the forward pass.
        gradient_state: the ``GradientState`` of this object.

    Raises:
        SettingError: a value is wrong, or two contradict each other.
        WorldError: the environment does not describe a world.
        FeatureNotBuiltError: a requested feature is not built yet.
    """

    handlers: dict[type, KwargsHandler]
    state: AcceleratorState
    strategy: Strategy
    precision: Precision
    gradient_state: GradientState
    _is_preparing = False  # the objects of ``prepare`` are being adapted
    # Arguments of versions before 1.0 -> what says it now.
    _moved_arguments: ClassVar[dict[str, str]] = {
        **{
            name: f"use dataloader_config=DataLoaderConfiguration({name}=...)"
            for name in ("dispatch_batches", "even_batches", "use_seedable_sampler")
        },
        "fp16": 'use mixed_precision="fp16"',
        "logging_dir": "use project_dir=..., or ProjectConfiguration(logging_dir=...)",
    }

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = _UNSET,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: PositiveInt = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: list[RNGName] | None = None,
        log_with: Any = None,
        project_dir: PathText | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        strict: bool | None = None,
    ) -> None:
        self.handlers = runtimes.handlers_by_class(kwargs_handlers) if kwargs_handlers else {}
        runtime = self._runtime = runtimes.build_runtime(
            self.handlers,
            (deepspeed_plugin, deepspeed_plugins, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin),
            mixed_precision=mixed_precision,
            cpu=cpu,
            parallelism=parallelism_config,
            compiler=dynamo_plugin,
            compiler_backend=dynamo_backend,
            accumulation_plugin=gradient_accumulation_plugin,
            accumulation_steps=gradient_accumulation_steps,
        )
        split = None if split_batches is _UNSET else split_batches
        if dataloader_config is None and split is not None:
            dataloader_config = DataLoaderConfiguration(split_batches=split)
        loading = dataloader_config or DataLoaderConfiguration()
        options = PrepareOptions(device_placement, step_scheduler_with_optimizer, rng_types, loading)
        project = self._project = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and project.project_dir is None:
            project.set_directories(str(project_dir))
        self.state, self.gradient_state = runtime.state, runtime.gradients
        self.strategy, self.precision = runtime.strategy, runtime.precision
        AcceleratorState.newest_accelerator = weakref.ref(self)
        prepared = self._prepared = PreparedObjects()
        self._trackers = TrackerSet(log_with, project.logging_dir, runtime.world.rank == 0)
        self._option_reporter = OptionReporter(
            runtime,
            prepared,
            options,
            self._trackers,
            strict,
            mixed_precision=mixed_precision,
            cpu=cpu,
            split_batches=split,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
        )
        options.strict = self._trackers.strict = self._option_reporter.strict
        if self._trackers.missing:
            self._trackers.report_missing(options.strict)
        if self._option_reporter.record_folder is not None:
            self._trackers.recorder = start_recorder(self._option_reporter.record_folder, runtime.world)
        watch = self._trackers.recorder, self._option_reporter.checks_numerics
        if any(watch):
            self._loop = WatchedTrainLoop(runtime, prepared, *watch)
        else:
            self._loop = TrainLoop(runtime, prepared)
        first_step_checks = self._loop.check_first_step, self._option_reporter.report_first_step
        self._preparer = Preparer(runtime, prepared, options, first_step_checks)
        self._resume = load_settings(ResumeSettings)
        # Made when first used, unless they act before that: after the first step, and on a signal.
        if project.async_save:
            _ = self._checkpoints
        if PreemptionKwargs in self.handlers or self._resume.value.resume is not None:
            _ = self._preemption
        self._trigger: bool | None = None
        restore_after_failure(self, Accelerator._snapshot, shares_model=not runtime.strategy.replicates_model)

    @cached_property
    def _checkpoints(self) -> CheckpointManager:
        strict = self._option_reporter.strict
        return CheckpointManager(self._runtime, self._prepared, self._project, strict)

    @cached_property
    def _preemption(self) -> Preemption:
        reference = weakref.proxy(self)
        return Preemption(
            self._runtime, self._prepared, self._checkpoints, self._resume, lambda: reference._save_and_exit()
        )

    def _snapshot(self) -> Callable[[], None]:
        """Return a function that undoes what an attempt with too large a batch has changed."""
        components = self._prepared, self.gradient_state, self._runtime.precision, self._checkpoints
        undos, trigger = [component.snapshot() for component in components], self._trigger

        def restore() -> None:
            for undo in undos:
                undo()
            self._trigger = trigger

        return restore

    # --- attributes that components hold

    device_placement: ComponentAttribute[bool] = ComponentAttribute(
        "_preparer.options.device_placement", "Return whether models and batches go to the device."
    )
    step_scheduler_with_optimizer: ComponentAttribute[bool] = ComponentAttribute(
        "_preparer.options.step_scheduler_with_optimizer",
        "Return whether schedulers advance with the optimizer, not at every call.",
    )
    dataloader_config: ComponentAttribute[DataLoaderConfiguration] = ComponentAttribute(
        "_preparer.options.dataloader", "How loaders share data; used by the next ``prepare``."
    )
    project_configuration: ComponentAttribute[ProjectConfiguration] = ComponentAttribute(
        "_checkpoints.project", "Where checkpoints and logs go."
    )
    log_with: ComponentAttribute[list[Any]] = ComponentAttribute(
        "_trackers.log_with", "The requested trackers: names, and objects that the user made."
    )
    trackers: ComponentAttribute[list[GeneralTracker]] = ComponentAttribute(
        "_trackers.trackers", "The trackers whose run is open, on rank 0 only; a program may add its own."
    )
    sync_gradients: ComponentAttribute[bool] = ComponentAttribute(
        "gradient_state.sync_gradients", "Return whether gradients are complete after the current backward."
    )
    step: ComponentAttribute[int] = ComponentAttribute(
        "gradient_state.step", "The micro-batches since the last window closed at the end of a loader."
    )
    ddp_handler: TypedProperty[Any] = TypedProperty(
        lambda self: (
            self.strategy.handler
            or next(
                (self.handlers[s.handler_class] for s in STRATEGIES if s.handler_class in self.handlers), None
            )
        ),
        lambda self, handler: setattr(self.strategy, "handler", handler),
        doc="The options of DDP: those that the next ``prepare`` uses, or that were given where none does.",
    )
    deepspeed_engine_wrapped: ComponentAttribute[Any] = ComponentAttribute(
        "strategy.deepspeed_engine_wrapped",
        """The wrapper of the first DeepSpeed engine (``.engine``); None before ``prepare``.

        ``backward`` calls that of a wrapper that is assigned. None releases all engines, as ``free_memory``
        does, so that the next ``prepare`` makes new ones. Without DeepSpeed there is no such attribute.
        """,
    )
    _models = ComponentAttribute[list[nn.Module]]("_prepared.models", "The prepared models.")
    _optimizers = ComponentAttribute[list[AcceleratedOptimizer]](
        "_prepared.optimizers", "The prepared optimizers."
    )
    _schedulers = ComponentAttribute[list[AcceleratedScheduler]](
        "_prepared.schedulers", "The prepared schedulers."
    )
    _dataloaders = ComponentAttribute[list[Any]]("_prepared.loaders", "The prepared loaders.")
    _custom_objects = ComponentAttribute[list[Any]](
        "_checkpoints.custom_objects", "The objects of ``register_for_checkpointing``."
    )

    split_batches: ComponentAttribute[bool] = ComponentAttribute(
        "dataloader_config.split_batches", _DATA_OPTION
    )
    dispatch_batches: ComponentAttribute[bool | None] = ComponentAttribute(
        "dataloader_config.dispatch_batches", _DATA_OPTION
    )
    even_batches: ComponentAttribute[bool] = ComponentAttribute(
        "dataloader_config.even_batches", _DATA_OPTION
    )
    use_seedable_sampler: ComponentAttribute[bool] = ComponentAttribute(
        "dataloader_config.use_seedable_sampler", _DATA_OPTION
    )
    non_blocking: ComponentAttribute[bool] = ComponentAttribute(
        "dataloader_config.non_blocking", _DATA_OPTION
    )
    use_stateful_dataloader: ComponentAttribute[bool] = ComponentAttribute(
        "dataloader_config.use_stateful_dataloader", _DATA_OPTION
    )

    autocast_handler: TypedProperty[AutocastKwargs | None] = _handler_property(
        AutocastKwargs, "The options of autocast; assign them before ``prepare``.", assignable=True
    )
    scaler_handler: TypedProperty[GradScalerKwargs | None] = _handler_property(
        GradScalerKwargs, "The options of the gradient scaler."
    )
    init_handler: TypedProperty[InitProcessGroupKwargs | None] = _handler_property(
        InitProcessGroupKwargs, "The options of ``init_process_group``."
    )
    profile_handler: TypedProperty[ProfileKwargs | None] = _handler_property(
        ProfileKwargs, "The options of the profiler.", assignable=True
    )
    preemption_handler: TypedProperty[PreemptionKwargs | None] = _handler_property(
        PreemptionKwargs, "The options of preemption."
    )

    tensor_parallel_rank: TypedProperty[int] = _mesh_rank_property(
        "tp", "The tensor parallel rank; 0 without tensor parallelism."
    )
    pipeline_parallel_rank: TypedProperty[int] = _mesh_rank_property(
        "pp", "The pipeline stage; 0 without pipeline parallelism."
    )
    context_parallel_rank: TypedProperty[int] = _mesh_rank_property(
        "cp", "The context parallel rank; 0 without context parallelism."
    )
    data_parallel_rank: TypedProperty[int] = _mesh_rank_property(
        "dp_replicate", "The rank among the replicas of the model; 0 without replicas."
    )
    data_parallel_shard_rank: TypedProperty[int] = _mesh_rank_property(
        "dp_shard", "The rank among the shards of the parameters; 0 without sharding."
    )

    # --- where this process is, and what was chosen

    @property
    def world(self) -> World:
        """The world (process group and device) that this ``Accelerator`` was made in."""
        return self.state.world

    @property
    def distributed_type(self) -> DistributedType:
        """The ``DistributedType`` of the run."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Return whether several accelerators work together."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """The number format of the forward pass."""
        return self.state.mixed_precision

    @property
    def rng_types(self) -> list[Any]:
        """The generators that are alike on all ranks in every epoch.

        That of the sampler, ``"generator"``, is so without a broadcast. Rank 0 broadcasts those of a list
        that was given, or is assigned before ``prepare``.
        """
        rng_types = self._preparer.options.rng_types
        return ["generator"] if rng_types is None else rng_types

    @rng_types.setter
    def rng_types(self, rng_types: list[Any] | None) -> None:
        # What was read is assigned: nothing has changed.
        self._preparer.options.rng_types = None if rng_types == ["generator"] else rng_types

    @property
    def native_amp(self) -> bool:
        """Return whether the forward runs under torch's autocast.

        Assign False before ``prepare`` to compute in the format of the weights, as
        ``AutocastKwargs(enabled=False)`` does. True asks for what ``mixed_precision`` says.
        """
        enabled = self.autocast_handler is None or self.autocast_handler.enabled
        return enabled and bool(self.precision.describe_conversion())

    @native_amp.setter
    def native_amp(self, native_amp: bool) -> None:
        if native_amp and not self.precision.describe_conversion():
            warn_user(
                f"native_amp = True changes nothing: mixed_precision is {self.mixed_precision!r}. "
                "Choose the number format by Accelerator(mixed_precision='bf16')"
            )
        elif bool(native_amp) != self.native_amp:
            self.autocast_handler = replace(self.autocast_handler or AutocastKwargs(), enabled=native_amp)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler: that of fp16, or one that was assigned; None scales no losses.

        Assign a ``torch.amp.GradScaler`` to scale losses by it, in any precision: ``backward``, clipping and
        ``optimizer.step`` go through it from now on, and checkpoints have its state.

        Raises:
            PrepareError: it is no such scaler, or DeepSpeed or Megatron-LM scales losses itself.
        """
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not self.precision.scaler:
            self._loop.set_scaler(scaler)
        for optimizer in self._optimizers:
            optimizer.scaler = scaler

    @property
    def is_fsdp2(self) -> bool:
        """Return whether parameters are sharded by ``fully_shard``."""
        return self.state.is_fsdp2

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The ``ParallelismConfig``: the size of each mesh dimension; None without a device mesh."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh, None without."""
        return self.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Return whether there is a mesh of named dimensions."""
        return self.strategy.mesh is not None

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected DeepSpeed plugin; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration that the newest DeepSpeed engine was made with.

        Raises:
            AttributeError: there is no engine.
        """
        if getattr(self, "deepspeed_engine_wrapped", None) is None:
            raise AttributeError("deepspeed_config: no model is prepared with DeepSpeed")
        return self.state.deepspeed_plugin.deepspeed_config

    # --- 8-bit floats

    @property
    def fp8_enabled(self) -> bool:
        """Return whether matrix products are computed in 8-bit floats."""
        return self.fp8_backend != FP8BackendType.NO

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8-bit floats."""
        return FP8BackendType(self.precision.fp8_backend)

    @property
    def has_fp8_handler(self) -> bool:
        """Return whether there is a recipe of 8-bit training, given or made from variables."""
        return self.fp8_recipe_handler is not None

    @property
    def fp8_recipe_handler(self) -> Any:
        """The recipe of 8-bit training, of any library."""
        return self.precision.recipe

    @property
    def ao_recipe_handler(self) -> Any:
        """The recipe where torchao computes, else None."""
        return self.precision.recipe if self.fp8_backend == FP8BackendType.AO else None

    @property
    def te_recipe_handler(self) -> Any:
        """The recipe where TransformerEngine computes, else None."""
        return self.precision.recipe if self.fp8_backend == FP8BackendType.TE else None

    @property
    def msamp_recipe_handler(self) -> Any:
        """The recipe where MS-AMP computes, else None."""
        return self.precision.recipe if self.fp8_backend == FP8BackendType.MSAMP else None

    @property
    def delayed_fp8_autocast(self) -> bool:
        """False: layers in 8-bit floats compute so from ``prepare`` on. Kept for compatibility."""
        return False

    def effects(self) -> OptionReport:
        """Return the status of every requested option, as far as known now. Print it: a table.

        Requested options are those that differ from their default, in code, flags, variables and files. Of
        this rank only.
        """
        return self._option_reporter.collect()

    # --- prepare

    @overload
    def prepare(self, arg: T, /, *, device_placement: list[bool] | None = None) -> T: ...
    @overload
    def prepare(
        self, arg: T, other: T2, /, *others: Unpack[Ts], device_placement: list[bool] | None = None
    ) -> tuple[T, T2, Unpack[Ts]]: ...

    def prepare(  # pyright: ignore[reportInconsistentOverload] - a tuple of unknown length
        self, *args: Any, device_placement: list[bool] | None = None
    ) -> Any:
        """Prepare models, optimizers, schedulers and loaders for the strategy of this run.

        Args:
            args: the objects, in any order and number; what is none of these comes back as it is.
            device_placement: per object, whether it goes to the device.

        Returns:
            The prepared objects in the same order; one object alone comes back alone. ``prepare_model``,
            ``prepare_optimizer``, ``prepare_scheduler`` and ``prepare_data_loader`` that a subclass overrides
            or a program replaces are called for what they prepare; under FSDP, DeepSpeed and Megatron-LM, the
            last alone, since the other objects are needed at once.

        Raises:
            PrepareError: nothing is given, an object cannot be prepared, or is nothing to prepare and the
                run is strict; nothing is changed then.
        """
        if isinstance(self.strategy, CustomSharding):
            self._is_preparing = True
            try:
                args = self._prepare_fsdp2(*args)
            finally:
                self._is_preparing = False
        shards_itself = getattr(self._prepare_cp, "__func__", None) is not _PREPARE_CP  # the program
        if shards_itself and (config := self.parallelism_config) is not None and config.cp_enabled:
            args = tuple(self._prepare_cp(*args))
        bundle = self._preparer.make_bundle(args, device_placement)
        bundle.program_shards_sequences = shards_itself
        replaced: dict[ObjectKind, Callable[..., Any]] = {
            kind: method
            for kind, own in _PREPARE_METHODS.items()
            if getattr(method := getattr(self, own.__name__), "__func__", None) is not own
        }
        if getattr(prepare_one := self._prepare_one, "__func__", None) is not _PREPARE_ONE:
            replaced = {kind: partial(prepare_one, first_pass=kind != "scheduler") for kind in bundle.kinds}
        # A strategy that shards models or owns the step needs all objects at once, but for the loaders.
        needs_all = self.strategy.shards_params or self.strategy.owns_step
        for index, kind in enumerate(bundle.kinds if replaced else ()):
            if kind in replaced and (not needs_all or isinstance(bundle.objects[index], DataLoader)):
                place = None if device_placement is None else device_placement[index]
                options = {} if kind == "scheduler" else {"device_placement": place}
                bundle.objects[index] = item = replaced[kind](bundle.objects[index], **options)
                if not needs_all or not any(item is loader for loader in self._prepared.loaders):
                    bundle.kinds[index] = "prepared"
        self._preparer.prepare(bundle, self.verify_device_map)
        self._option_reporter.report()
        return bundle.objects[0] if len(args) == 1 else tuple(bundle.objects[: len(args)])

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Return the prepared objects as a tuple; inside of ``prepare``, those that it gets under FSDP2.

        Some programs call it for a further model, and some wrap it, to change a model before it is sharded.
        """
        if not self._is_preparing:
            return self._prepare_deepspeed(*args)
        strategy: Any = self.strategy
        return strategy.adapt_objects(self, args)

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """Return one object prepared: a scheduler in the second pass of 1.x, any other object in the first.

        ``prepare`` calls it, once for each object, where a program has replaced it.
        """
        kind = object_kind(obj, self.strategy.owns_step)
        if kind not in _PREPARE_METHODS or first_pass is (kind == "scheduler"):
            return obj
        options = {} if kind == "scheduler" else {"device_placement": device_placement}
        return getattr(self, _PREPARE_METHODS[kind].__name__)(obj, **options)

    def _prepare_device_mesh(self) -> DeviceMesh | None:
        """Return the mesh that programs with a ``prepare_data_loader`` of their own share data out by."""
        return self.torch_device_mesh

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Return the objects that ``prepare`` gets under context parallelism.

        A program that replaces it shards sequences itself, as axolotl does. It may set ``_cp_context``, which
        ``maybe_context_parallel`` gives then.
        """
        return args

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """Return the prepared objects as a tuple; trainers with a reference model call it under DeepSpeed."""
        prepared = self.prepare(*args)
        return (prepared,) if len(args) == 1 else prepared

    def _get_named_parameters(self, *args: Any, drop_refs: bool = False) -> dict[str, Any]:
        """Return the parameters of all models in ``args`` by name, or (``drop_refs``) their addresses.

        Programs that shard a model themselves, or send its weights to an inference engine, call it.
        """
        models = [extract_model_from_parallel(item) for item in args if isinstance(item, nn.Module)]
        named = {name: p for model in models for name, p in model.named_parameters()}
        return {name: p.data_ptr() for name, p in named.items()} if drop_refs else named

    def plan(self, *args: Any, device_placement: list[bool] | None = None) -> PreparePlan:
        """Return the plan of ``prepare`` for these objects without changing them. Print it."""
        plan = self._preparer.make_plan(self._preparer.make_bundle(args, device_placement))
        _ = plan.text  # of the objects as they are now
        return plan

    def prepare_model(
        self, model: ModuleT, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ModuleT:
        """Prepare one model; ``evaluation_mode`` places it and sets its precision only."""
        place = None if device_placement is None else [device_placement]
        bundle = self._preparer.make_bundle((model,), place, training=not evaluation_mode)
        self._preparer.prepare(bundle, self.verify_device_map)
        self._option_reporter.report()
        return bundle.objects[0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer, of any class."""
        bundle = self._preparer.make_bundle((optimizer,), None)
        bundle.kinds[0] = "optimizer"
        self._preparer.prepare(bundle)
        self._option_reporter.report()
        return bundle.objects[0]

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler, of any class."""
        bundle = self._preparer.make_bundle((scheduler,), None)
        bundle.kinds[0] = "scheduler"
        self._preparer.prepare(bundle)
        self._option_reporter.report()
        return bundle.objects[0]

    def prepare_data_loader(
        self,
        data_loader: DataLoader[T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        shard: bool | str | None = None,
    ) -> DataLoader[T]:
        """Prepare one loader.

        Args:
            data_loader: the user's.
            device_placement: whether its batches go to the device.
            slice_fn_for_dispatch: cuts a collated batch under dispatch; see ``DataLoaderDispatcher``.
            shard: see ``DataLoaderConfiguration``; None takes the configuration's.
        """
        place = self.device_placement if device_placement is None else device_placement
        prepared = self._preparer.wrap_loader(
            data_loader, place, slice_fn_for_dispatch=slice_fn_for_dispatch, shard=shard
        )
        self._prepared.add("loader", prepared)
        self._option_reporter.report()
        return prepared

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a submodule of ``model`` is dispatched over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(places is not None and len(set(places.values())) > 1 for places in maps)

    def unwrap_model(
        self, model: ModuleT, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> ModuleT:
        """Return the user's own module.

        Args:
            model: a model, prepared or wrapped by hand.
            keep_fp32_wrapper: False also takes off the mixed precision that ``prepare`` attached. As in 1.x
                that changes the module itself, which computes in the format of its weights from now on, also
                as a part of ``model``: ``prepare`` it again to train on in mixed precision. Layers that
                torchao computes in 8-bit floats stay so. A prepared model can be copied, pickled and saved
                as it is.
            keep_torch_compile: False also takes the model out of what ``torch.compile(model)`` made. What is
                compiled in place stays so: ``torch.compiler.set_stance("force_eager")`` runs it uncompiled.
        """
        if FORWARD_CONTEXTS.entered:
            FORWARD_CONTEXTS.exit_interrupted()
        inner = self._checkpoints.unwrap(model, keep_torch_compile)
        if not keep_fp32_wrapper:
            for part in (inner, self._checkpoints.unwrap(model, keep_torch_compile=False)):
                detach_autocast(part)
        return cast("ModuleT", inner)

    def skip_first_batches(self, dataloader: T, num_batches: int | None = 0) -> T:
        """Return a loader without its first ``num_batches`` batches, for the rest of an interrupted epoch."""
        return cast("T", skip(cast("DataLoader[Any]", dataloader), num_batches))

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects and free memory; return a None for each of ``objects``."""
        self._checkpoints.wait(release=True)
        self._loop.note_forgotten()
        self._prepared.clear()
        self.gradient_state.reset()
        if (loss_scaling := self._runtime.precision.loss_scaling) is not None:
            loss_scaling.forget_optimizers()
        if isinstance(self.strategy, EngineStrategy):
            self.strategy.forget()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as ``free_memory``."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """End the runs of trackers, and close the process group. The last call of a script.

        Ranks and device can still be read, and models that are not sharded be saved: by the main process.
        """
        try:
            try:
                self._option_reporter.warn_of_other_ranks()
                self._trackers.finish()
            finally:
                self._checkpoints.wait()
        finally:
            self.state.destroy_process_group()

    # --- the loop

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context for one micro-batch: gradients are reduced, and optimizers step, in the last only.

        Args:
            models: those whose gradients accumulate; all prepared ones when none is given.

        A ``no_sync`` that a subclass overrides or a program replaces is entered for each model.
        """
        no_sync = self.no_sync
        is_own = getattr(no_sync, "__func__", None) is Accelerator.no_sync
        return AccumulationContext(self._loop, models, None if is_own else no_sync)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for forward and backward in which gradients of ``model`` stay local."""
        return self.strategy.accumulation_context((self._prepared.find_model(model),), sync=False)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Generator[None]:
        """Reduce gradients in the backward inside, although its forward ran in ``no_sync``."""
        inside: Any = model
        while inside is not None:  # it may have been compiled
            for strategy in STRATEGIES:
                strategy.sync_next_backward(inside)
            inside = getattr(inside, "_orig_mod", None)
        yield

    def windows(
        self, loader: Any, n: int | None = None, *, models: nn.Module | Iterable[nn.Module] | None = None
    ) -> GradientAccumulationWindows:
        """Iterate ``loader`` once in windows of ``n`` micro-batches, each for one optimizer step.

        Gradients stay local until the last micro-batch of a window. A loss is divided by the number of
        micro-batches that the window really has: the last one may be shorter. ::

            for window in accelerator.windows(loader, 4):
                for batch in window:
                    accelerator.backward(loss_of(batch))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        Nothing is read ahead. A window that is left early must be dropped by ``optimizer.zero_grad()``: a
        step or the next window is refused until then. Windows do not nest, and ``accumulate`` has no place in
        them.

        Args:
            loader: a prepared loader, or anything with a length.
            n: micro-batches of a window; None takes ``gradient_accumulation_steps``.
            models: those whose gradients accumulate; all prepared ones when none is given.

        Raises:
            PrepareError: the loader's end cannot be known, or the windows are used in another way.
        """
        return self._loop.make_windows(loader, n, models)

    def backward(self, loss: torch.Tensor, *, num_items: Any = None, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``, divided by the micro-batches and scaled by the precision.

        With ``num_items``, losses are weighted instead: the gradient of an optimizer step is that of the mean
        over all items (tokens, samples) of its micro-batches on all processes, as of one big batch. Give the
        number in every call of a window. ::

            tokens = (labels != -100).sum()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # a mean, by default
            accelerator.backward(loss, num_items=tokens)

        A loader that fills its last step with repeated samples says how many of a batch are real, None for
        all: a loss over ``n = len(batch) if loader.real is None else loader.real`` samples, with
        ``num_items=n``, counts every sample once.

        Args:
            loss: a scalar, the mean over its items.
            num_items: of how many items of this process it is the mean; 0 adds exactly nothing, even where
                such a mean is NaN. A tensor on an accelerator costs a synchronisation.
            kwargs: arguments of ``loss.backward``; ``learning_rate`` runs ``lomo_backward``.

        Raises:
            PrepareError: the loss has no graph or is no scalar, ``num_items`` is no number above or equal 0,
                or was given in some calls of a window only, or the strategy weights losses by itself.
        """
        self._loop.backward(loss, num_items, kwargs)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Return whether a prepared optimizer updates weights during backward, as LOMO does."""
        return any(optimizer.fuses_backward for optimizer in self._optimizers)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass of an optimizer that updates each weight as soon as its gradient is known.

        No gradient is kept, so there is nothing to accumulate, clip or step: ``optimizer.step`` and
        ``zero_grad`` do nothing for such an optimizer.

        Source: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"
        (arXiv:2306.09782); the method ``fused_backward(loss, lr)`` of lomo-optim.

        Args:
            loss: a scalar.
            learning_rate: of this update.

        Raises:
            PrepareError: no prepared optimizer has ``fused_backward``, several have it, or gradients are
                accumulated.
        """
        self._loop.lomo_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of one optimizer, several, or (None) all.

        Does nothing while gradients are being accumulated: later ones would come on top with the scale.
        """
        self._loop.unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float | str = 2) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``.

        Args:
            parameters: a tensor or an iterable of them; those without a gradient do not count.
            max_norm: the limit; ``float("inf")`` only measures.
            norm_type: the p of the norm; ``"inf"`` is infinity.

        Returns:
            The norm before, a scalar on the device. While gradients are being accumulated nothing is
            clipped, and it is the norm of this process's gradients so far.
        """
        return self._loop.clip_grad_norm(parameters, max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient element to ``[-clip_value, clip_value]``; do nothing while accumulating."""
        self._loop.clip_grad_value(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether the last step of any optimizer was skipped because a gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Generator[None]:
        """Run the block in the forward's number format."""
        with self.precision.forward_context(autocast_handler):
            yield

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Generator[Any]:
        """Profile the block with ``torch.profiler``, and yield the profiler.

        With ``output_trace_dir``, each process leaves a Chrome trace ``profile_<rank>.json`` there, with
        ``memory_timeline`` a picture ``memory_<rank>.png``, with ``operator_table`` a table
        ``operators_<rank>.txt``. A block that runs out of memory leaves ``out_of_memory_<rank>.txt``, which
        names the tensors that hold the most.

        Args:
            profile_handler: what to record; None takes the one given to the ``Accelerator``, or the defaults.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        try:
            with record_profile(handler, self.world.rank) as profiler:
                yield profiler
        except (RuntimeError, MemoryError) as error:
            if handler.output_trace_dir is not None and self.world.hardware.is_out_of_memory(error):
                models = [self.strategy.unwrap(model) for model in self._models]
                optimizers = [each.optimizer for each in self._optimizers]
                write_holders(handler, self.world.rank, self.world.hardware, models, optimizers)
            raise
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context for forward and backward: ``buffers`` hold this rank's shard of each sequence.

        Without context parallelism the block just runs.

        Args:
            buffers: tensors with full sequences; they are sharded in place.
            buffer_seq_dims: the dimension of each that counts tokens.
            no_restore_buffers: those that need not be restored afterwards.
        """
        if not isinstance(self.strategy, DataSharding):
            return nullcontext()
        if (context := vars(self).get("_cp_context")) is not None:  # the program's
            return context(
                buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
            )
        return self.strategy.shard_sequences(
            buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return a loader that yields this rank's shard of each sequence; the same without Ulysses."""
        return self.strategy.adapt_loader(dl, model) if isinstance(self.strategy, DataSharding) else dl

    # --- collectives: all ranks must call each of them

    def gather(self, tensor: T) -> T:
        """All-gather tensors: concatenated along dimension 0 in rank order; see ``collective.gather``."""
        return collective.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: T,
        use_gather_object: bool = False,
        *,
        rows_per_sample: int | Sequence[int] | torch.Tensor | None = None,
    ) -> T:
        """Gather outputs without the samples that only filled the last step: each counts once, in order.

        Args:
            input_data: a tree of tensors with one row per sample, or the same number of rows for each (a
                scalar or a single row counts for the whole batch), or a list of any objects, one per sample,
                or a dict of such; see ``facade.metrics``. On one process any other object comes as it is.
            use_gather_object: treat it as objects.
            rows_per_sample: how many rows of every output belong to a sample, or a list with the number of
                each sample. Needed where that cannot be seen: for rows that differ by sample, and for rows of
                several steps (1), collected in an uneven rhythm.

        A ``gather`` that a subclass overrides or a program replaces gathers tensors; the rows of the fillers,
        the last ones, are cut off after it.

        Raises:
            PrepareError: the step has fillers, and which rows are theirs is not known.
        """
        loader, by_object, gather = self.gradient_state.active_dataloader, use_gather_object, self.gather
        if loader is None:  # a function may make an Accelerator of its own
            loader = ActiveLoaders.innermost_of_process()
        return gather_for_metrics(
            input_data,
            loader,
            self.strategy,
            as_objects=by_object,
            rows_per_sample=rows_per_sample,
            gather=None if getattr(gather, "__func__", gather) is Accelerator.gather else gather,
        )

    def mean_loss(self, loss: Any, num_items: Any = None) -> torch.Tensor:
        """Return the mean over all items (tokens, samples) of all ranks, to log or to evaluate.

        Processes may have different numbers of items, or none: a mean of nothing, NaN, does not count. The
        same holds for processes with parts of the same sequences. All processes must call it; it costs one
        all-reduce, so evaluate with one call for all batches. ::

            losses.append(model(**batch).loss), counts.append((batch["shift_labels"] != -100).sum())
            accelerator.mean_loss(losses, counts)

        Args:
            loss: of this process: a mean, or a list or tensor of means.
            num_items: of how many items each is the mean; None counts all alike.

        Returns:
            A scalar in float32 on the device, the same on all processes; NaN where nobody has any item.

        Raises:
            PrepareError: there are more or fewer numbers than losses.
        """
        return mean_loss(loss, num_items, self.device)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for a loop whose ranks may have different numbers of batches.

        Where another strategy than DDP trains, it does nothing and warns.

        Args:
            joinables: prepared models.
            even_batches: replaces the option of the prepared loaders inside the block.

        Raises:
            PrepareError: a model is not replicated.
            SettingError: the run is strict, and the strategy is not DDP.
        """
        if not self.use_distributed:
            return nullcontext()
        if not (self.strategy.replicates_model and self.distributed_type.startswith("MULTI_")):
            error = SettingError(
                f"join_uneven_inputs has no effect under the strategy {self.strategy.name!r}",
                why="only DDP joins ranks that have no more batches",
                fix="leave even_batches=True, so that all ranks have as many batches",
            )
            if self._option_reporter.strict:
                raise error
            if self.is_main_process:
                warn_user(f"{error.what}: {error.why}; {error.fix}")
            return nullcontext()
        return join_uneven_inputs(joinables, self._dataloaders, even_batches)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """All-reduce tensors: element-wise ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``, times ``scale``."""
        return collective.all_reduce(tensor, reduction, scale, strict=self._option_reporter.strict)

    def pad_across_processes(
        self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> T:
        """Pad tensors along ``dim`` to the greatest length on any rank."""
        return collective.pad_across_processes(tensor, dim, pad_index, pad_first)

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """This rank's flag of ``set_trigger``, 1 or 0; None before its first use."""
        return None if self._trigger is None else torch.tensor(int(self._trigger), device=self.device)

    @flag_tensor.setter
    def flag_tensor(self, flag_tensor: torch.Tensor | None) -> None:
        self._trigger = None if flag_tensor is None else bool(flag_tensor)

    def set_trigger(self) -> None:
        """Set this rank's flag, for ``check_trigger`` on all ranks."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank has set its flag, and clear it."""
        raised = any(collective.compare_objects(bool(self._trigger), "check_trigger()"))
        self._trigger = False
        return raised

    # --- checkpoints

    def wait_for_everyone(self) -> None:
        """Wait until every process is here, with the steps under DeepSpeed that the program leaves out."""
        for optimizer in self._optimizers:
            optimizer.take_omitted_step("wait_for_everyone()")
        super().wait_for_everyone()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's full state dict, keyed by the names of the user's module.

        Where the strategy shards, all processes must call it, and it is complete on process 0 only.
        Offloaded weights are those in memory, or views of the files that they are in.
        """
        return self._checkpoints.get_state_dict(model, unwrap)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load more objects with the state.

        Raises:
            PrepareError: one lacks ``state_dict`` or ``load_state_dict``.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before ``save_state`` writes.

        ``weights`` are the state dicts that will be written: one that is taken out is not. Where parameters
        are sharded it is empty.
        """
        return register_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before ``load_state`` reads.

        A model that is taken out of ``models`` is not loaded. Where parameters are sharded it is empty, and
        ``load_state`` loads them.
        """
        return register_hook(self._checkpoints.load_hooks, hook)

    @property
    def _save_model_state_pre_hook(self) -> dict[int, Any]:
        return self._checkpoints.save_hooks  # programs that write checkpoints of their own call these hooks

    @property
    def _load_model_state_pre_hook(self) -> dict[int, Any]:
        return self._checkpoints.load_hooks

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        sharded: bool | None = None,
        async_save: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path | str:
        """Save models, optimizers, schedulers, scaler, loaders, random states and registered objects.

        The checkpoint is complete or absent: it becomes visible in one step. All processes call it. Where
        each has the whole model (DDP), the main process may call it alone; it waits until the others have
        begun a collective without it, or have waited in one of the program's own groups for some seconds, and
        the checkpoint lacks their random states. After ``end_training`` it is the main process that saves,
        whoever calls; where models are sharded that is refused. A save before it that is still written in the
        background is waited for. A ``get_state_dict`` that a subclass overrides or a program replaces gives
        the states of models that are not sharded.

        Args:
            output_dir: the checkpoint's folder, or a URL; not used under automatic naming.
            safe_serialization: models as safetensors, otherwise as torch files.
            sharded: models and optimizers as shards, each process writes its own; False writes full files, on
                one process. None takes what the strategy does. ``load_state`` reads both, everywhere.
            async_save: copy everything and return, while a thread writes and commits the copies; None takes
                what ``ProjectConfiguration`` says. ``wait_for_checkpoint`` tells when it is committed.
            metadata: plain values to read again in ``load_state(...).metadata`` and in the table of
                ``accelerate checkpoint ls``: ``{"epoch": 3}``. Process 0's are kept.
            save_model_func_kwargs: options of the checkpoint that DeepSpeed or Megatron-LM writes. Other
                strategies ignore them with a warning; in a strict run they are an error.

        Returns:
            The folder, or the URL as text; the same on every process.

        Raises:
            CheckpointError: on every process; what was there before is untouched. Also when the save before
                failed in the background: this one has not begun then.
            CheckpointPeerError: another process than the main one called it alone; a ``CheckpointError``.
        """
        if self._loop.has_forgotten and not self._prepared.models:
            self._loop.warn_of_forgotten("save_state")
        start, state_of = time.perf_counter(), self.get_state_dict
        checkpoint = self._checkpoints.save(
            output_dir,
            safe_serialization=safe_serialization,
            sharded=sharded,
            async_save=async_save,
            metadata=metadata,
            engine_options=save_model_func_kwargs,
            replaced_state=None if getattr(state_of, "__func__", None) is _GET_STATE_DICT else state_of,
        )
        if self._trackers.recorder is not None:
            self._trackers.recorder.record_checkpoint(checkpoint, time.perf_counter() - start)
        return checkpoint

    def wait_for_checkpoint(self, release: bool = False) -> Path | str | None:
        """Wait until the checkpoint that is written in the background is committed; each process for itself.

        Args:
            release: also gives back the memory that is kept for the next copy.

        Returns:
            Its folder, None if none was written since the last call that waited.

        Raises:
            CheckpointError: it failed, on every process; what was there before is untouched.
        """
        return self._checkpoints.wait(release)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> CheckpointLoadResult:
        """Load what ``save_state`` saved, after verifying it. All processes must call it.

        Args:
            input_dir: the checkpoint's folder or URL; None is the newest complete one (automatic naming).
            load_kwargs: more arguments of ``torch.load``.
            load_model_func_kwargs: ``map_location``, ``strict``; with DeepSpeed also those of its loading.

        Returns:
            Path, step and metadata of the checkpoint, and what was ignored or missing.

        Raises:
            CheckpointError: on every process, naming the file and what was expected.
        """
        if self._loop.has_forgotten and not self._prepared.models:
            self._loop.warn_of_forgotten("load_state")
        return self._checkpoints.load(input_dir, load_kwargs, load_model_func_kwargs)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the weights of ``model`` for other tools: one file, or shards with an index.

        Args:
            model: the model.
            save_directory: the folder; made if needed, stale shards in it are removed.
            max_shard_size: limit of one file, ``"10GB"`` or bytes.
            safe_serialization: safetensors, otherwise torch files.

        Raises:
            CheckpointError: a file cannot be written; on every process that calls.
        """
        state = self.get_state_dict(model)  # perhaps a program's own, which replaces it
        self._checkpoints.save_model(state, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object on the main process, or on each machine's with ``save_on_each_node``."""
        save_object(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    @property
    def should_save_model(self) -> bool:
        """Return whether this process writes exported weights."""
        return self._checkpoints.writes_exports

    @property
    def project_dir(self) -> PathText | None:
        """The folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> PathText | None:
        """The folder of the logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint: each save counts, also of another name."""
        return self.project_configuration.iteration

    # --- preemption and resume

    @property
    def should_stop(self) -> bool:
        """Return whether the end of the job was announced, so that it is time to save and stop.

        Reading it is a step boundary: every rank must read it, equally often, at the same places. A signal
        to any rank makes it True on all ranks at the same boundary, within a second or so, and it stays True.
        Until then no rank communicates. It is False inside of an accumulation window, so that a stop follows
        a whole optimizer step. The first read makes this process catch the signals of
        ``PreemptionKwargs``. ::

            for batch in loader:
                train_step(batch)
                if accelerator.should_stop:
                    accelerator.save_state()
                    accelerator.exit_to_resume()

        Raises:
            CollectiveError: a rank failed while they agreed, or did not read it.
        """
        return self._preemption.should_stop()

    def exit_to_resume(self) -> NoReturn:
        """End trackers and the world, and exit with the code that asks for the job to be started again.

        All ranks call it. The code is ``PreemptionKwargs.exit_code``: 75, "try again later" in sysexits.h.

        Raises:
            CheckpointError: a save in the background failed.
            SystemExit: otherwise always, also where a tracker fails as its run ends.
        """
        try:
            self._trackers.finish()
        except Exception as error:  # noqa: BLE001 - libraries raise anything; what is saved is to be resumed
            warn_user(f"a tracker failed as its run ended: {type(error).__name__}: {error}")
        self.end_training()
        raise SystemExit(self._preemption.options.exit_code)

    def _save_and_exit(self) -> NoReturn:
        try:
            path = self.save_state()
        except BackgroundSaveError as error:  # of the save before, on all ranks: this one has not begun
            warn_user(str(error))
            path = self.save_state()
        if self.world.is_main:
            code = self._preemption.options.exit_code
            logger.warning("saved %s; exit code %d: start the job again to go on", path, code)
        self.exit_to_resume()

    @property
    def resume_from(self) -> Address | None:
        """The checkpoint that ``accelerate launch --resume`` asks to go on from, None for a fresh start.

        Rank 0 chooses for all, at the first read, so every rank must read it. With ``auto`` it is the newest
        complete checkpoint under automatic naming; with a folder (or URL) of checkpoints the newest complete
        one in it; else the checkpoint that was named. ::

            if accelerator.resume_from:
                accelerator.load_state(accelerator.resume_from)

        Raises:
            CheckpointNotFoundError: what was named is not there, or is no checkpoint.
            CheckpointError: it is damaged, or with ``auto`` all that were complete once are.
            SettingError: ``auto`` without automatic naming.
        """
        return self._preemption.choose_resume_checkpoint()

    # --- trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begin a run with every tracker of ``log_with``, on the main process.

        A tracker that the program has added to ``trackers`` is started too. Called again, it ends these runs
        and begins new ones; a tracker that the user made goes on. It takes
        ``log_with`` and ``logging_dir`` as they are now: a program may assign them, and
        ``project_configuration``, before.

        Args:
            project_name: name of the project or the run, as each tracker takes it.
            config: hyperparameters to store with the run.
            init_kwargs: options of single trackers, by name. Those of trackers that are not in use are left.

        Raises:
            UnknownNameError: the run is strict, and ``init_kwargs`` has a key that names no tracker; else a
                warning says that it is ignored.
            SettingError: the run is strict, and ``init_kwargs`` holds options for a tracker that the user has
                already made; or the name has a NUL character.
        """
        self._trackers.start(project_name, config, init_kwargs or {}, self.logging_dir)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log to every tracker; do nothing on processes other than the main one.

        Args:
            values: name -> number, or what the trackers in use take. A tensor of one element is its number.
            step: of all of them.
            log_kwargs: options of single trackers, by name.

        Raises:
            UnknownNameError: the run is strict, and ``log_kwargs`` has a key that names no tracker.
        """
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The running tracker of that name, for what ``log`` does not cover.

        On the other processes, and where no trackers were asked for, it is one that does nothing whatever is
        called on it.

        Args:
            name: what ``log_with=`` called it.
            unwrap: give the library's own object of the run.

        Raises:
            UnknownNameError: it was not asked for.
            SettingError: it was, and ``init_trackers`` has not been called.
        """
        return self._trackers.get(name, unwrap)


def _mesh_rank(mesh: Any, dimension: str) -> int:
    if mesh is None:
        raise (_MissingDimensionError if dimension in ("pp", "cp") else WorldError)(
            f"there is no mesh dimension {dimension}: there is no device mesh",
            fix="Accelerator(parallelism_config=ParallelismConfig(...)) makes one",
        )
    return mesh.get_local_rank(dimension) if dimension in (mesh.mesh_dim_names or ()) else 0


# As they are here: ``prepare`` compares them with those that it finds.
_PREPARE_METHODS: dict[ObjectKind, Any] = {
    "model": Accelerator.prepare_model,
    "optimizer": Accelerator.prepare_optimizer,
    "scheduler": Accelerator.prepare_scheduler,
    "loader": Accelerator.prepare_data_loader,
}
_GET_STATE_DICT, _PREPARE_CP = Accelerator.get_state_dict, Accelerator._prepare_cp
_PREPARE_ONE = Accelerator._prepare_one
_FROM_THE_START = "it was used when this Accelerator was made"
_FP8 = (
    "layers are converted to 8-bit floats, or not, as the Accelerator was asked to when it was made",
    "create it by Accelerator(mixed_precision='fp8')",
)
refuse_assignments(
    Accelerator,
    {
        **{
            f"{name}_handler": (_FROM_THE_START, f"create it by Accelerator(kwargs_handlers=[{kind}(...)])")
            for name, kind in {
                "init": "InitProcessGroupKwargs",
                "preemption": "PreemptionKwargs",
                "fp8_recipe": "FP8RecipeKwargs",
                "ao_recipe": "AORecipeKwargs",
                "te_recipe": "TERecipeKwargs",
                "msamp_recipe": "MSAMPRecipeKwargs",
            }.items()
        },
        "scaler_handler": (_FROM_THE_START, "assign accelerator.scaler = torch.amp.GradScaler(...)"),
        **dict.fromkeys(("fp8_enabled", "fp8_backend", "has_fp8_handler", "delayed_fp8_autocast"), _FP8),
        "has_lomo_optimizer": ("it is seen on the prepared optimizers", "prepare an optimizer of lomo-optim"),
    },
)


class _MissingDimensionError(WorldError, NotImplementedError):
    """The error of a mesh dimension that 1.x does not have: programs catch NotImplementedError."""
