"""``Accelerator``: the object a training script holds. Its methods come from the mixins of this folder."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.data.active_loaders import ActiveLoaders
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.loader import skip_first_batches as skip
from accelerate.facade import constructor_args
from accelerate.facade.checkpoint_methods import CheckpointMixin
from accelerate.facade.collectives import CollectivesMixin
from accelerate.facade.gradient_state import GradientAccumulationPlugin, GradientState
from accelerate.facade.handler_properties import HandlerPropertiesMixin
from accelerate.facade.mesh import DeviceMeshMixin
from accelerate.facade.oom_rollback import capture_rollback
from accelerate.facade.option_report import OptionReportMixin
from accelerate.facade.preemption import PreemptionMixin
from accelerate.facade.preparation import PreparationMixin
from accelerate.facade.state import AcceleratorState
from accelerate.facade.tracking import TrackingMixin
from accelerate.facade.train_step_methods import TrainLoopMixin
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.strategy import choose_strategy
from accelerate.strategy.base import Strategy, StrategyRequest
from accelerate.watch.batch_size_search import release_memory, restore_after_failure
from accelerate.world.world import InitProcessGroupKwargs, World

_UNSET: Any = object()


class Accelerator(
    HandlerPropertiesMixin,
    PreparationMixin,
    TrainLoopMixin,
    CheckpointMixin,
    PreemptionMixin,
    TrackingMixin,
    OptionReportMixin,
    DeviceMeshMixin,
    CollectivesMixin,
):
    """Runs a training loop on whatever it is launched on.

    Args:
        device_placement: move models and batches to the device.
        split_batches: see ``DataLoaderConfiguration``.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; None takes the launcher's choice.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU.
        dataloader_config: how loaders share data.
        rng_types: random number generators that rank 0 broadcasts at the start of every epoch; the
            order of the samples is the same on all ranks without them.
        log_with: the trackers that ``init_trackers`` starts: a name, a ``GeneralTracker``, or several;
            ``"all"`` is every one that is installed.
        project_dir, project_config: where checkpoints and logs go.
        gradient_accumulation_plugin: accumulation with all its options.
        step_scheduler_with_optimizer: schedulers advance with the optimizer, not at every call.
        kwargs_handlers: options of DDP, autocast, the gradient scaler, the profiler, ...
        dynamo_backend, dynamo_plugin: compile prepared models in place.
        strict: an option that cannot be applied is an error, not a warning; None takes ``--strict``.

    Raises:
        SettingError: a value is wrong, or two contradict each other.
        WorldError: the environment does not describe a world.
        FeatureNotBuiltError: a requested feature is not built yet.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _UNSET,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        strict: bool | None = None,
    ) -> None:
        all_plugins = (deepspeed_plugin, deepspeed_plugins, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin)
        plugins = tuple(plugin for plugin in all_plugins if plugin is not None)
        parallelism = constructor_args.resolve_parallelism(parallelism_config, torch_tp_plugin)
        compiler = constructor_args.resolve_compiler(dynamo_plugin, dynamo_backend)
        self.handlers = constructor_args.handlers_by_class(kwargs_handlers or [])
        self.state = AcceleratorState(
            mixed_precision=mixed_precision,
            cpu=cpu,
            dynamo_plugin=compiler,
            parallelism_config=parallelism,
            _from_accelerator=True,
            **self._process_group_options(),
        )
        self._world = self.state.world
        self.device_placement, self.rng_types = device_placement, rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = constructor_args.resolve_data_config(
            dataloader_config, None if split_batches is _UNSET else split_batches
        )
        self._open_project(project_config, project_dir)
        self._choose_strategy(plugins, parallelism)
        self.gradient_state = GradientState.create(
            constructor_args.resolve_accumulation(
                gradient_accumulation_plugin, gradient_accumulation_steps, self.strategy.accumulation_steps
            ),
            ActiveLoaders(),
        )
        self._init_checkpointing()
        self._init_tracking(log_with)
        self._reset()
        self._init_preemption()
        self._init_option_report(
            strict,
            mixed_precision=mixed_precision,
            cpu=cpu,
            split_batches=split_batches is not _UNSET,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
        )
        restore_after_failure(self, capture_rollback)

    def _open_project(
        self, config: ProjectConfiguration | None, folder: str | os.PathLike[str] | None
    ) -> None:
        self.project_configuration = config or ProjectConfiguration(project_dir=folder)  # type: ignore[arg-type]
        if folder is not None and self.project_dir is None:
            self.project_configuration.set_directories(str(folder))

    def _choose_strategy(self, plugins: tuple[Any, ...], parallelism: Any) -> None:
        """Choose the precision and the strategy, and show them in the state."""
        kind = PRECISIONS.get(self.state.mixed_precision)
        self.precision: Precision = kind(self.world.hardware, self.handlers)
        self.precision.check()
        self.strategy: Strategy = choose_strategy(
            StrategyRequest(
                self.world, plugins, self.handlers, precision=self.precision.name, parallelism=parallelism
            )
        )
        self.strategy.accelerator = weakref.proxy(self)
        self.precision.set_overflow_sync(self.strategy.flag_reduction())
        state = self.state
        state.distributed_type = type(state.distributed_type)(self.strategy.distributed_type(self.world))
        vars(state).update(self.strategy.plugins, device_mesh=self.strategy.mesh)

    def _reset(self) -> None:
        self._clear_prepared()
        self.gradient_state.step = 0
        self.strategy.forget()

    def _process_group_options(self) -> dict[str, Any]:
        handler = self.handlers.get(InitProcessGroupKwargs)
        return handler.to_kwargs() if handler is not None else {}

    # --- where this process is

    @property
    def world(self) -> World:
        """The world (process group and device) that this ``Accelerator`` was made in."""
        return self._world

    @property
    def distributed_type(self) -> Any:
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
    def native_amp(self) -> bool:
        """Return whether the forward runs under torch's autocast."""
        return bool(self.precision.describe_conversion())

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, where the precision has one."""
        return self.precision.scaler

    @property
    def is_fsdp2(self) -> bool:
        """Return whether parameters are sharded by ``fully_shard``."""
        return self.state.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """The ``ParallelismConfig``: the size of each mesh dimension; None without a device mesh."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, None without."""
        return self.state.device_mesh

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = 0) -> Any:
        """Return a loader without its first ``num_batches`` batches, for the rest of an interrupted epoch."""
        return skip(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects and free memory; return a None for each of ``objects``."""
        self.wait_for_checkpoint(release=True)
        self._reset()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as ``free_memory``."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """End the runs of trackers, and close the world. The last call of a script."""
        try:
            self._warn_of_other_ranks()
            self._end_tracking()
            self.wait_for_checkpoint()
        finally:
            self.state.destroy_process_group()
