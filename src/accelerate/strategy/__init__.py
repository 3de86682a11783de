"""Strategies: how one training is spread over processes. A file of this folder is a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from accelerate.core.errors import SettingError
from accelerate.core.registry import Registry

if TYPE_CHECKING:  # the launcher asks for the settings of strategies, and must not import torch
    from accelerate.core.effects import Effect
    from accelerate.strategy.base import Request, Strategy

STRATEGIES: Registry[type[Strategy]] = Registry("strategy", "accelerate.strategy", "accelerate.strategies")


def choose(request: Request) -> Strategy:
    """The strategy for what was asked: of those that claim it, the one with the highest priority.

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


def idle(request: Request, chosen: Strategy) -> Iterator[Effect]:
    """What was asked of strategies other than the one that was chosen; none of it is applied.

    Two versions of one way of training have the same switch and plug-in, which ask for the chosen one.
    """
    taken = {option.name for option in chosen.asked(request)}
    for strategy in STRATEGIES:
        if strategy is type(chosen):
            continue
        reason = strategy.idle(request)
        why = reason or (
            f"the strategy is {chosen.name}" if request.world.size > 1 else "there is one process"
        )
        for option in strategy.asked(request):
            if option.name not in taken:
                yield option.failed(why, matters=bool(reason))
