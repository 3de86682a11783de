"""The ``Preparer`` of an ``Accelerator``: it makes objects ready for the strategy of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accelerate.core import environ, lazy_names
from accelerate.core.errors import PrepareError
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.loader import DataLoaderShard
from accelerate.data.prepare import prepare_data_loader
from accelerate.facade import prepare_plan
from accelerate.facade.device_availability import feature_checker
from accelerate.facade.optimizer import AcceleratedOptimizer, agree_on_optimizers
from accelerate.facade.prepared_objects import PreparedObjects
from accelerate.facade.runtime import Runtime
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.offload.offloaded_tensor import check_quantized, check_trainable
from accelerate.strategy.base import DataSharding, PrepareBundle
from accelerate.strategy.protocol.engine_strategy import EngineStrategy

logger = logging.getLogger(__name__)
_bitsandbytes_has_cpu = feature_checker("bitsandbytes:features", "multi_backend")


@dataclass
class PrepareOptions:
    """The options of ``prepare``, which a script may change between two calls of it.

    Attributes:
        device_placement: models and batches go to the device.
        step_scheduler_with_optimizer: schedulers advance with the optimizer, not at every call.
        rng_types: generators that rank 0 broadcasts at the start of every epoch.
        dataloader: how loaders share data.
        strict: an object that is nothing to prepare is an error; otherwise it comes back as it is.
    """

    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: list[Any] | None
    dataloader: DataLoaderConfiguration
    strict: bool = False


class Preparer:
    """Plans and applies ``prepare``, and wraps optimizers, schedulers and loaders.

    Args:
        runtime: the world, precision and strategy of the run.
        prepared: where prepared objects are added.
        options: read at each ``prepare``.
        first_step_checks: called with each prepared optimizer before its first step.
    """

    def __init__(
        self,
        runtime: Runtime,
        prepared: PreparedObjects,
        options: PrepareOptions,
        first_step_checks: Sequence[Callable[[AcceleratedOptimizer], None]] = (),
    ) -> None:
        self.runtime, self.prepared, self.options = runtime, prepared, options
        self.first_step_checks = tuple(first_step_checks)
        self._unprepared_types: set[type[Any]] = set()

    def make_bundle(
        self, objects: tuple[Any, ...], place: list[bool] | None, training: bool = True
    ) -> PrepareBundle:
        """Return the bundle of one ``prepare``; see ``prepare_plan.make_bundle``."""
        bundle = prepare_plan.make_bundle(objects, place, self.options.device_placement, training)
        bundle.accumulation_steps = self.runtime.gradients.num_steps
        bundle.split_batches = self.options.dataloader.split_batches
        return bundle

    def make_plan(self, bundle: PrepareBundle) -> prepare_plan.PreparePlan:
        """Return what ``prepare`` of this bundle will do, without changing anything."""
        runtime = self.runtime
        wrappers = prepare_plan.PrepareWrappers(self._wrap_optimizer, self._wrap_scheduler, self.wrap_loader)
        return prepare_plan.make_plan(
            bundle, runtime.world, runtime.precision, runtime.strategy, wrappers, runtime.compiler
        )

    def prepare(self, bundle: PrepareBundle) -> None:
        """Replace the objects of ``bundle`` by prepared ones.

        Raises:
            PrepareError: one cannot be prepared; nothing is changed then.
        """
        for value in bundle.objects_of("other"):
            self._note_unprepared(value)
        distributed, trained = self.runtime.world.size > 1, bool(bundle.objects_of("optimizer"))
        for model in bundle.objects_of("model"):
            if distributed and not environ.get_flag("ACCELERATE_BYPASS_DEVICE_MAP"):
                self._refuse_dispatched(model)
            check_trainable(model, several=distributed, trained=trained)
            if bundle.training:
                check_quantized(model, can_train_on_cpu=_bitsandbytes_has_cpu)
        if trained and dist.is_initialized() and distributed and bundle.objects_of("model"):
            agree_on_optimizers(bundle.objects_of("optimizer"), self.runtime.world.device)
        bundle.replace("model", self._find_prepared)
        self.make_plan(bundle).apply(bundle)
        self.prepared.add_bundle(bundle)

    def _note_unprepared(self, value: Any) -> None:
        """Say once for each type that objects of it come back as they are."""
        kind = type(value)
        if value is None or kind in self._unprepared_types:
            return
        self._unprepared_types.add(kind)
        what = "models (torch.nn.Module), optimizers, schedulers (LRScheduler) and DataLoaders of torch"
        if self.options.strict:
            raise PrepareError(
                f"a {kind.__name__} cannot be prepared",
                why=f"prepare takes {what}",
                fix="leave it out of prepare, wrap data in a DataLoader, or run without strict",
            )
        if self.runtime.world.rank == 0:
            shared = ", so every process sees all of it" if hasattr(value, "__iter__") else ""
            logger.warning(
                "prepare() gives back a %s as it is%s: it prepares %s", kind.__name__, shared, what
            )

    def _find_prepared(self, model: nn.Module) -> nn.Module:
        """Return the prepared object of a model that is prepared again, else the model itself."""
        unwrap = self.runtime.strategy.unwrap
        return next((prepared for prepared in self.prepared.models if unwrap(prepared) is model), model)

    def _refuse_dispatched(self, model: nn.Module) -> None:
        if is_dispatched(model):
            raise PrepareError(
                "a model dispatched over several devices cannot train on "
                f"{self.runtime.world.size} processes",
                why="each process holds a whole copy of the model on its own device",
                fix="load it without device_map, or start one process",
            )

    # --- wrappers

    def _wrapper_class(self, kind: str, usual: Any) -> Any:
        """Return the wrapper class of optimizers or schedulers: the engine's, or the usual one."""
        strategy = self.runtime.strategy
        if not isinstance(strategy, EngineStrategy) or kind not in strategy.wrapper_classes:
            return usual
        module, _, name = strategy.wrapper_classes[kind].partition(":")
        return getattr(import_module(module), name)

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        for prepared in self.prepared.optimizers:
            if prepared.optimizer is optimizer:
                return prepared
        runtime = self.runtime
        wrapped = self._wrapper_class("optimizer", AcceleratedOptimizer)(optimizer).bind(
            runtime.gradients, runtime.precision, runtime.strategy, self.first_step_checks
        )
        # Added at once: a scheduler of the same bundle looks for it.
        self.prepared.add("optimizer", wrapped)
        for scheduler in self.prepared.schedulers:
            scheduler.follow_optimizer(wrapped)
        return wrapped

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for prepared in self.prepared.schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        inner, optimizers = getattr(scheduler, "optimizer", None), self.prepared.optimizers
        followed = [each for each in optimizers if each.optimizer is inner or each is inner] or optimizers
        strategy = self.runtime.strategy
        if isinstance(strategy, EngineStrategy) and strategy.advances_scheduler(scheduler):
            return self._wrapper_class("scheduler", AcceleratedScheduler)(scheduler, list(followed))
        return AcceleratedScheduler(
            scheduler,
            list(followed),
            step_with_optimizer=self.options.step_scheduler_with_optimizer,
            split_batches=self.options.dataloader.split_batches,
        ).bind(self.runtime.gradients, strategy.data_shard.count)

    def wrap_loader(self, loader: DataLoader[Any], place: bool, **options: Any) -> DataLoaderShard:
        """Return the prepared loader.

        Args:
            loader: the user's; one that this ``Accelerator`` has prepared is returned as it is.
            place: whether its batches go to the device.
            options: of ``prepare_data_loader``; None stands for one that is not given.
        """
        runtime, config = self.runtime, self.options.dataloader
        world, strategy = runtime.world, runtime.strategy
        if isinstance(loader, DataLoaderShard) and loader.active is runtime.gradients.loaders:
            return loader
        more: dict[str, Any] = {"shard": config.shard} if config.shard != "auto" else {}
        if config.legacy_random_numbers:
            more["legacy_random_numbers"] = True
        share, slicer = strategy.data_shard, None
        if isinstance(strategy, DataSharding):
            share, slicer = strategy.data_shard_for(loader), strategy.batch_slicer_for(loader)
        more.update((name, value) for name, value in options.items() if value is not None)
        # Some programs patch this public function; call theirs then.
        prepare = lazy_names.get_override(
            "accelerate.data_loader", "prepare_data_loader", prepare_data_loader
        )
        shard = prepare(
            loader,
            world.device,
            num_processes=share.count,
            process_index=share.index,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=self.options.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            **more,
        )
        if share.count < world.size and isinstance(shard, DataLoaderShard):
            shard.set_data_shard(share.count, share.index)
        shard.active, shard.gradient_state = runtime.gradients.loaders, runtime.gradients
        shard.slice_batch, shard.data_shard = slicer, share
        return shard


def is_dispatched(model: nn.Module) -> bool:
    """Return whether a submodule of ``model`` is dispatched over several devices."""
    maps = (getattr(module, "hf_device_map", None) for module in model.modules())
    return any(places is not None and len(set(places.values())) > 1 for places in maps)
