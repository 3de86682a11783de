"""The part of the ``Accelerator`` that a training loop calls in every step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.facade.gradient import GradientState
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.processes import Processes
from accelerate.precision.autocast import AutocastKwargs
from accelerate.precision.base import Precision
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import Strategy
from accelerate.watch.profile import ProfileKwargs, recording


class Loop(Processes):
    """Accumulation, backward, clipping, autocast."""

    strategy: Strategy
    precision: Precision
    gradient_state: GradientState
    handlers: dict[type, Any]
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

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
        strategy, steps = self.strategy, self.gradient_state.num_steps
        if steps != 1 and not strategy.owns_step:
            loss = loss / steps
        if self.precision.scales and not strategy.owns_precision:
            loss = self.precision.scale(loss)
        strategy.backward(loss, **kwargs)

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

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Generator[Any]:
        """Profiles the block by ``torch.profiler``, which it yields.

        With ``output_trace_dir``, each process leaves a Chrome trace ``profile_<rank>.json`` there, and with
        ``memory_timeline`` a picture ``memory_<rank>.png``.

        Args:
            profile_handler: what to record; None takes the one given to the ``Accelerator``, or the defaults.
        """
        handler = profile_handler or self.handlers.get(ProfileKwargs) or ProfileKwargs()
        with recording(handler, self.process_index) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            self.wait_for_everyone()


class _Accumulation(AbstractContextManager[None]):
    """``with accelerator.accumulate(...)``; a class, since a generator costs ten times as much per step."""

    __slots__ = ("accelerator", "inner", "models")

    def __init__(self, accelerator: Loop, models: tuple[nn.Module, ...]) -> None:
        self.accelerator, self.models = accelerator, models

    def __enter__(self) -> None:
        gradients = self.accelerator.gradient_state
        sync = gradients.advance() or gradients.plugin_kwargs.get("sync_each_batch", False)
        models = self.models or self.accelerator._models
        self.inner = self.accelerator.strategy.accumulating(models, sync=sync)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
