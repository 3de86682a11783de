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
    requested = [s for s in STRATEGIES if s.selection.is_requested(request)]
    claims = sorted((s for s in requested if s.claims(request)), key=lambda s: -s.priority)
    if len(claims) > 1 and claims[0].priority == claims[1].priority:
        raise SettingError(
            f"two strategies are asked for at once: {claims[0].name} and {claims[1].name}",
            fix="keep the plugin, flag or variable of one of them",
        )
    request.passed_over.extend(s for s in requested if s.selection.unused_reason and s not in claims)
    chosen = claims[0](request)
    chosen.check()
    return chosen


def unused_options(request: StrategyRequest, chosen: Strategy) -> Iterator[OptionStatus]:
    """Yield the options requested of strategies that were not chosen; none of them is applied.

    Strategies share some: FSDP1 and FSDP2 have the same switch and plugin.
    """
    names = {option.name for option in chosen.requested_options(request)}
    usual = f"the strategy is {chosen.name}" if request.world.size > 1 else "there is one process"
    for strategy in STRATEGIES:
        if strategy is type(chosen):
            continue
        reason = strategy.selection.unused_reason if strategy in request.passed_over else ""
        for option in strategy.requested_options(request):
            if option.name not in names:
                names.add(option.name)
                yield option.report_not_applied(reason or usual, matters=bool(reason))
