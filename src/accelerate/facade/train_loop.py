"""The ``TrainLoop`` of an ``Accelerator``: what a training loop calls in every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError, list_first, warn_user
from accelerate.facade.loss_weighting import LossWeighting
from accelerate.facade.micro_batch_windows import GradientAccumulationWindows
from accelerate.facade.numerics_monitor import NumericsMonitor
from accelerate.facade.optimizer import AcceleratedOptimizer, current_params
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.run_recorder import RunRecorder, StepCounter, describe_model
from accelerate.facade.runtime import Runtime
from accelerate.precision.loss_scaling import LossScaling
from accelerate.strategy.base import EngineStrategy
from accelerate.strategy.protocol.gradient_sync import (
    NO_CONTEXT,
    ReductionMonitor,
    explain_sharded_step,
    has_accumulation_hooks,
)
from accelerate.world.local_tensor_trees import local_tensor


class TrainLoop:
    """Accumulates gradients, runs backward, and unscales and clips gradients.

    The methods are those of ``Accelerator``, whose docstrings describe them.

    Args:
        runtime: the precision, strategy and gradient accumulation of the run.
        prepared: the models and optimizers that are trained.
    """

    def __init__(self, runtime: Runtime, prepared: PreparedObjects) -> None:
        self.prepared = prepared
        self.world, self.strategy, self.precision = runtime.world, runtime.strategy, runtime.precision
        self.gradients = runtime.gradients
        self.monitor = runtime.strategy if isinstance(runtime.strategy, ReductionMonitor) else None
        self.engine = runtime.strategy if isinstance(runtime.strategy, EngineStrategy) else None
        self._warned: set[AcceleratedOptimizer] = set()
        self.accumulated_ids: tuple[int, ...] = ()  # of the models of the newest block of ``accumulate``
        self._has_warned_of_blocks = self._has_warned_unprepared = False
        self.has_forgotten, self._forgotten = False, list[weakref.ref[AcceleratedOptimizer]]()
        if (scaling := self.precision.loss_scaling) is not None:
            scaling.optimizers, scaling.gradients = _optimizers_of(prepared), self.strategy.gradients

    def note_forgotten(self) -> None:
        """Record that all that is prepared will be forgotten: a program may train on with what it holds."""
        self.has_forgotten |= bool(self.prepared.models or self.prepared.optimizers)
        alive = [each for each in self._forgotten if each() is not None]
        self._forgotten = [*alive, *map(weakref.ref, self.prepared.optimizers)]

    def warn_of_forgotten(self, call: str) -> None:
        """Warn on rank 0 of a checkpoint without models, which 1.x saves and loads without a word."""
        if self.world.rank == 0:
            warn_user(
                f"{call}() with no prepared model since free_memory() or clear(): models and optimizers from "
                "before are neither saved nor loaded. Prepare them again first"
            )

    def _trained_optimizers(self) -> list[AcceleratedOptimizer]:
        """Return the prepared optimizers; without any, those of before that the program still holds."""
        held = (optimizer for each in self._forgotten if (optimizer := each()) is not None)
        return self.prepared.optimizers or list(held)

    def note_accumulated(self, models: Sequence[nn.Module], ids: tuple[int, ...]) -> None:
        """Record the models of a block; warn of two blocks of different models in one batch.

        There is one count of micro-batches, as in Accelerate 1.x: with two blocks in each batch and an even
        number of steps, every window closes in the second block, and the first model is never trained.
        """
        before, self.accumulated_ids = self.accumulated_ids, ids
        loader, steps = self.gradients.loaders.innermost, self.gradients.num_steps
        is_second = loader is not None and loader.micro_steps > 1 and bool(before and ids)
        if steps > 1 and is_second and set(before).isdisjoint(ids) and not self._has_warned_of_blocks:
            self._has_warned_of_blocks = True
            warn_user(
                f"accumulate() of another model in the same batch ({type(models[0]).__name__}): both blocks "
                f"are counted as micro-batches of one window of {steps}, so the optimizer of one model may "
                "never step; put both into one block, `with accelerator.accumulate(first, second):`"
            )

    def make_windows(
        self, loader: Any, n: int | None = None, models: nn.Module | Iterable[nn.Module] | None = None
    ) -> GradientAccumulationWindows:
        """Return the windows of one pass over ``loader``."""
        model_list = None if models is None else [models] if isinstance(models, nn.Module) else list(models)

        def trained_models() -> list[nn.Module]:
            prepared = self.prepared
            return prepared.models if model_list is None else [*map(prepared.find_model, model_list)]

        def trained_params() -> Iterable[torch.Tensor]:
            groups = (group for optimizer in self._trained_optimizers() for group in optimizer.param_groups)
            of_models = (p for model in trained_models() for p in model.parameters())
            return dict.fromkeys([*of_models, *(p for group in groups for p in group["params"])])

        steps = self.gradients.num_steps if n is None else n
        return GradientAccumulationWindows(
            self.gradients, self.strategy, loader, steps, trained_models, trained_params
        )

    def backward(self, loss: torch.Tensor, num_items: Any, kwargs: dict[str, Any]) -> None:
        """Run the backward pass of ``loss``, divided by the micro-batches and scaled by the precision."""
        gradients, strategy = self.gradients, self.strategy
        gradients.backward_count += 1
        if num_items is not None or gradients.loss_weighting is not None or kwargs:
            if num_items is not None:
                self._backward_weighted(loss, num_items, kwargs)
                return
            if gradients.loss_weighting is not None:
                gradients.loss_weighting.refuse_plain()
            if kwargs.get("learning_rate") is not None:
                self.lomo_backward(loss, kwargs["learning_rate"])
                return
        optimizers = self.prepared.optimizers
        if optimizers and optimizers[0].fuses_backward and all(each.fuses_backward for each in optimizers):
            raise _no_learning_rate_error(optimizers[0].optimizer)
        if not optimizers and not (self.prepared.models or self._has_warned_unprepared):
            self._warn_unprepared()
        gradients.has_unweighted_grads = True
        try:
            if self.engine is None or self.engine.should_divide_loss(kwargs):
                window = gradients.window
                if window is None:
                    steps = gradients.plugin_kwargs.get("num_steps") or 1
                else:
                    steps, window.is_loss_divided = window.divisor, True
                if steps != 1:
                    loss = loss / steps
            if self.precision.scales_loss and not strategy.owns_step:
                loss = self.precision.scale(loss, None if "inputs" in kwargs else strategy.reached_params)
            strategy.backward(loss, sync_gradients=gradients.sync_gradients, **kwargs)
            if self.engine is not None:
                for optimizer in optimizers:
                    if optimizer.steps_in_backward:
                        optimizer.take_omitted_step("accelerator.backward(loss)")
        except (RuntimeError, AttributeError, TypeError, ValueError):
            _check_loss(loss, kwargs)
            raise

    def _warn_unprepared(self) -> None:
        """Warn once, on rank 0, of a backward of several processes where nothing was prepared."""
        self._has_warned_unprepared = True
        if self.world.size > 1 and self.world.rank == 0 and not self.has_forgotten:
            warn_user(
                "accelerator.backward() with no prepared model: unless gradients are reduced in another way, "
                f"each of {self.world.size} processes trains separately, on all of the data. Prepare all: "
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )

    def _backward_weighted(self, loss: torch.Tensor, num_items: Any, kwargs: dict[str, Any]) -> None:
        gradients = self.gradients
        if not self.strategy.supports_loss_weighting or "learning_rate" in kwargs:
            raise PrepareError(
                "backward(num_items=...) does not go with DeepSpeed, Megatron-LM or LOMO",
                why="gradients have to be scaled between backward and step",
                fix="leave num_items out, and weight the loss as their documentation says",
            )
        if gradients.loss_weighting is None:
            gradients.loss_weighting = LossWeighting(gradients, self.strategy, self.precision)
        gradients.loss_weighting.update_prepared(self.prepared.models, self.prepared.optimizers)
        window = gradients.window
        micro_batches = gradients.num_steps if window is None else window.n
        try:
            gradients.loss_weighting.backward(loss, num_items, micro_batches, **kwargs)
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            if not isinstance(error, PrepareError):
                _check_loss(loss, kwargs)
            raise

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass of an optimizer that updates each weight as soon as its gradient is known."""
        optimizers = self.prepared.optimizers
        fused: list[Any] = [each.optimizer for each in optimizers if each.fuses_backward]
        if len(fused) != 1:
            raise PrepareError(
                f"lomo_backward needs one optimizer with fused_backward, and {len(fused)} are prepared",
                why="a fused backward updates the weights of one optimizer during the pass",
                fix="prepare an optimizer of lomo-optim, or call backward(loss) without learning_rate",
            )
        window = self.gradients.window
        if (self.gradients.num_steps if window is None else window.n) != 1:
            raise PrepareError(
                "lomo_backward cannot accumulate gradients",
                why="each backward has already changed the weights",
                fix="use gradient_accumulation_steps=1",
            )
        if self.precision.scales_loss:
            raise PrepareError(
                f"lomo_backward under mixed_precision={self.precision.name!r}",
                why="it updates weights during the pass, before gradients could be divided by the loss scale",
                fix="use mixed_precision='bf16'",
            )
        replicas = self.strategy.data_shard.count
        if replicas > 1 and not (self.strategy.shards_params or self.strategy.owns_step):
            raise PrepareError(
                f"lomo_backward under {self.strategy.name} with {replicas} processes",
                why="each would update its copy of the weights with gradients that are not averaged",
                fix="shard the model by FSDP2 (--use_fsdp), whose gradients are reduced before",
            )
        try:
            fused[0].fused_backward(loss, learning_rate)
        except RuntimeError as error:
            explain_sharded_step(fused[0], error)
            raise

    def set_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses by a scaler that the user has assigned; None scales none.

        Raises:
            PrepareError: it is no ``torch.amp.GradScaler``, or losses are scaled elsewhere.
        """
        if scaler is None:
            self.precision.set_loss_scaling(None)
            return
        if not isinstance(scaler, torch.amp.GradScaler):
            raise PrepareError(
                f"accelerator.scaler = {type(scaler).__name__}: it is no gradient scaler",
                why="steps and checkpoints need the methods of torch's",
                fix="assign a torch.amp.GradScaler, an object of a class derived from it, or None",
            )
        name = self.strategy.name
        if self.strategy.owns_step and scaler.is_enabled():
            raise PrepareError(
                f"accelerator.scaler = {type(scaler).__name__} under {name}",
                why=f"{name} scales losses and steps by itself, so that this scaler would never be used",
                fix="use its own options for loss scaling",
            )
        loss_scaling = LossScaling(scaler, updates_early=True)
        loss_scaling.optimizers = _optimizers_of(self.prepared)
        loss_scaling.gradients = self.strategy.gradients
        self.precision.set_loss_scaling(loss_scaling)
        self.precision.set_overflow_sync(self.strategy.flag_reduction())

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of one optimizer, several, or (None) all, where they are complete."""
        if not self.gradients.sync_gradients or self.strategy.owns_step:
            return
        optimizers = self._trained_optimizers() if optimizer is None else optimizer
        for item in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
            self.precision.unscale(getattr(item, "optimizer", item))

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return the norm before."""
        params = current_params(self.strategy, parameters)
        if self.gradients.sync_gradients:
            self._warn_of_gone_gradients(params, "clip_grad_norm_")
            self._unscale_optimizers_of(params)
            return self.strategy.clip_norm(params, max_norm, norm_type)
        grads: list[Any] = self.strategy.gradients(params)
        if not grads:
            return torch.zeros((), device=self.world.device)
        norms = [
            torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
            for g in map(local_tensor, grads)
        ]
        total = torch.linalg.vector_norm(torch.stack([n.to(self.world.device) for n in norms]), norm_type)
        return total / self.precision.loss_scale()

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient element to ``[-clip_value, clip_value]``; do nothing while accumulating."""
        if self.gradients.sync_gradients:
            params = current_params(self.strategy, parameters)
            self._warn_of_gone_gradients(params, "clip_grad_value_")
            self._unscale_optimizers_of(params)
            self.strategy.clip_value(params, clip_value)

    def _warn_of_gone_gradients(self, params: list[torch.Tensor], call: str) -> None:
        """Warn once where an optimizer has used or moved all gradients during the backward."""
        for optimizer in self.prepared.optimizers:
            if not (optimizer.fuses_backward or optimizer.host_copies) or optimizer in self._warned:
                continue
            if all(p.grad is None for p in optimizer.host_copies or params):
                self._warned.add(optimizer)
                warn_user(
                    f"{call}() does not clip: {type(optimizer.optimizer).__name__} has taken the gradients "
                    "during the backward. Clip by an option of the optimizer (clip_grad_norm of lomo-optim), "
                    "or leave its offload_gradients out"
                )

    def _unscale_optimizers_of(self, params: list[torch.Tensor]) -> None:
        """Unscale only optimizers whose gradients are clipped: others may have had no backward yet."""
        if self.strategy.owns_step or not self.precision.scales_loss:
            return
        # Ranks that all-reduce the overflow flag need the same answer, also where a shard has no gradient.
        is_sharded = self.strategy.flag_reduction() is not None
        clipped_ids = {id(p) for p in params if (p.requires_grad if is_sharded else p.grad is not None)}
        for optimizer in self._trained_optimizers():
            if any(id(p) in clipped_ids for group in optimizer.param_groups for p in group["params"]):
                self.precision.unscale(optimizer.optimizer)

    def check_first_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Warn on rank 0 if the first step has no gradients, or gradients that no rank reduces."""
        if self.strategy.owns_step or self.world.rank != 0:
            return
        copies = {*optimizer.host_copies.values()}
        stepped = (p for group in optimizer.optimizer.param_groups for p in group["params"])
        parameters = [*(p for p in stepped if p not in copies), *optimizer.host_copies]
        prepared = {p for model in self.prepared.models for p in model.parameters()}
        is_foreign = prepared.isdisjoint(parameters)
        are_sharded = any(hasattr(p, "device_mesh") for p in parameters)  # by the program
        late = parameters if self.monitor is None else self.monitor.late_parameters(parameters)
        if not optimizer.host_copies:  # an optimizer has hooks to fill these
            # A program reduces gradients in hooks, or steps there and has a stand-in for an optimizer.
            late = [p for p in late if not has_accumulation_hooks(p)]
        # Of a sharded model this rank may have frozen parameters only, or empty shards of the others.
        trains_here = any(p.requires_grad and p.numel() for p in parameters)
        trains_here |= self.world.size == 1 and not any(map(has_accumulation_hooks, prepared))
        if trains_here and all(p.grad is None for p in parameters) and not self.precision.scales_loss:
            places = ", ".join(sorted({str(p.device) for p in parameters}))
            warn_user(
                f"the first optimizer.step() has no gradient for any of its {len(parameters)} parameters, on "
                f"{places}, and changes nothing. Either no backward has run, or the optimizer was made for "
                "other parameters than those of the prepared model: make it from that model's parameters()"
            )
        elif self.world.size > 1 and is_foreign and late and not (are_sharded or self.has_forgotten):
            warn_user(
                f"optimizer.step() of {len(parameters)} parameters that belong to no prepared model: unless "
                f"their gradients are reduced in another way, each of {self.world.size} processes trains "
                "them separately. Prepare both: model, optimizer = accelerator.prepare(model, optimizer)"
            )
        elif self.monitor is not None and late:
            models = self.prepared.models  # one that was assigned to a wrapper is not in the model inside
            named: dict[torch.Tensor, str] = {
                p: name
                for model in [*models, *map(self.strategy.unwrap, models)]
                for name, p in model.named_parameters()
            }
            names = [named.get(p, f"a parameter of shape {tuple(p.shape)}") for p in late]
            warn_user(
                f"optimizer.step() of {list_first(names)}, whose gradients are not reduced, so that "
                f"each of {self.world.size} processes trains them separately: they were added to a model "
                "after its prepare, or belong to none. Build the whole model before you prepare it"
            )


class WatchedTrainLoop(TrainLoop):
    """A train loop whose backward a recorder times, and whose losses and norms a monitor sees.

    Args:
        runtime, prepared: as for ``TrainLoop``.
        recorder: of the run, if it is recorded.
        checks_numerics: losses and gradients are watched.
    """

    def __init__(
        self,
        runtime: Runtime,
        prepared: PreparedObjects,
        recorder: RunRecorder | None,
        checks_numerics: bool,
    ) -> None:
        super().__init__(runtime, prepared)
        self._recorder, self._runtime = recorder, runtime
        self._monitor: NumericsMonitor | None = None
        steps = StepCounter() if recorder is None else recorder.steps
        steps.follow(prepared)
        if recorder is not None:
            prepared.on_add += [recorder.watch, self._record_model]
            if checks_numerics:
                recorder.compare_ranks()
        if checks_numerics:
            self._monitor = NumericsMonitor(runtime.world, runtime.strategy, prepared, recorder, steps)
            prepared.on_add.append(self._monitor.watch)

    def _record_model(self, kind: str, item: Any) -> None:
        if kind == "model" and self._recorder is not None and self.world.rank == 0:
            self._recorder.record_event({"model": describe_model(self._runtime, item)})

    def backward(self, loss: torch.Tensor, num_items: Any, kwargs: dict[str, Any]) -> None:
        """Run the backward pass, and check the loss; the mean of no items does not count."""
        if self._recorder is not None:
            self._recorder.begin_backward()
        if self._monitor is None or not isinstance(loss, torch.Tensor):
            super().backward(loss, num_items, kwargs)
            return
        seen = loss.detach()
        if self.engine is not None:
            seen = seen.clone()  # it may scale the loss in place
        super().backward(loss, num_items, kwargs)
        if num_items is None or bool(num_items != 0):
            self._monitor.check_loss(seen)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip, and keep the norm for the record of the step."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = super().clip_grad_norm(params, max_norm, norm_type)
        if self._monitor is not None and self.gradients.sync_gradients and norm_type == 2:
            self._monitor.note_norm(params, norm)
        return norm


class AccumulationContext(AbstractContextManager[None]):
    """The context of ``accumulate``; a class, since a generator costs ten times as much per step."""

    __slots__ = ("inner", "loop", "models", "no_sync")

    def __init__(
        self,
        loop: TrainLoop,
        models: tuple[nn.Module, ...],
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.loop, self.models, self.no_sync = loop, models, no_sync

    def __enter__(self) -> None:
        gradients = self.loop.gradients
        if gradients.window is not None:
            raise PrepareError(
                "accumulate() inside a window",
                why="the window accumulates already, and knows its last micro-batch",
                fix="leave accumulate() out, or loop over the loader instead of accelerator.windows(loader)",
            )
        if gradients.abandoned_window:
            gradients.refuse_abandoned("accumulate() began")
        models = self.models or self.loop.prepared.models
        if self.loop.engine is not None:
            gradients.uses_accumulate = True
            for optimizer in self.loop.prepared.optimizers:
                optimizer.take_omitted_step("the next accumulate()", models)
        is_open = not gradients.sync_gradients
        is_last = gradients.advance()
        gradients.last_micro_batch_began_at = gradients.backward_count if is_open and is_last else -1
        sync = is_last or gradients.plugin_kwargs.get("sync_each_batch", False)
        if self.loop.accumulated_ids != (ids := tuple(map(id, models))):
            self.loop.note_accumulated(models, ids)
        if sync or self.no_sync is None:
            prepared = map(self.loop.prepared.find_model, models)
            self.inner = self.loop.strategy.accumulation_context(prepared, sync=sync)
        else:
            with ExitStack() as entered:
                for model in models:
                    entered.enter_context(self.no_sync(model))
                self.inner = entered.pop_all()
        if self.inner is not NO_CONTEXT:
            self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.loop.gradients.last_micro_batch_began_at = -1
        if self.inner is not NO_CONTEXT:
            self.inner.__exit__(*error)


def _optimizers_of(prepared: PreparedObjects) -> Callable[[], Sequence[AcceleratedOptimizer]]:
    # Weak, for optimizers hold the precision, which would keep all that is prepared.
    reference = weakref.ref(prepared)
    return lambda: () if (alive := reference()) is None else alive.optimizers


def _no_learning_rate_error(optimizer: Any) -> PrepareError:
    return PrepareError(
        f"backward(loss) without a learning rate, and {type(optimizer).__name__} steps during the backward",
        why="it would take the rate of the step before, and leave the gradient that comes last",
        fix="accelerator.backward(loss, learning_rate=scheduler.get_last_lr()[0])",
    )


def _check_loss(loss: Any, kwargs: dict[str, Any]) -> None:
    """Raise if the loss is the reason why backward failed.

    Raises:
        PrepareError: it is.
    """
    if not isinstance(loss, torch.Tensor):
        raise PrepareError(
            f"backward was given a {type(loss).__name__}, not a tensor",
            fix="give the loss itself: not loss.item(), not a model's whole output",
        )
    if not loss.requires_grad:
        raise PrepareError(
            "backward was given a loss that does not depend on any trained parameter",
            why="it was computed under torch.no_grad(), from detached outputs, or all parameters are frozen",
            fix="compute the loss from the outputs of the prepared model, outside torch.no_grad()",
        )
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        raise PrepareError(
            f"backward was given a loss of shape {tuple(loss.shape)}, not a scalar",
            why="a gradient is that of one number",
            fix="reduce it, for example loss.mean()",
        )
