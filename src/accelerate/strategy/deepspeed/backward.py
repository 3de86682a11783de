"""The backward of DeepSpeed: which engine runs it, or the wrapper that a program has put in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import EngineStrategy
from accelerate.strategy.protocol.gradient_sync import graph_leaves

if TYPE_CHECKING:
    from accelerate.strategy.deepspeed.engine_handle import DeepSpeedEngineRegistry, EngineHandle


class DeepSpeedBackward(EngineStrategy):
    """The part of the strategy ``DeepSpeed`` that runs backwards."""

    if TYPE_CHECKING:  # of the strategy
        engines: DeepSpeedEngineRegistry
        _no_sync_engines: set[int]

    _assigned_wrapper: Any = None
    _program_backward: Callable[..., Any] | None = None

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The wrapper that a program has assigned, else one of the first ``DeepSpeedEngine``, or None."""
        if self._assigned_wrapper is not None:
            return self._assigned_wrapper
        return next((self.wrapper_class("engine")(handle.engine) for handle in self.engines), None)

    @deepspeed_engine_wrapped.setter
    def deepspeed_engine_wrapped(self, wrapper: Any) -> None:
        if wrapper is None:
            self.forget()
            return
        engine, backward = getattr(wrapper, "engine", None), wrapper.backward
        if any(engine is released for released in self.engines.released_engines()):
            raise PrepareError(
                "deepspeed_engine_wrapped was assigned a wrapper whose DeepSpeedEngine was released",
                why="its hooks are gone, so that it would train with gradients that are not reduced",
                fix="prepare the model and its optimizer again",
            )
        self._assigned_wrapper = wrapper
        is_own = getattr(backward, "__func__", None) is self.wrapper_class("engine").backward
        self._program_backward = None if is_own and self.engines.find(engine) is not None else backward

    @deepspeed_engine_wrapped.deleter
    def deepspeed_engine_wrapped(self) -> None:
        self._assigned_wrapper = self._program_backward = None

    @property
    def supports_loss_weighting(self) -> bool:  # type: ignore[override]
        """Return False where a program's own backward may step."""
        return self._program_backward is None

    def should_divide_loss(self, kwargs: dict[str, Any]) -> bool:
        """Return False where DeepSpeed or ``scale_wrt_gas=False`` says it is divided already."""
        return self._program_backward is None and bool(kwargs.pop("scale_wrt_gas", True))

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward through the engine whose model computed the loss.

        Raises:
            PrepareError: it comes from no trained engine, or from several.
        """
        if self._program_backward is not None:
            for each in self.engines:
                each.has_run_backward = True
            self._program_backward(loss, sync_gradients=sync_gradients, **kwargs)
            return
        handle = self._engine_of_loss(loss)
        complete = sync_gradients and id(handle.engine) not in self._no_sync_engines
        handle.backward(loss, complete=complete, **kwargs)

    def _engine_of_loss(self, loss: torch.Tensor) -> EngineHandle:
        trained = self.engines.trained_engines()
        if len(trained) == 1:
            return trained[0]
        if not trained:
            raise PrepareError(
                "backward before a model was prepared with its optimizer",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        below = graph_leaves(loss)
        matches = [handle for handle in trained if not below.isdisjoint(handle.module.parameters())]
        if len(matches) == 1:
            return matches[0]
        names = ", ".join(type(handle.module).__name__ for handle in matches) or "none of them"
        raise PrepareError(
            f"backward of a loss that comes from {len(matches)} of {len(trained)} prepared models",
            why=f"each DeepSpeed engine runs the backward of its own model; this loss reaches {names}",
            fix="detach() what comes from the other models, or prepare one module that contains them",
        )
