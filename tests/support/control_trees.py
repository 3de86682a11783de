"""Control trees whose ranks are threads of this process, and what passes through that of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from accelerate.checkpoint.rank_group import BackgroundSaveChannel
from accelerate.world import control_channel
from accelerate.world.control_tree import ControlTree, TreeMessage
from accelerate.world.process_group import StoreClient
from accelerate.world.watchdog import Watchdog


def check_nothing() -> None:
    """Never end a wait."""


def keep(message: TreeMessage) -> TreeMessage:
    return message


@contextmanager
def open_trees(size: int) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that runs a function of each rank's tree in a thread of its own."""
    trees = [ControlTree(rank, size) for rank in range(size)]
    root = StoreClient(dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]

    until = time.monotonic() + 30.0

    def check() -> None:
        assert time.monotonic() < until, "the ranks did not connect"

    def connect(tree: ControlTree) -> None:
        tree.open(root.open_prefix("tree-test"), check)

    with ThreadPoolExecutor(size) as pool:

        def on_all(function: Callable[[ControlTree], Any]) -> list[Any]:
            return list(pool.map(function, trees))

        on_all(connect)
        try:
            yield on_all
        finally:
            for tree in trees:
                tree.close()


def run_save_channels(
    size: int,
    function: Callable[[int, BackgroundSaveChannel], Any],
    *,
    timeout: float = 30.0,
    absent: Sequence[int] = (),
) -> list[Any]:
    """Run a function on the channel that each rank has for a save in the background.

    Return what the function has returned on each rank, or the exception that ended it.

    Args:
        size: ranks; each is a thread.
        function: takes the rank and its channel.
        timeout: of the group.
        absent: ranks that never come.
    """
    store = StoreClient(dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]

    def run(rank: int) -> Any:
        watch = SimpleNamespace(rank=rank, size=size, timeout=timeout, store=store)
        try:
            with BackgroundSaveChannel(cast("Watchdog", watch), "id", "runs/a") as channel:
                return function(rank, channel)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, [rank for rank in range(size) if rank not in absent]))


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
