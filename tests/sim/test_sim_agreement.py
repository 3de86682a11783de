"""Collectives on an accelerator, about which the ranks agree on the device: nobody waits on the host."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.utils import DistributedOperationException, broadcast, gather_object, send_to_device
from tests.sim.test_sim_host_waits import HostWaits
from tests.support.ranks import RankServer
from tests.support.watchdog import speed_up_watchdog


@contextmanager
def received_messages() -> Iterator[list[int]]:
    """Record each time this process reads from a connection to another rank."""
    counts: list[int] = []
    receive = socket.socket.recv_into

    def counted(*args: Any) -> int:
        counts.append(1)
        return receive(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "recv_into", counted)
        yield counts


def collectives() -> tuple[list[int], list[Any]]:
    """Return the messages received in each call, after a first one has opened the connections, and values."""
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    accelerator.gather(torch.ones(2, device=device))
    pair = {"a": torch.full((3,), rank + 1.0, device=device), "b": [torch.tensor(rank, device=device)]}
    calls = [
        lambda: accelerator.reduce(pair, "sum"),
        lambda: accelerator.reduce(pair["a"], "max"),
        lambda: accelerator.gather(torch.tensor(rank, device=device)),
        lambda: broadcast(torch.full((2,), rank, device=device), from_process=1),
        lambda: accelerator.gather(torch.ones(2 + rank, device=device)),
    ]
    counts, values = list[int](), list[Any]()
    for call in calls * 2:
        with received_messages() as received, HostWaits() as host:
            value = call()
        assert not host.waits
        counts.append(len(received))
        values.append(send_to_device(value, "cpu"))
    return counts, values


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_agree_about_equal_tensors_without_a_message(ranks: RankServer, debug: bool) -> None:
    """With ACCELERATE_DEBUG_MODE they do so before anything is moved. A gather of rows asks for lengths."""
    for counts, values in ranks(2, collectives, env={"ACCELERATE_DEBUG_MODE": debug}):
        total, largest, numbers, sent, rows = values[:5]
        assert [total["a"].tolist(), total["b"][0].item()] == [[3.0] * 3, 1]
        assert [largest.tolist(), numbers.tolist(), sent.tolist()] == [[2.0] * 3, [0, 1], [1, 1]]
        assert len(rows) == 5
        assert [bool(count) for count in counts] == [debug, debug, debug, debug, True] * 2


def modes() -> list[float]:
    """Return what the first reductions give, inside of torch's modes and outside."""
    accelerator = Accelerator()
    ones, values = torch.ones(2, device=accelerator.device), list[float]()
    for _ in range(2):
        with torch.inference_mode(), torch.device("meta"):
            values += accelerator.reduce(ones, "sum").tolist()
        values += accelerator.reduce(ones, "sum").tolist()
    return values


def test_modes_of_torch_do_not_mix(ranks: RankServer) -> None:
    assert ranks(2, modes) == [[2.0] * 8] * 2


class LateEvent:
    """An event, and the stream that records it, of a device that is busy for a second."""

    def __init__(self, **options: Any) -> None:
        self.done = time.monotonic() + 1.0

    def query(self) -> bool:
        return time.monotonic() > self.done

    def record_event(self, event: LateEvent) -> None:
        """Do nothing: the time is that at which the event was made."""


def disagree(kind: str, is_late: bool) -> list[str]:
    """Return the errors of a call about which the ranks disagree, if it has one already, and of the next."""
    speed_up_watchdog()
    accelerator = Accelerator()
    if is_late:
        module: Any = torch.get_device_module("sim")
        module.Event, module.current_stream = LateEvent, lambda index: LateEvent()
    rank, device = accelerator.process_index, accelerator.device
    accelerator.reduce(torch.ones(3, device=device))
    messages = list[str]()

    def one_call() -> None:
        if kind == "shape":
            accelerator.reduce({"x": torch.ones(3 + rank, device=device)})
        elif kind == "structure":
            accelerator.reduce({"x" if rank else "y": torch.ones(3, device=device)})
        elif kind == "source":
            broadcast(torch.ones(3, device=device), from_process=rank)
        elif rank:
            accelerator.reduce(torch.ones(3, device=device), "max")
        else:
            accelerator.gather(torch.ones((), device=device))

    for call in (one_call, lambda: gather_object([rank])):
        try:
            call()
        except (RuntimeError, DistributedOperationException) as error:  # noqa: PERF203 - the later ones, too
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ("a tensor to reduce(sum), ['x']", "rank 1: torch.float32 (4,) on a device")),
        ("structure", ("a tensor to reduce(sum), ['y']", "rank 1: nothing there")),
        ("source", ("different collectives", "rank 0: broadcast from rank 0 at test_sim_agreement.py:")),
        ("call", ("different collectives", "rank 1: reduce(max) at test_sim_agreement.py:")),
    ],
)
def test_a_disagreement_is_the_same_error_on_all_ranks(
    ranks: RankServer, kind: str, words: tuple[str, ...], is_late: bool
) -> None:
    for messages in ranks(2, disagree, kind, is_late):
        for word in words:
            assert word in messages[-1]
