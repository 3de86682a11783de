"""A strategy that owns everything: an engine in the manner of those that bring their own optimizer step.

It takes the model, the optimizer and the scheduler of a bundle, accumulates, clips, steps, clears gradients
and advances the schedule by itself. The user's loop stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import EngineStrategy, PrepareBundle, PrepareStep, StrategyRequest


def unchecked_accelerator(**options: Any) -> Any:
    """Return an ``Accelerator`` of unchecked arguments: ``fsdp_plugin`` may be an ``EnginePlugin``."""
    from accelerate import Accelerator

    kind: Any = Accelerator
    accelerator = object.__new__(kind)
    kind.__unchecked_init__(accelerator, **options)
    return accelerator


@dataclass
class EnginePlugin:
    """Asks for the engine."""

    clip: float = float("inf")


class Engine(nn.Module):
    """Holds the model and does the whole step."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, schedule: Any, clip: float
    ) -> None:
        super().__init__()
        self.module, self.optimizer, self.schedule, self.clip = model, optimizer, schedule, clip
        self.boundary, self.micro_steps, self.norm = True, 0, torch.zeros(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.micro_steps += 1

    def step(self) -> None:
        assert self.optimizer is not None
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.micro_steps
        self.norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        self.micro_steps = 0


class EngineSchedule:
    """Stands for a schedule that the engine advances."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def step(self) -> None:
        """The engine did it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)


class FakeEngineStrategy(EngineStrategy):
    """Trains by an ``Engine``."""

    name: ClassVar[str] = "engine"
    priority: ClassVar[int] = 20

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self.plugin = next(p for p in request.plugins if isinstance(p, EnginePlugin))
        self.engines: list[Engine] = []

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        return any(isinstance(plugin, EnginePlugin) for plugin in request.plugins)

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        yield PrepareStep("engine", "one engine takes model, optimizer and schedule", self._build)

    def _build(self, bundle: PrepareBundle) -> None:
        models, optimizers, schedules = (
            bundle.objects_of(kind) for kind in ("model", "optimizer", "scheduler")
        )  # type: ignore[arg-type]
        if len(models) > 1:
            raise PrepareError("the engine takes one model")
        if not models:
            return
        optimizer = optimizers[0] if optimizers else None
        engine = Engine(models[0], optimizer, schedules[0] if schedules else None, self.plugin.clip)
        self.engines.append(engine)
        bundle.replace("model", lambda _: engine)
        bundle.replace("scheduler", EngineSchedule)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.engines[-1].backward(loss)

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        return self._bounded(sync)

    @contextmanager
    def _bounded(self, sync: bool) -> Iterator[None]:
        self.engines[-1].boundary = sync
        yield

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        return self.engines[-1].norm

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        assert self.engines[-1].boundary
        return self.engines[-1].step()

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """The engine did it."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return self.unwrap(model).state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        return self.unwrap(model).load_state_dict(state, strict=strict)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, Engine) else model
