"""The ``Preparer`` of an ``Accelerator``: it plans what ``prepare`` will do to which object, and does it.

What it has prepared is listed in ``PreparedObjects``, the only owner of these lists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate.core import environ, lazy_names
from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import require
from accelerate.core.units import show_bytes
from accelerate.data.loader import DataLoaderShard
from accelerate.data.prepare import DataLoaderConfiguration, join_batches, prepare_data_loader
from accelerate.facade.compilation import compile_regions
from accelerate.facade.device_availability import is_bitsandbytes_multi_backend_available
from accelerate.facade.host_copies import HOST_COPIES, check_host_copies
from accelerate.facade.module_queries import is_compiled_module
from accelerate.facade.optimizer import AcceleratedOptimizer, agree_on_optimizers, move_optimizer
from accelerate.facade.runtime import Runtime
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.offload.quantization import base as quantization
from accelerate.precision.autocast import describe_detachment, warn_of_replacement
from accelerate.strategy.base import (
    BatchPlacement,
    DataSharding,
    EngineStrategy,
    ObjectKind,
    PrepareBundle,
    PrepareStep,
    RankDataShard,
)

logger = logging.getLogger(__name__)


@dataclass
class PreparedObjects:
    """Models, optimizers, schedulers and loaders in the order of their ``prepare``, each once.

    Attributes:
        models: as ``prepare`` returned them.
        optimizers, schedulers, loaders: the wrappers.
        on_add: are called with the kind of each object that is added, and the object.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    on_add: list[Callable[[ObjectKind, Any], None]] = field(default_factory=list)

    def add(self, kind: ObjectKind, item: Any) -> None:
        """Add one object, unless it is there."""
        items: list[Any] = getattr(self, f"{kind}s")
        if not any(item is other for other in items):
            items.append(item)
            for watch in self.on_add:
                watch(kind, item)

    def find_model(self, model: nn.Module) -> nn.Module:
        """Return the prepared model inside what ``torch.compile`` made of it; another one as it is."""
        inner: Any = model
        while all(inner is not each for each in self.models):
            if not is_compiled_module(inner):
                return model
            inner = inner._orig_mod
        return inner

    def clear(self) -> None:
        """Forget all objects. Lists that were handed out keep them."""
        self.models, self.optimizers, self.schedulers, self.loaders = [], [], [], []

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present contents."""
        lists = {name: list(items) for name, items in vars(self).items() if name != "on_add"}

        def restore() -> None:
            vars(self).update({name: list(items) for name, items in lists.items()})

        return restore


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


@dataclass(frozen=True)
class PreparePlan:
    """The steps of one ``prepare``. Print it."""

    steps: tuple[PrepareStep, ...]

    def __str__(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        """A numbered line for each step, as the objects are when it is asked for first."""
        rows = [f"{number}. {step}{_format_memory(step)}" for number, step in enumerate(self.steps, 1)]
        return "\n".join(rows) or "nothing to do"


def _format_memory(step: PrepareStep) -> str:
    before, after = (0, 0) if step.memory is None else step.memory()
    return f" ({show_bytes(before)} -> {show_bytes(after)} here)" if before != after else ""


class Preparer:
    """Plans and applies ``prepare``, and wraps optimizers, schedulers and loaders.

    Args:
        runtime: the world, precision and strategy of the run.
        prepared: where prepared objects are added.
        options: read at each ``prepare``.
        first_step_checks: bound methods, called with each prepared optimizer before its first step.
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
        """Return the bundle of one ``prepare`` call.

        Args:
            objects: the arguments of ``prepare``.
            place: per object, whether it goes to the device; None places all as the options say.
            training: False when the models are only evaluated.

        Raises:
            PrepareError: nothing is given, or ``place`` has another length.
        """
        if not objects:
            raise PrepareError(
                "prepare() was given nothing", fix="accelerator.prepare(model, optimizer, loader)"
            )
        if place is not None and len(place) != len(objects):
            raise PrepareError(f"device_placement has {len(place)} entries for {len(objects)} objects")
        default = self.options.device_placement
        # A program assigns the type to the state of the Accelerator, or to that of the world.
        reported = self.runtime.world.reported.get("distributed_type")
        assigned = getattr(self.runtime.state, "distributed_type", None), reported
        return PrepareBundle(
            list(objects),
            [object_kind(item, self.runtime.strategy.owns_step) for item in objects],
            training,
            [default if wish is None else wish for wish in place or [None] * len(objects)],
            self.runtime.gradients.plugin_kwargs.get("num_steps") or 1,
            self.options.dataloader.split_batches,
            self.runtime.gradients.plugin_kwargs.get("step_scheduler_once", False),
            program_reduces_gradients="NO" in assigned,
            strict=self.options.strict,
        )

    def prepare(
        self, bundle: PrepareBundle, verify_device_map: Callable[[nn.Module], bool] | None = None
    ) -> None:
        """Replace the objects of ``bundle`` by prepared ones.

        Args:
            bundle: the objects.
            verify_device_map: tells whether a model is dispatched over several devices.

        Raises:
            PrepareError: one cannot be prepared; nothing is changed then, but by sharding where an unprepared
                optimizer holds parameters that it has replaced.
        """
        world = self.runtime.world
        models, optimizers = bundle.objects_of("model"), bundle.objects_of("optimizer")
        for value in bundle.objects_of("other"):
            self._note_unprepared(value)
        for index, model in [(n, m) for n, m in enumerate(bundle.objects) if bundle.kinds[n] == "model"]:
            is_dispatched = verify_device_map is not None and verify_device_map(model)
            if is_dispatched and world.size > 1 and not environ.get_flag("ACCELERATE_BYPASS_DEVICE_MAP"):
                raise PrepareError(
                    f"a model dispatched over several devices cannot train on {world.size} processes",
                    why="each process holds a whole copy of the model on its own device",
                    fix="load it without device_map, or start one process",
                )
            if is_dispatched or (hasattr(model, "hf_device_map") and quantization.keeps_placement(model)):
                bundle.place_on_device[index] = False
            quantization.check_trainable(
                model,
                several=world.size > 1,
                trained=bool(optimizers),
                can_train_on_cpu=is_bitsandbytes_multi_backend_available if bundle.training else None,
            )
        if quantization.quantized_models and bundle.training:
            quantization.check_adapters(models, optimizers)
        compares = optimizers and models and world.size > 1 and not bundle.program_reduces_gradients
        if compares and dist.is_initialized():
            prepared = [each.optimizer for each in self.prepared.optimizers]
            sharded = [m for m in models if getattr(m, "_is_accelerate_prepared", False)]
            shards = {p for m in sharded for p in m.parameters() if self.runtime.strategy.shards_params}
            agree_on_optimizers(optimizers, prepared, shards, world.device)
        if self.prepared.models:
            bundle.replace("model", self._find_prepared)
            pairs = zip(models, bundle.objects_of("model"), strict=True)
            bundle.given_unwrapped = [prepared for given, prepared in pairs if prepared is not given]
        for step in self.make_plan(bundle).steps:
            step.apply(bundle)
        if self.runtime.precision.scales_loss:  # known now: the models that the program has sharded by itself
            self.runtime.precision.set_overflow_sync(self.runtime.strategy.flag_reduction())
        for kind, item in zip(bundle.kinds, bundle.objects, strict=True):
            if kind not in ("prepared", "other"):
                self.prepared.add(kind, item)
                item._is_accelerate_prepared = True

    # --- the plan

    def make_plan(self, bundle: PrepareBundle) -> PreparePlan:
        """Return what ``prepare`` of this bundle will do, without changing anything.

        Raises:
            PrepareError: an object cannot be trained by this strategy, or in this precision.
        """
        runtime, models = self.runtime, bundle.objects_of("model")
        world, precision, strategy = runtime.world, runtime.precision, runtime.strategy
        if not strategy.owns_step:
            self._check_trained(bundle)
        steps: list[PrepareStep] = []
        tensors = (
            t
            for item, kind, wish in zip(bundle.objects, bundle.kinds, bundle.place_on_device, strict=True)
            if kind == "model" and wish
            for t in (*item.parameters(), *item.buffers())
        )
        # A strategy that shards places its own shards: the whole model might not fit.
        if not strategy.shards_params and any(t.device != world.device for t in tensors):
            place = partial(_place_models, device=world.device)
            memory = partial(_placed_bytes, models, world.device)
            steps.append(PrepareStep("place", f"the weights go to {world.device}", place, memory))
        if models and not strategy.owns_step:
            reason = precision.describe_attachment([strategy.unwrap(model) for model in models])
            # A precision is attached by hooks.
            if not reason and any(m._forward_hooks and precision.replaces_attached(m) for m in models):
                reason = describe_detachment(models)
            if reason:
                steps.append(PrepareStep("precision", reason, self._attach_precision))
        steps += strategy.prepare_steps(bundle)
        compiler = runtime.compiler
        if compiler.is_enabled and models:
            if isinstance(strategy, DataSharding):
                strategy.check_compiler()
            compiler.check_device(world.hardware)
            scope = "block by block" if compiler.use_regional_compilation else "as a whole"
            reason = f"torch.compile, {str(compiler.backend).lower()}, {scope}, in place"
            if self._uses_tf32:
                reason += "; matrix products of float32 in TF32"
            steps.append(PrepareStep("compile", reason, self._compile_models))
        for kind, reason, wrap in (
            ("optimizer", "steps only when gradients are complete", self._wrap_optimizer),
            ("scheduler", "advances with the optimizer", self._wrap_scheduler),
        ):
            if kind in bundle.kinds:
                apply = partial(PrepareBundle.replace, kind=kind, function=wrap)
                steps.append(PrepareStep(kind, reason, apply))
        if "loader" in bundle.kinds:
            shared = f"each of {world.size} processes takes its own samples"
            reason = shared if world.size > 1 else f"batches go to {world.device}"
            steps.append(PrepareStep("data", reason, self._wrap_loaders))
        return PreparePlan(tuple(steps))

    def _check_trained(self, bundle: PrepareBundle) -> None:
        """Refuse objects of DeepSpeed and Megatron-LM, and see what this precision says of parameters."""
        for item, kind in zip(bundle.objects, bundle.kinds, strict=True):
            if kind != "other" and hasattr(type(item), "prepared_as"):
                raise PrepareError(
                    f"a {type(item).__name__} stands for one of DeepSpeed or Megatron-LM, and the strategy "
                    f"is {self.runtime.strategy.name!r}",
                    fix="prepare an optimizer and a scheduler of torch, or launch with DeepSpeed or "
                    "Megatron-LM",
                )
        if not bundle.training:
            return
        check = partial(self.runtime.precision.check_trainable, strict=self.options.strict)
        models = bundle.objects_of("model")
        for model in models:
            check(model.named_parameters())
        named = {p for model in models for p in model.parameters()}
        for optimizer in bundle.objects_of("optimizer"):
            if hasattr(optimizer, HOST_COPIES):
                check_host_copies(optimizer, self.runtime.strategy, self.runtime.precision)
            groups = enumerate(group["params"] for group in optimizer.param_groups)
            rest = ((f"parameter {i} of group {g}", p) for g, group in groups for i, p in enumerate(group))
            check((name, p) for name, p in rest if p not in named)

    def _attach_precision(self, bundle: PrepareBundle) -> None:
        precision = self.runtime.precision
        for model in bundle.objects_of("model"):
            if precision.replaces_attached(model):
                warn_of_replacement(model, precision.name)
            precision.attach(model)

    @property
    def _uses_tf32(self) -> bool:
        """True for compiled models in float32, as in 1.15."""
        return self.runtime.precision.name == "no" and self.runtime.world.hardware.has_tf32

    def _compile_models(self, bundle: PrepareBundle) -> None:
        """Compile the models in place: class, names and state stay, and there is nothing to unwrap."""
        require("compilation")
        compiler = self.runtime.compiler
        compiler.use_cache()
        if self._uses_tf32:
            self.runtime.world.hardware.allow_tf32()
        for model in map(self.runtime.strategy.unwrap, bundle.objects_of("model")):
            if compiler.use_regional_compilation:
                compile_regions(model, **compiler.to_kwargs())
            else:
                model.compile(**compiler.to_kwargs())

    # --- objects that are left alone, and refused

    def _note_unprepared(self, value: Any) -> None:
        """Say once for each type that objects of it come back as they are."""
        kind = type(value)
        if value is None or kind in self._unprepared_types:
            return
        self._unprepared_types.add(kind)
        what = "models (nn.Module), optimizers (Optimizer), schedulers (LRScheduler) and DataLoaders of torch"
        note = ", so every process sees all of it" if hasattr(value, "__iter__") else ""
        if hasattr(value, "param_groups"):
            note = ", and it steps at each call (prepare_optimizer() takes an optimizer of any class)"
        if self.options.strict:
            raise PrepareError(
                f"a {kind.__name__} cannot be prepared",
                why=f"prepare takes {what}",
                fix="leave it out, wrap data in a DataLoader, use prepare_optimizer, or run without strict",
            )
        if self.runtime.world.rank == 0:
            logger.warning("prepare() gives back a %s as it is%s: it prepares %s", kind.__name__, note, what)

    def _find_prepared(self, model: nn.Module) -> nn.Module:
        """Return the prepared object of a model that is prepared again, else the model itself."""
        unwrap = self.runtime.strategy.unwrap
        return next((prepared for prepared in self.prepared.models if unwrap(prepared) is model), model)

    # --- wrappers

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        runtime, wrapper_class = self.runtime, AcceleratedOptimizer
        if isinstance(runtime.strategy, EngineStrategy):
            wrapper_class = runtime.strategy.wrapper_class("optimizer") or AcceleratedOptimizer
        prepared = next((each for each in self.prepared.optimizers if each.optimizer is optimizer), None)
        if isinstance(optimizer, AcceleratedOptimizer):  # of another Accelerator, or a copy
            prepared = optimizer
        wrapped = (prepared or wrapper_class(optimizer)).bind(
            runtime.gradients, runtime.precision, runtime.strategy, self.first_step_checks
        )
        # Added at once: a scheduler of the same bundle looks for it.
        self.prepared.add("optimizer", wrapped)
        for scheduler in self.prepared.schedulers:
            scheduler.follow_optimizer(wrapped)
        return wrapped

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        strategy, gradients = self.runtime.strategy, self.runtime.gradients
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler.gradient_state is gradients:
                return scheduler
            if scheduler.data_shards is None:  # made by hand, with options of its own
                return scheduler.bind(gradients)
            scheduler = scheduler.scheduler  # another Accelerator has wrapped it
        for prepared in self.prepared.schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        inner, optimizers = getattr(scheduler, "optimizer", None), self.prepared.optimizers
        followed = [each for each in optimizers if each.optimizer is inner or each is inner] or optimizers
        if isinstance(strategy, EngineStrategy) and strategy.advances_scheduler(scheduler):
            wrapper_class = strategy.wrapper_class("scheduler") or AcceleratedScheduler
            return wrapper_class(scheduler, list(followed))
        return AcceleratedScheduler(
            scheduler,
            list(followed),
            step_with_optimizer=self.options.step_scheduler_with_optimizer,
            split_batches=self.options.dataloader.split_batches,
        ).bind(gradients, strategy.data_shard.count)

    def _wrap_loaders(self, bundle: PrepareBundle) -> None:
        for index, (item, kind) in enumerate(zip(bundle.objects, bundle.kinds, strict=True)):
            if kind == "loader":
                bundle.objects[index] = self.wrap_loader(item, bundle.place_on_device[index])

    def wrap_loader(self, loader: DataLoader[Any], place: bool, **options: Any) -> DataLoaderShard:
        """Return the prepared loader.

        Args:
            loader: the user's; one that is prepared is returned as it is, and counts for this
                ``Accelerator`` from now on.
            place: whether its batches go to the device.
            options: of ``prepare_data_loader``; None stands for one that is not given.
        """
        runtime, config = self.runtime, self.options.dataloader
        world, strategy = runtime.world, runtime.strategy
        is_prepared = isinstance(loader, DataLoaderShard)
        if is_prepared and loader.bind(runtime.gradients, world.device if place else None):
            return loader
        # Some programs patch this public function; call theirs then.
        make = lazy_names.get_override("accelerate.data_loader", "prepare_data_loader", prepare_data_loader)
        more: dict[str, Any] = {"shard": config.shard} if config.shard != "auto" else {}
        more |= {"legacy_random_numbers": True} if config.legacy_random_numbers else {}
        is_own = make is prepare_data_loader  # a program's has the parameters of 1.x
        more |= {"strict": True} if self.options.strict and is_own else {}
        share, slicer = strategy.data_shard, None
        # A program that assigns 1 to ``num_processes`` may go on alone: no rank waits for another here.
        is_whole = world.reported.get("num_processes") == 1 and share.count == world.size > 1
        if is_whole:
            share = RankDataShard(1, 0)
            more |= {"shard": False} if is_own else {}
        elif isinstance(strategy, DataSharding):
            share, slicer = strategy.data_shard_for(loader), strategy.batch_slicer_for(loader)
        if share.micro_batches > 1 and not is_prepared:
            loader = join_batches(loader, share.micro_batches)
        more.update((name, value) for name, value in options.items() if value is not None)
        shard = make(
            loader,
            world.device,
            num_processes=share.count,
            process_index=share.index,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=None if is_whole else self.options.rng_types,
            dispatch_batches=None if is_whole else config.dispatch_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            **more,
        )
        if share.count < world.size and not is_whole and isinstance(shard, DataLoaderShard):
            shard.set_data_shard(share.count, share.index)
        shard.gradient_state, shard.active = runtime.gradients, runtime.gradients.loaders
        shard.active.run_pending = world.hardware.run_pending if world.hardware.is_lazy else None
        if isinstance(strategy, BatchPlacement):
            slicer = strategy.batch_placer_for(shard)
        shard.slice_batch, shard.data_shard = slicer, share
        return shard


def object_kind(value: Any, owns_step: bool) -> ObjectKind:
    """Return the kind of an object given to ``prepare``; ``"other"`` comes back as it is.

    Args:
        value: the object.
        owns_step: the strategy is DeepSpeed or Megatron-LM. Under others a stand-in for a schedule comes back
            as it is: programs have one beside a schedule-free optimizer, and never step it. So does, as in
            1.x, an optimizer of no torch class: its ``step`` may take other arguments.
    """
    if isinstance(value, DataLoader):
        return "loader"
    stands_for = getattr(type(value), "prepared_as", None)
    if stands_for is not None:
        return stands_for if owns_step or stands_for == "optimizer" else "other"
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer) or (owns_step and hasattr(value, "param_groups")):
        return "optimizer"
    return "scheduler" if isinstance(value, LRScheduler | AcceleratedScheduler) else "other"


def _placed_bytes(models: list[nn.Module], device: torch.device) -> tuple[int, int]:
    """Return the bytes of models that are on the device now, and those of all that will be."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    return sum(t.nbytes for t in tensors if t.device.type == device.type), sum(t.nbytes for t in tensors)


def _place_models(bundle: PrepareBundle, device: torch.device) -> None:
    """Move the models, and keep the optimizers on their parameters."""
    for index in bundle.positions("model"):
        if not bundle.place_on_device[index]:
            continue
        renewed = _move_model(bundle.objects[index], device)
        for optimizer in bundle.objects_of("optimizer"):
            move_optimizer(optimizer, renewed, device)


def _move_model(model: nn.Module, device: torch.device) -> dict[int, torch.Tensor]:
    """Move a model; return the new parameters by ``id`` of those that they replace.

    Some devices cannot take the data of a parameter in place. Torch makes new parameters there, one for each
    module that has it: tied weights are tied again.

    Raises:
        PrepareError: weights are on the meta device.
    """
    before = list(model.named_parameters(remove_duplicate=False))
    if empty := [name for name, tensor in (*before, *model.named_buffers()) if tensor.is_meta]:
        raise PrepareError(
            f"{len(empty)} tensors of the model have no values, the first is {empty[0]}",
            why="they are on the meta device, and only what is sharded can be loaded after prepare",
            fix="load the weights before: load_checkpoint_in_model(model, checkpoint)",
        )
    model.to(device)
    moved: dict[int, torch.Tensor] = {}
    for name, old in before:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        new = moved.setdefault(id(old), getattr(module, key))
        if new is not getattr(module, key):
            setattr(module, key, new)
    return {id(old): moved[id(old)] for _, old in before if moved[id(old)] is not old}
