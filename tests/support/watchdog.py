"""The watchdog of a rank: its words to the other ranks, and its hints about a collective that waits."""

from __future__ import annotations

import logging
from typing import Any


def peer_store() -> Any:
    """Return the key-value store that the watchdogs of all ranks share: ``put``, ``has`` and ``wait``."""
    from accelerate.world import watchdog

    watch = watchdog.current()
    assert watch is not None
    return watch.store


def speed_up_watchdog() -> None:
    """Let the watchdog notice everything in less than a second; before the world opens."""
    from accelerate.world import peers, watchdog

    watchdog.HINT_DELAY, watchdog.WAIT_REPORT_DELAY, watchdog.POLL_INTERVAL = 0.4, 0.1, 0.05
    watchdog.TORCH_WAIT_DELAY, peers.ANSWER_TIMEOUT = 0.2, 1.0


def record_early_hints() -> list[str]:
    """Return a list that gets the watchdog's hints, which come after less than a second from now on."""
    from accelerate.world import peers

    speed_up_watchdog()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    peers.logger.addHandler(handler)
    return records


def shown_error(error: BaseException) -> BaseException:
    """Return the error that a rank shows in place of one that ends it."""
    from accelerate.world import watchdog

    watch = watchdog.current()
    assert watch is not None
    return watch.explain(error)
