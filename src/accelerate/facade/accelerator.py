"""``Accelerator``: the object a training script holds. Every method delegates to one room."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.core import environ, lazy
from accelerate.core.errors import PrepareError
from accelerate.core.handler import KwargsHandler
from accelerate.data.active import ActiveLoaders
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.loader import DataLoaderShard
from accelerate.data.loader import skip_first_batches as skip
from accelerate.data.prepare import prepare_data_loader
from accelerate.facade import options
from accelerate.facade import plan as plans
from accelerate.facade.effects import Effects
from accelerate.facade.given import Given
from accelerate.facade.gradient import GradientAccumulationPlugin, GradientState
from accelerate.facade.join import joined
from accelerate.facade.loop import Loop
from accelerate.facade.mesh import Meshed
from accelerate.facade.metrics import gather_for_metrics
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.rollback import remember
from accelerate.facade.saving import Saving
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.facade.state import AcceleratorState
from accelerate.facade.stopping import Stopping
from accelerate.facade.tracking import Tracking
from accelerate.offload.training import check_trainable
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.strategy import choose
from accelerate.strategy.base import Bundle, Request, Strategy
from accelerate.watch.retry import release_memory, roll_back
from accelerate.world import collective
from accelerate.world.world import InitProcessGroupKwargs, World

_UNSET: Any = object()


class Accelerator(Given, Loop, Saving, Stopping, Tracking, Effects, Meshed):
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
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)  # type: ignore[arg-type]
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(str(project_dir))
        self.precision: Precision = PRECISIONS.get(self.state.mixed_precision)(
            self.world.hardware, self.handlers
        )
        self.precision.check()
        self.strategy: Strategy = choose(
            Request(self.world, plugins, self.handlers, precision=self.precision.name, parallelism=layout)
        )
        self.precision.agree(self.strategy.agreement())
        self.state.distributed_type = type(self.state.distributed_type)(
            self.strategy.distributed_type(self.world)
        )
        vars(self.state).update(self.strategy.plugins, device_mesh=self.strategy.mesh)
        self.gradient_state = GradientState.own(
            options.of_accumulation(
                gradient_accumulation_plugin, gradient_accumulation_steps, self.strategy.accumulation
            ),
            ActiveLoaders(),
        )
        self.strategy.owner = weakref.proxy(self)
        self._trigger = False
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

    def _forget(self) -> None:
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
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

    # --- how loaders share data

    @property
    def split_batches(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """See ``DataLoaderConfiguration``; consulted by the next ``prepare``."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """See ``DataLoaderConfiguration``."""
        return self.dataloader_config.use_stateful_dataloader

    # --- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Makes models, optimizers, schedulers and loaders work together here.

        Args:
            args: the objects, in any order and number; None stands for itself.
            device_placement: per object, whether it goes to the device.

        Returns:
            The prepared objects in the same order; one object alone comes back alone.

        Raises:
            PrepareError: nothing is given, or an object cannot be prepared; nothing is changed then.
        """
        bundle = plans.bundle_of(args, device_placement, self.device_placement)
        self._prepare(bundle)
        return bundle.objects[0] if len(args) == 1 else tuple(bundle.objects)

    def plan(self, *args: Any, device_placement: list[bool] | None = None) -> plans.Plan:
        """What ``prepare`` of these objects would do; does nothing. Print it."""
        return self._plan(plans.bundle_of(args, device_placement, self.device_placement))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; ``evaluation_mode`` places it and sets its precision only."""
        place = None if device_placement is None else [device_placement]
        bundle = plans.bundle_of((model,), place, self.device_placement, training=not evaluation_mode)
        self._prepare(bundle)
        return bundle.objects[0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepares one optimizer."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepares one learning rate scheduler."""
        return self.prepare(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        shard: bool | str | None = None,
    ) -> DataLoader[Any]:
        """Prepares one loader.

        Args:
            data_loader: the user's.
            device_placement: whether its batches go to the device.
            slice_fn_for_dispatch: cuts a collated batch under dispatch; see ``DataLoaderDispatcher``.
            shard: see ``DataLoaderConfiguration``; None takes the configuration's.
        """
        place = self.device_placement if device_placement is None else device_placement
        prepared = self._wrap_loader(
            data_loader, place, slice_fn_for_dispatch=slice_fn_for_dispatch, shard=shard
        )
        self._dataloaders += _unknown([prepared], self._dataloaders)
        self._report_effects()
        return prepared

    def _prepare(self, bundle: Bundle) -> None:
        for model in bundle.of("model"):
            self._check_device_map(model)
            check_trainable(model, several=self.use_distributed, trained=bool(bundle.of("optimizer")))
        bundle.replace("model", self._prepared_before)
        self._plan(bundle).apply(bundle)
        self._models += _unknown(bundle.of("model"), self._models)
        self._optimizers += _unknown(bundle.of("optimizer"), self._optimizers)
        self._schedulers += _unknown(bundle.of("scheduler"), self._schedulers)
        self._dataloaders += _unknown(bundle.of("loader"), self._dataloaders)
        for item in bundle.objects:
            if item is not None:
                item._is_accelerate_prepared = True
        self._report_effects()

    def _prepared_before(self, model: nn.Module) -> nn.Module:
        """The prepared object of a user's model that is prepared again, else the model itself."""
        return next((known for known in self._models if self.strategy.unwrap(known) is model), model)

    def _plan(self, bundle: Bundle) -> plans.Plan:
        wrappers = plans.Wrappers(self._wrap_optimizer, self._wrap_scheduler, self._wrap_loader)
        compiler = self.state.dynamo_plugin
        return plans.make(bundle, self.world, self.precision, self.strategy, wrappers, compiler)

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        wrapped = next((known for known in self._optimizers if known.optimizer is optimizer), None)
        if wrapped is None:
            wrapped = self._wrapper("optimizer", AcceleratedOptimizer)(optimizer).bind(
                self.gradient_state, self.precision, self.strategy, self._before_first_step
            )
            # Registered at once: a scheduler of the same bundle looks for it.
            self._optimizers.append(wrapped)
            for scheduler in self._schedulers:
                scheduler.follow(wrapped)
        return wrapped

    def _wrapper(self, kind: str, usual: Any) -> Any:
        """The class that stands before an optimizer or a schedule: that of the engine, or the usual one."""
        module, _, name = self.strategy.wrappers.get(kind, "").partition(":")
        return getattr(import_module(module), name) if name else usual

    def _before_first_step(self, optimizer: AcceleratedOptimizer) -> None:
        self._check_first_step(optimizer)
        self._effects_of_first_step()

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for known in self._schedulers:
            if known.scheduler is scheduler:
                return known
        inner = getattr(scheduler, "optimizer", None)
        followed = [o for o in self._optimizers if o.optimizer is inner or o is inner] or self._optimizers
        if self.strategy.advances(scheduler):
            return self._wrapper("scheduler", AcceleratedScheduler)(scheduler, list(followed))
        return AcceleratedScheduler(
            scheduler,
            list(followed),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        ).bind(self.gradient_state, self.strategy.share.count)

    def _wrap_loader(self, loader: DataLoader[Any], place: bool, **asked: Any) -> DataLoaderShard:
        if isinstance(loader, DataLoaderShard) and loader.active is self.gradient_state.loaders:
            return loader
        given = self.dataloader_config
        more: dict[str, Any] = {"shard": given.shard} if given.shard != "auto" else {}
        share = self.strategy.share_of(loader)
        if share.count != self.world.size:
            more.update(num_processes=share.count, process_index=share.index)
        more.update((name, value) for name, value in asked.items() if value is not None)
        # Some programs replace this function; theirs is called then.
        prepare = lazy.patched("accelerate.data_loader", "prepare_data_loader", prepare_data_loader)
        shard = prepare(
            loader,
            self.device,
            split_batches=given.split_batches,
            put_on_device=place,
            rng_types=self.rng_types,
            dispatch_batches=given.dispatch_batches,
            even_batches=given.even_batches,
            use_seedable_sampler=given.use_seedable_sampler,
            data_seed=given.data_seed,
            non_blocking=given.non_blocking,
            use_stateful_dataloader=given.use_stateful_dataloader,
            **more,
        )
        if share.count < self.world.size and isinstance(shard, DataLoaderShard):
            shard.among(share.count, share.index)
        shard.active, shard.gradient_state = self.gradient_state.loaders, self.gradient_state
        shard.own_part, shard.data_share = self.strategy.part_of(loader), share
        return shard

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a submodule of ``model`` is spread over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(places is not None and len(set(places.values())) > 1 for places in maps)

    def _check_device_map(self, model: nn.Module) -> None:
        allowed = environ.flag("ACCELERATE_BYPASS_DEVICE_MAP")
        if self.use_distributed and not allowed and self.verify_device_map(model):
            raise PrepareError(
                f"a model spread over several devices cannot be trained by {self.num_processes} processes",
                why="each process holds a whole copy of the model on its own device",
                fix="load it without device_map, or start one process",
            )

    # --- between processes

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, joined along dimension 0 in rank order; see ``collective.gather``."""
        return collective.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers and leaves out the samples that only filled the last step: each counts once, in order.

        Args:
            input_data: a tree of tensors with one row per sample, or a list of any objects, one per sample,
                or a dict of such; see ``facade.metrics``.
            use_gather_object: treat it as objects.
        """
        loader = self.gradient_state.active_dataloader
        share = getattr(loader, "data_share", None) or self.strategy.share
        if share.count == self.strategy.share.count < self.world.size and not use_gather_object:
            input_data = self.strategy.joined(input_data)
        return gather_for_metrics(
            input_data,
            loader,
            as_objects=use_gather_object,
            speaks=share.speaks,
            alone=share.count == self.world.size,
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """A loop whose processes may have different numbers of batches; one process needs nothing for it.

        Args:
            joinables: prepared models.
            even_batches: replaces the option of the prepared loaders inside the block.

        Raises:
            PrepareError: a model is not replicated.
        """
        if not self.use_distributed:
            return nullcontext()
        return joined(joinables, self._dataloaders, even_batches)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The element-wise sum or mean over processes, times ``scale``."""
        return collective.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Tensors grown along ``dim`` to the greatest length on any process."""
        return collective.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raises this process's flag, for ``check_trigger`` on all."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process raised its flag; lowers it."""
        raised = any(collective.all_objects(self._trigger))
        if raised:
            self._trigger = False
        return raised

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


def _unknown(items: list[Any], known: list[Any]) -> list[Any]:
    """Those that are not the very objects of ``known``."""
    distinct = {id(item): item for item in items}.values()
    return [item for item in distinct if not any(item is other for other in known)]
