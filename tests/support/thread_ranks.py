"""A world whose ranks are threads of this process, and the cost of collectives of the host on each rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate.data.sharding_detection import check_same
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.strategy.sharding.fsdp2_sharder import exchange_model_info
from accelerate.strategy.sharding.sharding_layout import exchange_digests
from accelerate.world import collective, control_channel, control_tree, watchdog
from accelerate.world import world as worlds
from accelerate.world.control_channel import ControlChannel
from accelerate.world.process_group import StoreClient
from accelerate.world.watchdog import Watchdog

TIMEOUT = 60.0
_thread = threading.local()


@dataclass
class Cost:
    """The cost of a call on one rank.

    Attributes:
        exchanges: of control messages.
        messages: sent or received in them.
        size: bytes of these messages.
    """

    exchanges: int
    messages: int
    size: int


@contextmanager
def open_ranks(size: int) -> Iterator[Callable[[Callable[[], object]], list[Cost]]]:
    """Yield a function that calls another one on all ranks, and returns what it costs each of them."""
    store, until = StoreClient(dist.HashStore()), time.monotonic() + TIMEOUT  # pyright: ignore[reportPrivateImportUsage]
    states = [_open_rank(rank, size, store, until) for rank in range(size)]
    sizes = [0] * size
    send, receive = control_tree._Connection.send, control_tree._Connection.receive

    def counted_send(connection: Any, check: Any) -> None:
        sizes[_thread.rank] += len(connection.unsent)
        send(connection, check)

    def counted_receive(connection: Any, check: Any) -> bytearray:
        frame = receive(connection, check)
        sizes[_thread.rank] += len(frame)
        return frame

    def call_on(rank: int, function: Callable[[], object]) -> Cost:
        _thread.rank, state = rank, states[rank]
        before = state.watch.exchange_count, state.channel.tree.message_count, sizes[rank]
        function()
        after = state.watch.exchange_count, state.channel.tree.message_count, sizes[rank]
        return Cost(*(new - old for new, old in zip(after, before, strict=True)))

    def refuse_group(channel: Any) -> None:
        raise AssertionError("a call of fixed size opens a group of all ranks")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(control_tree._Connection, "send", counted_send)
        patch.setattr(control_tree._Connection, "receive", counted_receive)
        patch.setattr(ControlChannel, "_open_group", refuse_group)
        patch.setattr(collective.FirstProcessBlock, "open_count", 0)  # of one process, not of its threads
        for module, name, attribute in (
            (worlds, "current", "world"),
            (watchdog, "current", "watch"),
            (control_channel, "channel", "channel"),
        ):
            patch.setattr(module, name, partial(_state_of_thread, states, attribute))
        try:
            yield lambda function: list(pool.map(partial(call_on, function=function), range(size)))
        finally:
            for state in states:
                state.channel.tree.close()


def _open_rank(rank: int, size: int, store: StoreClient, until: float) -> SimpleNamespace:
    def check(*_: object) -> None:
        assert time.monotonic() < until, "the ranks wait in vain"

    watch = SimpleNamespace(
        rank=rank,
        size=size,
        store=store.open_prefix("thread-ranks"),
        timeout=TIMEOUT,
        report=None,
        exchange_count=0,
        active_call=None,
        earlier_call_sites="",
        shutdown_actions=[],
        check_wait=check,
        check_store_wait=check,
        explain_disconnect=lambda error: error,
    )
    world = worlds.World.fake(size, rank, device="cpu")
    return SimpleNamespace(world=world, watch=watch, channel=ControlChannel(cast("Watchdog", watch)))


def _state_of_thread(states: list[SimpleNamespace], attribute: str) -> Any:
    rank = getattr(_thread, "rank", None)
    return None if rank is None else getattr(states[rank], attribute)


# --- calls


def _run_first() -> None:
    with collective.FirstProcessBlock(collective.rank(), collective.rank() == 0):
        pass


def _exchange_model_info(model: nn.Module, num_meshes: int) -> None:
    ranks = torch.arange(collective.rank() % num_meshes, collective.world_size(), num_meshes)
    exchange_model_info(model, None, cast("Any", SimpleNamespace(mesh=ranks, size=lambda: len(ranks))))


_MODEL = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
_FACTS = {f"fact {number}": "a text of some length" for number in range(50)}
# The result does not hold a value of each rank.
FIXED_SIZE: Mapping[str, Callable[[], object]] = {
    "barrier": collective.barrier,
    "broadcast": lambda: collective.broadcast(torch.ones(1000)),
    "broadcast_object": lambda: collective.broadcast_object(_FACTS),
    "compare_objects": lambda: collective.compare_objects(bytes(10**5), "compare"),
    "main_process_first": _run_first,
    "scheduler.step(metric)": lambda: AcceleratedScheduler._agree_on_metric(
        cast("Any", None), (0, "metrics"), (1.0,), {}
    ),
    "first batch of a loader": lambda: check_same("a loader", _FACTS),
    "prepare(model), FSDP1": lambda: exchange_digests(_MODEL),
    "prepare(model), FSDP2": lambda: _exchange_model_info(_MODEL, 1),
    "prepare(model), FSDP2 beside tensor parallelism": lambda: _exchange_model_info(_MODEL, 2),
    "reduce": lambda: collective.reduce({name: torch.ones(()) for name in "abc"}, "sum"),
    "pad_across_processes": lambda: collective.pad_across_processes(torch.ones(collective.rank())),
    "combine_objects": lambda: collective.combine_objects(bytes(100), len, "combine"),
}
# The result does.
PER_RANK: Mapping[str, Callable[[], object]] = {
    "all_gather_object": lambda: collective.all_gather_object(None),
    "gather": lambda: collective.gather(torch.ones(1)),
}
