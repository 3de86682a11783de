"""``Accelerator.prepare``: models, optimizers, schedulers and loaders for the strategy of this run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.core import environ, lazy_names
from accelerate.core.errors import PrepareError
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.loader import DataLoaderShard
from accelerate.data.prepare import prepare_data_loader
from accelerate.facade import prepare_plan
from accelerate.facade.gradient_state import GradientState
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.processes import ProcessMixin
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.offload.trainable_check import check_trainable
from accelerate.precision.base import Precision
from accelerate.strategy.base import PrepareBundle, Strategy


class PreparationMixin(ProcessMixin):
    """Prepares objects, and configures how loaders shard data.

    Attributes:
        device_placement: whether models and batches go to the device.
        step_scheduler_with_optimizer: schedulers advance with the optimizer, not at every call.
    """

    strategy: Strategy
    precision: Precision
    state: Any
    gradient_state: GradientState
    dataloader_config: DataLoaderConfiguration
    rng_types: list[Any] | None
    device_placement: bool
    step_scheduler_with_optimizer: bool

    if TYPE_CHECKING:

        def _check_first_step(self, optimizer: AcceleratedOptimizer) -> None: ...
        def _report_first_step(self) -> None: ...
        def _report_options(self, depth: int = 5) -> None: ...

    def _clear_prepared(self) -> None:
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders for the strategy of this run.

        Args:
            args: the objects, in any order and number; None stands for itself.
            device_placement: per object, whether it goes to the device.

        Returns:
            The prepared objects in the same order; one object alone comes back alone.

        Raises:
            PrepareError: nothing is given, or an object cannot be prepared; nothing is changed then.
        """
        bundle = prepare_plan.make_bundle(args, device_placement, self.device_placement)
        self._prepare(bundle)
        return bundle.objects[0] if len(args) == 1 else tuple(bundle.objects)

    def plan(self, *args: Any, device_placement: list[bool] | None = None) -> prepare_plan.PreparePlan:
        """Return the plan of ``prepare`` for these objects without changing them. Print it."""
        return self._make_plan(prepare_plan.make_bundle(args, device_placement, self.device_placement))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; ``evaluation_mode`` places it and sets its precision only."""
        place = None if device_placement is None else [device_placement]
        bundle = prepare_plan.make_bundle(
            (model,), place, self.device_placement, training=not evaluation_mode
        )
        self._prepare(bundle)
        return bundle.objects[0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler."""
        return self.prepare(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        shard: bool | str | None = None,
    ) -> DataLoader[Any]:
        """Prepare one loader.

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
        self._dataloaders += _new_objects([prepared], self._dataloaders)
        self._report_options()
        return prepared

    def _prepare(self, bundle: PrepareBundle) -> None:
        for model in bundle.objects_of("model"):
            self._check_device_map(model)
            check_trainable(model, several=self.use_distributed, trained=bool(bundle.objects_of("optimizer")))
        bundle.replace("model", self._find_prepared)
        self._make_plan(bundle).apply(bundle)
        self._models += _new_objects(bundle.objects_of("model"), self._models)
        self._optimizers += _new_objects(bundle.objects_of("optimizer"), self._optimizers)
        self._schedulers += _new_objects(bundle.objects_of("scheduler"), self._schedulers)
        self._dataloaders += _new_objects(bundle.objects_of("loader"), self._dataloaders)
        for item in bundle.objects:
            if item is not None:
                item._is_accelerate_prepared = True
        self._report_options()

    def _find_prepared(self, model: nn.Module) -> nn.Module:
        """Return the prepared object of a model that is prepared again, else the model itself."""
        return next((prepared for prepared in self._models if self.strategy.unwrap(prepared) is model), model)

    def _make_plan(self, bundle: PrepareBundle) -> prepare_plan.PreparePlan:
        wrappers = prepare_plan.PrepareWrappers(self._wrap_optimizer, self._wrap_scheduler, self._wrap_loader)
        compiler = self.state.dynamo_plugin
        return prepare_plan.make_plan(bundle, self.world, self.precision, self.strategy, wrappers, compiler)

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        wrapped = next((prepared for prepared in self._optimizers if prepared.optimizer is optimizer), None)
        if wrapped is None:
            wrapped = self._wrapper_class("optimizer", AcceleratedOptimizer)(optimizer).bind(
                self.gradient_state, self.precision, self.strategy, self._before_first_step
            )
            # Registered at once: a scheduler of the same bundle looks for it.
            self._optimizers.append(wrapped)
            for scheduler in self._schedulers:
                scheduler.follow_optimizer(wrapped)
        return wrapped

    def _wrapper_class(self, kind: str, usual: Any) -> Any:
        """Return the wrapper class of optimizers or schedulers: the strategy's, or the usual one."""
        module, _, name = self.strategy.wrapper_classes.get(kind, "").partition(":")
        return getattr(import_module(module), name) if name else usual

    def _before_first_step(self, optimizer: AcceleratedOptimizer) -> None:
        self._check_first_step(optimizer)
        self._report_first_step()

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for prepared in self._schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        inner = getattr(scheduler, "optimizer", None)
        followed = [o for o in self._optimizers if o.optimizer is inner or o is inner] or self._optimizers
        if self.strategy.advances_scheduler(scheduler):
            return self._wrapper_class("scheduler", AcceleratedScheduler)(scheduler, list(followed))
        return AcceleratedScheduler(
            scheduler,
            list(followed),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        ).bind(self.gradient_state, self.strategy.data_shard.count)

    def _wrap_loader(self, loader: DataLoader[Any], place: bool, **options: Any) -> DataLoaderShard:
        if isinstance(loader, DataLoaderShard) and loader.active is self.gradient_state.loaders:
            return loader
        config = self.dataloader_config
        more: dict[str, Any] = {"shard": config.shard} if config.shard != "auto" else {}
        share = self.strategy.data_shard_for(loader)
        if share.count != self.world.size:
            more.update(num_processes=share.count, process_index=share.index)
        more.update((name, value) for name, value in options.items() if value is not None)
        # Some programs patch this public function; call theirs then.
        prepare = lazy_names.get_override(
            "accelerate.data_loader", "prepare_data_loader", prepare_data_loader
        )
        shard = prepare(
            loader,
            self.device,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            **more,
        )
        if share.count < self.world.size and isinstance(shard, DataLoaderShard):
            shard.set_data_shard(share.count, share.index)
        shard.active, shard.gradient_state = self.gradient_state.loaders, self.gradient_state
        shard.slice_batch, shard.data_shard = self.strategy.batch_slicer_for(loader), share
        return shard

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a submodule of ``model`` is dispatched over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(places is not None and len(set(places.values())) > 1 for places in maps)

    def _check_device_map(self, model: nn.Module) -> None:
        allowed = environ.get_flag("ACCELERATE_BYPASS_DEVICE_MAP")
        if self.use_distributed and not allowed and self.verify_device_map(model):
            raise PrepareError(
                f"a model dispatched over several devices cannot train on {self.num_processes} processes",
                why="each process holds a whole copy of the model on its own device",
                fix="load it without device_map, or start one process",
            )

    # --- options of loaders

    @property
    def split_batches(self) -> bool:
        """The option of ``DataLoaderConfiguration``."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """The option of ``DataLoaderConfiguration``."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """The option of ``DataLoaderConfiguration``; used by the next ``prepare``."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """The option of ``DataLoaderConfiguration``."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """The option of ``DataLoaderConfiguration``."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """The option of ``DataLoaderConfiguration``."""
        return self.dataloader_config.use_stateful_dataloader


def _new_objects(items: list[Any], known: list[Any]) -> list[Any]:
    """Return the items that are not in ``known``, compared by identity."""
    distinct = {id(item): item for item in items}.values()
    return [item for item in distinct if not any(item is other for other in known)]
