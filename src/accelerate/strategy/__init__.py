"""Strategies: how one training is distributed over processes. A file or folder here is a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from accelerate.core.errors import SettingError
from accelerate.core.registry import Registry

if TYPE_CHECKING:  # the launcher asks for the settings of strategies, and must not import torch
    from accelerate.core.option_report import OptionStatus
    from accelerate.strategy.base import Strategy, StrategyRequest

STRATEGIES: Registry[type[Strategy]] = Registry("strategy", "accelerate.strategy", "accelerate.strategies")


def choose_strategy(request: StrategyRequest) -> Strategy:
    """Return the strategy for ``request``: of those that claim it, the one with the highest priority.

    Raises:
        SettingError: two of the same priority claim it.
    """
    claims = sorted((s for s in STRATEGIES if s.claims(request)), key=lambda s: -s.priority)
    if len(claims) > 1 and claims[0].priority == claims[1].priority:
        raise SettingError(
            f"two strategies are asked for at once: {claims[0].name} and {claims[1].name}",
            fix="keep the plugin, flag or variable of one of them",
        )
    chosen = claims[0](request)
    chosen.check()
    return chosen


def unused_options(request: StrategyRequest, chosen: Strategy) -> Iterator[OptionStatus]:
    """Return the options requested of strategies that were not chosen; none of them is applied.

    FSDP1 and FSDP2 have the same switch and plugin, so these options belong to the chosen one.
    """
    chosen_names = {option.name for option in chosen.requested_options(request)}
    for strategy in STRATEGIES:
        if strategy is type(chosen):
            continue
        reason = strategy.unused_reason(request)
        explanation = reason or (
            f"the strategy is {chosen.name}" if request.world.size > 1 else "there is one process"
        )
        for option in strategy.requested_options(request):
            if option.name not in chosen_names:
                yield option.report_not_applied(explanation, matters=bool(reason))
