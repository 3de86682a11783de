"""Learning rate schedules of Megatron-LM's settings, as torch schedulers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim.lr_scheduler import LambdaLR

from accelerate.core.errors import PrepareError, UnknownNameError

if TYPE_CHECKING:
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin

STYLES = ("constant", "linear", "cosine", "inverse-square-root")


class MegatronLMDummyScheduler:
    """The placeholder of a schedule that ``prepare`` builds: warm-up, then ``lr_decay_style``.

    Args:
        optimizer: whose learning rates.
        total_num_steps: steps until the end of the decay, counted as for a schedule of torch, which an
            optimizer step advances once for each data parallel rank.
        warmup_num_steps: steps from 0 to the full rate, counted alike.
        kwargs: kept.
    """

    prepared_as: ClassVar[str] = "scheduler"
    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int
    kwargs: dict[str, Any]

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer, self.total_num_steps = optimizer, total_num_steps
        self.warmup_num_steps, self.kwargs = warmup_num_steps, kwargs

    def step(self, *args: Any) -> None:
        """Refused before ``prepare``."""
        raise _not_prepared_error()

    def state_dict(self) -> dict[str, Any]:
        """Refused before ``prepare``."""
        raise _not_prepared_error()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refused before ``prepare``."""
        raise _not_prepared_error()


def _not_prepared_error() -> PrepareError:
    return PrepareError(
        "a MegatronLMDummyScheduler only stands for a schedule",
        fix="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
    )


def build_lr_schedule(dummy: MegatronLMDummyScheduler, plugin: MegatronLMPlugin, advances: int) -> LambdaLR:
    """Build the schedule that a ``MegatronLMDummyScheduler`` stands for.

    Args:
        dummy: the placeholder.
        plugin: its ``lr_decay_style``, ``min_lr``, and lengths in optimizer steps.
        advances: how often an optimizer step advances the schedule.

    Raises:
        UnknownNameError: there is no such style.
    """
    style = plugin.lr_decay_style
    if style not in STYLES:
        raise UnknownNameError("lr_decay_style", str(style), STYLES)
    total = dummy.total_num_steps or advances * (plugin.lr_decay_iters or plugin.train_iters or 0)
    warmup = dummy.warmup_num_steps or advances * (plugin.lr_warmup_iters or 0)
    warmup = warmup or int((plugin.lr_warmup_fraction or 0) * total)
    optimizer: Any = getattr(dummy.optimizer, "optimizer", dummy.optimizer)
    peak = max(group["lr"] for group in optimizer.param_groups)
    floor = plugin.min_lr / peak if peak else 0.0

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return floor + (1.0 - floor) * _decay_factor(style, step, warmup, total)

    return LambdaLR(optimizer, factor)


def _decay_factor(style: str, step: int, warmup: int, total: int) -> float:
    """Return the fraction of the way from the lowest rate to the full one after ``step`` steps, 0 to 1."""
    if style == "constant" or total <= warmup:
        return 1.0
    if style == "inverse-square-root":
        return math.sqrt(max(warmup, 1) / max(step, 1.0))
    done = min((step - warmup) / (total - warmup), 1.0)
    return 1.0 - done if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
