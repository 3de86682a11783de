"""``Accelerator``: the object a training script holds. Every method delegates to one room."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.core.handler import KwargsHandler
from accelerate.data.active import ActiveLoaders
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.loader import skip_first_batches as skip
from accelerate.facade import options
from accelerate.facade.effects import Effects
from accelerate.facade.exchanging import Exchanging
from accelerate.facade.given import Given
from accelerate.facade.gradient import GradientAccumulationPlugin, GradientState
from accelerate.facade.loop import Loop
from accelerate.facade.mesh import Meshed
from accelerate.facade.preparing import Preparing
from accelerate.facade.rollback import remember
from accelerate.facade.saving import Saving
from accelerate.facade.state import AcceleratorState
from accelerate.facade.stopping import Stopping
from accelerate.facade.tracking import Tracking
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.strategy import choose
from accelerate.strategy.base import Request, Strategy
from accelerate.watch.retry import release_memory, roll_back
from accelerate.world.world import InitProcessGroupKwargs, World

_UNSET: Any = object()


class Accelerator(Given, Preparing, Loop, Saving, Stopping, Tracking, Effects, Meshed, Exchanging):
    """Runs a training loop on whatever it is launched on.

    Args:
        device_placement: move models and batches to the device.
        split_batches: see ``DataLoaderConfiguration``.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; None takes the launcher's choice.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU.
        dataloader_config: how loaders share data.
        rng_types: random streams that all processes take over from rank 0 at the start of every epoch; the
            order of the samples is agreed without them.
        log_with: the trackers that ``init_trackers`` starts: a name, a ``GeneralTracker``, or several;
            ``"all"`` is every one that is installed.
        project_dir, project_config: where checkpoints and logs go.
        gradient_accumulation_plugin: accumulation with all its options.
        step_scheduler_with_optimizer: schedulers advance with the optimizer, not at every call.
        kwargs_handlers: options of single components.
        dynamo_backend, dynamo_plugin: compile prepared models in place.
        strict: an option that cannot be applied is an error, not a warning; None takes ``--strict``.

    Raises:
        SettingError: a value is wrong, or two contradict each other.
        WorldError: the environment does not describe a world.
        NotBuiltError: something asked for is not built yet.
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
        every = (deepspeed_plugin, deepspeed_plugins, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin)
        plugins = tuple(given for given in every if given is not None)
        layout = options.of_layout(parallelism_config, torch_tp_plugin)
        compiler = options.of_compiler(dynamo_plugin, dynamo_backend)
        self.handlers = options.by_class(kwargs_handlers or [])
        self.state = AcceleratorState(
            mixed_precision=mixed_precision,
            cpu=cpu,
            dynamo_plugin=compiler,
            parallelism_config=layout,
            _from_accelerator=True,
            **self._group_options(),
        )
        self._world = self.state.world
        self.device_placement, self.rng_types = device_placement, rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = options.of_data(
            dataloader_config, None if split_batches is _UNSET else split_batches
        )
        self._open_project(project_config, project_dir)
        self._choose(plugins, layout)
        self.gradient_state = GradientState.own(
            options.of_accumulation(
                gradient_accumulation_plugin, gradient_accumulation_steps, self.strategy.accumulation
            ),
            ActiveLoaders(),
        )
        self._start_saving()
        self._start_tracking(log_with)
        self._forget()
        self._start_stopping()
        self._start_effects(
            strict,
            mixed_precision=mixed_precision,
            cpu=cpu,
            split_batches=split_batches is not _UNSET,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
        )
        roll_back(self, remember)

    def _open_project(
        self, config: ProjectConfiguration | None, folder: str | os.PathLike[str] | None
    ) -> None:
        self.project_configuration = config or ProjectConfiguration(project_dir=folder)  # type: ignore[arg-type]
        if folder is not None and self.project_dir is None:
            self.project_configuration.set_directories(str(folder))

    def _choose(self, plugins: tuple[Any, ...], layout: Any) -> None:
        """The precision and the strategy; the state shows what they are."""
        kind = PRECISIONS.get(self.state.mixed_precision)
        self.precision: Precision = kind(self.world.hardware, self.handlers)
        self.precision.check()
        self.strategy: Strategy = choose(
            Request(self.world, plugins, self.handlers, precision=self.precision.name, parallelism=layout)
        )
        self.strategy.owner = weakref.proxy(self)
        self.precision.agree(self.strategy.agreement())
        state = self.state
        state.distributed_type = type(state.distributed_type)(self.strategy.distributed_type(self.world))
        vars(state).update(self.strategy.plugins, device_mesh=self.strategy.mesh)

    def _forget(self) -> None:
        self._forget_prepared()
        self.gradient_state.step = 0
        self.strategy.forget()

    def _group_options(self) -> dict[str, Any]:
        handler = self.handlers.get(InitProcessGroupKwargs)
        return handler.to_kwargs() if handler is not None else {}

    # --- where this process is

    @property
    def world(self) -> World:
        """The world it was made in."""
        return self._world

    @property
    def distributed_type(self) -> Any:
        """The kind of world, a ``DistributedType``."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether several accelerators work together."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """Number format of the forward pass."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether the forward runs under torch's autocast."""
        return bool(self.precision.converts())

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, where the precision has one."""
        return self.precision.scaler

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by ``fully_shard``."""
        return self.state.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """The named degrees of parallelism, None without."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, None without."""
        return self.state.device_mesh

    @property
    def deepspeed_plugin(self) -> Any:
        """The engine's plugin, None when it is not used."""
        return self.state.deepspeed_plugin

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = 0) -> Any:
        """A loader without its first ``num_batches`` batches, for the rest of an interrupted epoch."""
        return skip(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forgets all prepared objects and frees memory; returns a None for each of ``objects``."""
        self.wait_for_checkpoint(release=True)
        self._forget()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as ``free_memory``."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Ends the runs of trackers, and closes the world. The last call of a script."""
        try:
            self._hear_ranks()
            self._end_tracking()
            self.wait_for_checkpoint()
        finally:
            self.state.destroy_process_group()
