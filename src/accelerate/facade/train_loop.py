"""The methods of ``Accelerator`` that a training loop calls in every step."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.facade.gradient_state import GradientState
from accelerate.facade.loss_weighting import LossWeighting
from accelerate.facade.micro_batch_windows import GradientAccumulationWindows
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.processes import ProcessMixin
from accelerate.precision.autocast import AutocastKwargs
from accelerate.precision.base import Precision
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import Strategy
from accelerate.watch.profile import ProfileKwargs, record_profile


class TrainLoopMixin(ProcessMixin):
    """Accumulates gradients, runs backward, clips gradients, and applies autocast."""

    strategy: Strategy
    precision: Precision
    gradient_state: GradientState
    handlers: dict[type, Any]
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    @property
    def sync_gradients(self) -> bool:
        """Return whether gradients are complete after the current backward."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    @property
    def step(self) -> int:
        """The number of micro-batches since the last window closed at the end of a loader."""
        return self.gradient_state.step

    @step.setter
    def step(self, step: int) -> None:
        self.gradient_state.step = step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context for one micro-batch: gradients are reduced, and optimizers step, in the last only.

        Args:
            models: those whose gradients accumulate; all prepared ones when none is given.
        """
        return _AccumulationContext(self, models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for forward and backward in which gradients of ``model`` stay local."""
        return self.strategy.accumulation_context((model,), sync=False)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Generator[None]:
        """Reduce gradients in the backward inside, although its forward ran in ``no_sync``."""
        for strategy in STRATEGIES:
            strategy.sync_next_backward(model)
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
        model_list = None if models is None else [models] if isinstance(models, nn.Module) else list(models)
        steps = self.gradient_accumulation_steps if n is None else n

        def trained_params() -> Iterable[torch.Tensor]:
            optimizer_params = (
                p for o in self._optimizers for group in o.param_groups for p in group["params"]
            )
            return dict.fromkeys(
                [*(p for m in model_list or self._models for p in m.parameters()), *optimizer_params]
            )

        return GradientAccumulationWindows(
            self.gradient_state,
            self.strategy,
            loader,
            steps,
            lambda: self._models if model_list is None else model_list,
            trained_params,
        )

    def backward(self, loss: torch.Tensor, *, num_items: Any = None, **kwargs: Any) -> None:
        """Run the backward pass of ``loss``, divided by the micro-batches and scaled by the precision.

        With ``num_items``, losses are weighted instead: the gradient of an optimizer step is that of the mean
        over all items (tokens, samples) of its micro-batches on all processes, as of one big batch. Give the
        number in every call of a window. ::

            tokens = (labels != -100).sum()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # a mean, by default
            accelerator.backward(loss, num_items=tokens)

        A loader that fills its last step with repeated samples says how many of a batch are real:
        ``num_items=loader.real``, with a loss over those alone, counts every sample once.

        Args:
            loss: a scalar, the mean over its items.
            num_items: of how many items of this process it is the mean; 0 adds exactly nothing, even where
                such a mean is NaN. A tensor on an accelerator costs a synchronisation.
            kwargs: arguments of ``loss.backward``; ``learning_rate`` runs ``lomo_backward``.

        Raises:
            PrepareError: the loss has no graph or is no scalar, ``num_items`` is no number above or equal 0,
                or was given in some calls of a window only, or the strategy weights losses by itself.
        """
        gradients, strategy = self.gradient_state, self.strategy
        if num_items is not None or gradients.loss_weighting is not None or kwargs:
            if num_items is not None:
                self._backward_weighted(loss, num_items, kwargs)
                return
            if gradients.loss_weighting is not None:
                gradients.loss_weighting.refuse_plain()
            if kwargs.get("learning_rate") is not None:
                self.lomo_backward(loss, kwargs["learning_rate"])
                return
        gradients.has_unweighted_grads = True
        try:
            if strategy.should_divide_loss(kwargs):
                window = gradients.window
                steps = gradients.num_steps if window is None else window.divisor
                if steps != 1:
                    loss = loss / steps
            if self.precision.scales_loss and not strategy.owns_precision:
                loss = self.precision.scale(loss)
            strategy.backward(loss, **kwargs)
        except (RuntimeError, AttributeError, TypeError, ValueError):
            _check_loss(loss, kwargs)
            raise

    def _backward_weighted(self, loss: torch.Tensor, num_items: Any, kwargs: dict[str, Any]) -> None:
        gradients = self.gradient_state
        if not self.strategy.supports_loss_weighting or "learning_rate" in kwargs:
            raise PrepareError(
                "backward(num_items=...) does not go with DeepSpeed, Megatron-LM or LOMO",
                why="gradients have to be scaled between backward and step",
                fix="leave num_items out, and weight the loss as their documentation says",
            )
        if gradients.loss_weighting is None:
            gradients.loss_weighting = LossWeighting(gradients, self.strategy, self.precision)
        gradients.loss_weighting.update_prepared(self._models, self._optimizers)
        window = gradients.window
        micro_batches = gradients.num_steps if window is None else window.n
        try:
            gradients.loss_weighting.backward(loss, num_items, micro_batches, **kwargs)
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            if not isinstance(error, PrepareError):
                _check_loss(loss, kwargs)
            raise

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
        fused: list[Any] = [optimizer.optimizer for optimizer in self._optimizers if optimizer.fuses_backward]
        if len(fused) != 1:
            raise PrepareError(
                f"lomo_backward needs one optimizer with fused_backward, and {len(fused)} are prepared",
                why="a fused backward updates the weights of one optimizer during the pass",
                fix="prepare an optimizer of lomo-optim, or call backward(loss) without learning_rate",
            )
        window = self.gradient_state.window
        if (self.gradient_state.num_steps if window is None else window.n) != 1:
            raise PrepareError(
                "lomo_backward cannot accumulate gradients",
                why="each backward has already changed the weights",
                fix="use gradient_accumulation_steps=1",
            )
        fused[0].fused_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of one optimizer, several, or (None) all.

        Does nothing while gradients are being accumulated: later ones would come on top with the scale.
        """
        if not self.sync_gradients:
            return
        if self.strategy.owns_precision:
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        for item in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
            self.precision.unscale(getattr(item, "optimizer", item))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``.

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
            return self._local_grad_norm(params, norm_type)
        self._unscale_optimizers_of(params)
        return self.strategy.clip_norm(params, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each gradient element to ``[-clip_value, clip_value]``; do nothing while accumulating."""
        if self.sync_gradients:
            params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._unscale_optimizers_of(params)
            self.strategy.clip_value(params, clip_value)

    def _local_grad_norm(self, params: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        grads = self.strategy.gradients(params)
        if not grads:
            return torch.zeros((), device=self.device)
        norms = torch.stack([torch.linalg.vector_norm(g.float(), norm_type) for g in grads])
        return torch.linalg.vector_norm(norms, norm_type) / self.precision.loss_scale()

    def _unscale_optimizers_of(self, params: list[torch.Tensor]) -> None:
        """Unscale only optimizers whose gradients are clipped: others may have had no backward yet."""
        if self.strategy.owns_precision:
            return
        clipped_ids = {id(p) for p in params if p.grad is not None}
        for optimizer in self._optimizers:
            if any(id(p) in clipped_ids for group in optimizer.param_groups for p in group["params"]):
                self.precision.unscale(optimizer.optimizer)

    def _check_first_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Warn if the first step has no gradients, or gradients that no rank reduces."""
        if self.strategy.owns_step or not self.is_main_process:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        prepared = {p for model in self._models for p in model.parameters()}
        if all(p.grad is None for p in parameters) and not self.precision.scales_loss:
            places = ", ".join(sorted({str(p.device) for p in parameters}))
            warnings.warn(
                f"the first optimizer.step() has no gradient for any of its {len(parameters)} parameters, on "
                f"{places}, and changes nothing. Either no backward has run, or the optimizer was made for "
                "other parameters than those of the prepared model: make it from that model's parameters()",
                stacklevel=5,
            )
        elif self.num_processes > 1 and prepared.isdisjoint(parameters):
            warnings.warn(
                f"optimizer.step() of {len(parameters)} parameters that belong to no prepared model: unless "
                f"their gradients are reduced in another way, each of {self.num_processes} processes trains "
                "them separately. Prepare both: model, optimizer = accelerator.prepare(model, optimizer)",
                stacklevel=5,
            )

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

        With ``output_trace_dir``, each process leaves a Chrome trace ``profile_<rank>.json`` there, and with
        ``memory_timeline`` a picture ``memory_<rank>.png``.

        Args:
            profile_handler: what to record; None takes the one given to the ``Accelerator``, or the defaults.
        """
        handler = profile_handler or self.handlers.get(ProfileKwargs) or ProfileKwargs()
        with record_profile(handler, self.process_index) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()


class _AccumulationContext(AbstractContextManager[None]):
    """The context of ``accumulate``; a class, since a generator costs ten times as much per step."""

    __slots__ = ("accelerator", "inner", "models")

    def __init__(self, accelerator: TrainLoopMixin, models: tuple[nn.Module, ...]) -> None:
        self.accelerator, self.models = accelerator, models

    def __enter__(self) -> None:
        gradients = self.accelerator.gradient_state
        if gradients.window is not None:
            raise PrepareError(
                "accumulate() inside a window",
                why="the window accumulates already, and knows its last micro-batch",
                fix="leave accumulate() out, or loop over the loader instead of accelerator.windows(loader)",
            )
        if gradients.abandoned_window:
            gradients.refuse_abandoned("accumulate() began")
        sync = gradients.advance() or gradients.plugin_kwargs.get("sync_each_batch", False)
        models = self.models or self.accelerator._models
        self.inner = self.accelerator.strategy.accumulation_context(models, sync=sync)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)


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
