"""``Accelerator``: the object a training script holds. Every method delegates to one room."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.core import tree
from accelerate.core.errors import NotBuiltError, PrepareError, SettingError
from accelerate.core.handler import KwargsHandler
from accelerate.core.setting import load
from accelerate.data.active import ActiveLoaders
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.loader import prepare_data_loader as prepare_data_loader
from accelerate.facade import plan as plans
from accelerate.facade.gradient import GradientAccumulationPlugin, GradientSettings, GradientState
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.saving import Saving
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.facade.state import AcceleratorState
from accelerate.precision import PRECISIONS
from accelerate.precision.autocast import AutocastKwargs
from accelerate.precision.base import Precision
from accelerate.strategy import STRATEGIES, choose
from accelerate.strategy.base import Request, Strategy
from accelerate.watch.retry import release_memory
from accelerate.world import collective
from accelerate.world.world import InitProcessGroupKwargs, World

_UNSET: Any = object()


class Accelerator(Saving):
    """Runs a training loop on whatever it is launched on.

    Args:
        device_placement: move models and batches to the device.
        split_batches: see ``DataLoaderConfiguration``.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; None takes the launcher's choice.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU.
        dataloader_config: how loaders share data.
        rng_types: kept for compatibility; the order of samples is agreed by the loaders themselves.
        project_dir, project_config: where checkpoints and logs go.
        gradient_accumulation_plugin: accumulation with all its options.
        step_scheduler_with_optimizer: schedulers advance with the optimizer, not at every call.
        kwargs_handlers: options of single components.

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
    ) -> None:
        plugins = tuple(
            given
            for given in (
                deepspeed_plugin,
                deepspeed_plugins,
                fsdp_plugin,
                torch_tp_plugin,
                megatron_lm_plugin,
            )
            if given is not None
        )
        _refuse_unbuilt(log_with, dynamo_backend, dynamo_plugin, parallelism_config)
        self.handlers = _by_class(kwargs_handlers or [])
        self.state = AcceleratorState(
            mixed_precision=mixed_precision,
            cpu=cpu,
            parallelism_config=parallelism_config,
            _from_accelerator=True,
            **self._group_options(),
        )
        self._world = self.state.world
        self.device_placement, self.rng_types = device_placement, rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = _data_options(dataloader_config, split_batches)
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)  # type: ignore[arg-type]
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(str(project_dir))
        self.precision: Precision = PRECISIONS.get(self.state.mixed_precision)(
            self.world.hardware, self.handlers
        )
        self.precision.check()
        self.strategy: Strategy = choose(
            Request(self.world, plugins, self.handlers, precision=self.precision.name)
        )
        self.state.distributed_type = type(self.state.distributed_type)(
            self.strategy.distributed_type(self.world)
        )
        self.gradient_state = GradientState.own(
            _accumulation(gradient_accumulation_plugin, gradient_accumulation_steps), ActiveLoaders()
        )
        self._trigger = False
        self._start_saving()
        self.trackers: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
        self.gradient_state.step = 0

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

    @property
    def ddp_handler(self) -> Any:
        """Options of the replicas made by the next ``prepare``."""
        return self.strategy.handler

    @ddp_handler.setter
    def ddp_handler(self, value: Any) -> None:
        self.strategy.handler = value

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
        return plans.make(self, plans.bundle_of(args, device_placement, self.device_placement))

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
    ) -> DataLoader[Any]:
        """Prepares one loader."""
        return self.prepare(
            data_loader, device_placement=None if device_placement is None else [device_placement]
        )

    def _prepare(self, bundle: Any) -> None:
        for model in bundle.of("model"):
            self._check_device_map(model)
        plans.make(self, bundle).apply(bundle)
        for kind, known in (
            ("model", self._models),
            ("optimizer", self._optimizers),
            ("scheduler", self._schedulers),
            ("loader", self._dataloaders),
        ):
            for item in bundle.of(kind):
                if not any(item is other for other in known):
                    known.append(item)
                item._is_accelerate_prepared = True

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        wrapped = next((known for known in self._optimizers if known.optimizer is optimizer), None)
        if wrapped is None:
            wrapped = plans.wrap_optimizer(self, optimizer)
            # Registered at once: a scheduler of the same bundle looks for it.
            if not any(wrapped is known for known in self._optimizers):
                self._optimizers.append(wrapped)
        return wrapped

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        inner = getattr(scheduler, "optimizer", None)
        followed = [o for o in self._optimizers if o.optimizer is inner or o is inner] or self._optimizers
        return AcceleratedScheduler(
            scheduler,
            list(followed),
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        ).bind(self.gradient_state)

    def _prepare_loader(self, loader: DataLoader[Any], place: bool) -> Any:
        return plans.prepare_loader(self, loader, place)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a submodule of ``model`` is spread over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(places is not None and len(set(places.values())) > 1 for places in maps)

    def _check_device_map(self, model: nn.Module) -> None:
        if self.use_distributed and self.verify_device_map(model):
            raise PrepareError(
                f"a model spread over several devices cannot be trained by {self.num_processes} processes",
                why="each process holds a whole copy of the model on its own device",
                fix="load it without device_map, or start one process",
            )

    # --- the loop

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are complete after the current backward."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    @property
    def step(self) -> int:
        """Micro-batches since the last window closed at the end of a loader."""
        return self.gradient_state.step

    @step.setter
    def step(self, step: int) -> None:
        self.gradient_state.step = step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients are reduced, and optimizers step, in the last of a window only.

        Args:
            models: those whose gradients accumulate; all prepared ones when none is given.
        """
        return _Accumulation(self, models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around forward and backward: gradients of ``model`` stay local."""
        return self.strategy.accumulating((model,), sync=False)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Generator[None]:
        """The backward inside reduces gradients though its forward ran in ``no_sync``."""
        for strategy in STRATEGIES:
            strategy.sync_next_backward(model)
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward pass of ``loss`` divided by ``gradient_accumulation_steps``, scaled by the precision.

        Args:
            loss: a scalar.
            kwargs: arguments of ``loss.backward``.
        """
        steps = self.gradient_state.num_steps
        if steps != 1 and not self.strategy.owns_step:
            loss = loss / steps
        self.strategy.backward(self.precision.scale(loss), **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Takes the loss scale out of the gradients of one optimizer, several, or (None) all."""
        wanted = self._optimizers if optimizer is None else optimizer
        for item in wanted if isinstance(wanted, list | tuple) else [wanted]:
            self.precision.unscale(getattr(item, "optimizer", item))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scales gradients so that their global norm is at most ``max_norm``.

        Args:
            parameters: a tensor or an iterable of them; those without a gradient do not count.
            max_norm: the limit; ``float("inf")`` only measures.
            norm_type: the p of the norm.

        Returns:
            The norm before, a scalar on the device. While gradients are being accumulated nothing is
            clipped, and it is the norm of this process's gradients so far.
        """
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.sync_gradients:
            return self._norm_so_far(params, norm_type)
        self._unscale_owners(params)
        return self.strategy.clip_norm(params, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps each gradient element to ``[-clip_value, clip_value]``; does nothing while accumulating."""
        if self.sync_gradients:
            params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._unscale_owners(params)
            self.strategy.clip_value(params, clip_value)

    def _norm_so_far(self, params: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return torch.zeros((), device=self.device)
        norms = torch.stack([torch.linalg.vector_norm(g.float(), norm_type) for g in grads])
        return torch.linalg.vector_norm(norms, norm_type) / self.precision.loss_scale()

    def _unscale_owners(self, params: list[torch.Tensor]) -> None:
        """Only optimizers whose gradients are clipped: others may have no backward behind them yet."""
        wanted = {id(p) for p in params if p.grad is not None}
        for optimizer in self._optimizers:
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                self.precision.unscale(optimizer.optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because a gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Generator[None]:
        """Runs the block in the forward's number format."""
        with self.precision.forward(autocast_handler):
            yield

    # --- between processes

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, joined along dimension 0 in rank order; see ``collective.gather``."""
        return collective.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers and leaves out the samples that only filled the last step: each counts once, in order.

        Args:
            input_data: a tree of tensors with one row per sample, or a list of any objects, one per sample.
            use_gather_object: treat it as objects.
        """
        tensors = all(isinstance(leaf, torch.Tensor) for _, leaf in tree.leaves(input_data))
        if use_gather_object or not tensors:
            return self._real(collective.gather_object(input_data))
        return tree.map_tree(self._real, self.gather(input_data))

    def _real(self, rows: Any) -> Any:
        loader = self.gradient_state.active_dataloader
        if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
            return rows
        return rows[: loader.remainder]

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

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forgets all prepared objects and frees memory; returns a None for each of ``objects``."""
        self._forget()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as ``free_memory``."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Closes trackers and the world. The last call of a script."""
        for tracker in self.trackers:
            tracker.finish()
        self.state.destroy_process_group()


class _Accumulation(AbstractContextManager[None]):
    """``with accelerator.accumulate(...)``; a class, since a generator costs ten times as much per step."""

    __slots__ = ("accelerator", "inner", "models")

    def __init__(self, accelerator: Accelerator, models: tuple[nn.Module, ...]) -> None:
        self.accelerator, self.models = accelerator, models

    def __enter__(self) -> None:
        gradients = self.accelerator.gradient_state
        sync = gradients.advance() or gradients.plugin_kwargs.get("sync_each_batch", False)
        models = self.models or self.accelerator._models
        self.inner = self.accelerator.strategy.accumulating(models, sync=sync)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)


def _refuse_unbuilt(log_with: Any, dynamo_backend: Any, dynamo_plugin: Any, parallelism_config: Any) -> None:
    compiled = dynamo_plugin is not None or str(dynamo_backend or "no").lower() != "no"
    asked = {
        "log_with": (log_with is not None, "trackers will come as one file each"),
        "dynamo_backend": (
            compiled,
            "compiling prepared models in place will come; use model.compile() until then",
        ),
        "parallelism_config": (parallelism_config is not None, "named degrees of parallelism will come"),
    }
    for name, (given, planned) in asked.items():
        if given:
            raise NotBuiltError(f"Accelerator({name}=...) is not built yet", why=planned)


def _by_class(handlers: list[KwargsHandler]) -> dict[type, KwargsHandler]:
    known: list[type[KwargsHandler]] = [InitProcessGroupKwargs]
    known += [s.handler_class for s in STRATEGIES if s.handler_class is not None]
    known += [c for p in PRECISIONS for c in p.handler_classes if c not in known]
    found: dict[type, KwargsHandler] = {}
    for handler in handlers:
        kind = next((k for k in known if isinstance(handler, k)), None)
        if kind is None:
            raise SettingError(
                f"{type(handler).__name__} is not a kwargs handler that is known here",
                why=f"known: {', '.join(sorted({k.__name__ for k in known}))}",
                fix="give an instance of one of them in kwargs_handlers=[...]",
            )
        if kind in found:
            raise SettingError(f"two {kind.__name__} are given in kwargs_handlers", fix="keep one of them")
        found[kind] = handler
    return found


def _data_options(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    if split_batches is _UNSET:
        return config or DataLoaderConfiguration()
    if config is not None:
        raise SettingError(
            "split_batches is given twice: as an argument and in dataloader_config", fix="keep the second"
        )
    return DataLoaderConfiguration(split_batches=bool(split_batches))


def _accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    if plugin is not None:
        if steps != 1:
            raise SettingError(
                "gradient_accumulation_steps is given twice: as an argument and in the plugin",
                fix="keep the second",
            )
        return plugin
    given = {"gradient_accumulation_steps": steps if steps != 1 else None}
    loaded = load(GradientSettings, code=given)
    count = loaded.value.gradient_accumulation_steps
    if count < 1:
        raise SettingError(f"gradient_accumulation_steps is {count}", fix="use 1 or more")
    return GradientAccumulationPlugin(num_steps=count)
