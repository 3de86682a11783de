"""Control trees whose ranks are threads of this process, and what passes through that of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist

from accelerate.world import control_channel
from accelerate.world.control_tree import ControlTree, TreeMessage
from accelerate.world.process_group import StoreClient
from accelerate.world.watchdog import Watchdog


class PatientWatchdog:
    """The part of a watchdog that a tree needs while it opens."""

    timeout = 30.0

    def check_store_wait(self, until: float) -> None:
        """End a wait at the timeout alone."""
        assert time.monotonic() < until, "the ranks did not connect"


def check_nothing() -> None:
    """Never end a wait."""


def keep(message: TreeMessage) -> TreeMessage:
    return message


@contextmanager
def open_trees(size: int) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that runs a function of each rank's tree in a thread of its own."""
    trees = [ControlTree(rank, size) for rank in range(size)]
    root = StoreClient(dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]

    def connect(tree: ControlTree) -> None:
        tree.open(root.open_prefix("tree-test"), cast("Watchdog", PatientWatchdog()))

    with ThreadPoolExecutor(size) as pool:

        def on_all(function: Callable[[ControlTree], Any]) -> list[Any]:
            return list(pool.map(function, trees))

        on_all(connect)
        try:
            yield on_all
        finally:
            for tree in trees:
                tree.close()


def count_received() -> list[int]:
    """Return a list of the bytes of values that this rank gets in each exchange from now on."""
    tree, counts = control_channel.channel().tree, list[int]()
    exchange = tree.exchange

    def counted(*args: Any) -> Any:
        answer = exchange(*args)
        counts.append(len(answer.values))
        return answer

    tree.exchange = counted  # type: ignore[method-assign]
    return counts
