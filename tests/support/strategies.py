"""The strategies of the package, for tests that hold every one of them, those added later too."""

from __future__ import annotations

from contextlib import AbstractContextManager


def strategy_names() -> list[str]:
    """Return the names of all strategies, ``"single"`` and ``"ddp"`` among them."""
    from accelerate.strategy import STRATEGIES

    return list(STRATEGIES.names())


def added_strategy(name: str, strategy: type) -> AbstractContextManager[None]:
    """Let accelerators choose among one strategy more, for the length of a ``with`` block."""
    from accelerate.strategy import STRATEGIES

    return STRATEGIES.add(name, strategy)
