"""The control tree: what arrives, how many messages it takes, and what breaks it. Ranks are threads here."""

from __future__ import annotations

import math
import socket
import threading
import time

import pytest

from tests.support.control_trees import ControlTree, TreeMessage, check_nothing, keep, open_trees

SIZES = [2, 3, 5, 8, 13, 16, 32]


class InterruptionError(Exception):
    """What a signal handler raises in a rank that waits."""


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_learns_what_all_say_in_few_messages(size: int) -> None:
    """G18: reduce, barrier and broadcast agree by one exchange; of 16 and 32 ranks it is no all-to-all."""

    def same(tree: ControlTree) -> TreeMessage:
        return tree.exchange(b"gather", bytearray([tree.rank]), keep, check_nothing)

    def different(tree: ControlTree) -> TreeMessage:
        return tree.exchange(b"%d" % (tree.rank // 2), bytearray(), keep, check_nothing)

    with open_trees(size) as on_all:
        for answer in on_all(same):
            assert answer.runs == [(size, b"gather")]
            assert list(answer.values) == list(range(size))
        expected = [(min(2, size - rank), b"%d" % (rank // 2)) for rank in range(0, size, 2)]
        assert all(answer.runs == expected for answer in on_all(different))
        counts = on_all(lambda tree: tree.message_count / 2)
    assert sum(counts) == 4 * (size - 1)  # each of the two, up and down, counted at both ends
    assert max(counts) <= 2 * math.ceil(math.log2(size))


def test_rank_0_merges_for_all_and_large_values_arrive_whole() -> None:
    def merge(message: TreeMessage) -> TreeMessage:
        assert len(message.values) == 5 * 300_000
        return TreeMessage(message.runs, message.values[::300_000] * 100_000, True)

    def exchange(tree: ControlTree) -> TreeMessage:
        return tree.exchange(b"", bytearray([tree.rank]) * 300_000, merge, check_nothing)

    with open_trees(5) as on_all:
        for answer in on_all(exchange):
            assert answer.is_merged
            assert answer.values == bytearray(range(5)) * 100_000


def test_an_exchange_that_an_exception_has_interrupted_is_ended_by_the_next() -> None:
    """Every rank's messages stay in step, also those of ranks that noticed nothing."""
    interrupted = threading.Event()

    def interrupt() -> None:
        interrupted.set()
        raise InterruptionError

    def exchange(tree: ControlTree) -> TreeMessage:
        if tree.rank == 2:  # it has a parent and a child
            with pytest.raises(InterruptionError):
                tree.exchange(b"first", bytearray([tree.rank]), keep, interrupt)
        else:
            assert tree.rank != 3 or interrupted.wait(30)
            answer = tree.exchange(b"first", bytearray([tree.rank]), keep, check_nothing)
            assert answer == ([(4, b"first")], bytearray(range(4)), False)
        return tree.exchange(b"second", bytearray([9 - tree.rank]), keep, check_nothing)

    with open_trees(4) as on_all:
        assert on_all(exchange) == [([(4, b"second")], bytearray([9, 8, 7, 6]), False)] * 4


def test_a_greeting_may_come_late_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a network that loses packets; the child takes itself to be connected meanwhile."""
    monkeypatch.setattr("accelerate.world.control_tree.WAIT_SLICE", 0.01)
    send_all = socket.socket.sendall

    def send_late(endpoint: socket.socket, data: bytes) -> None:
        for part in (data[:7], data[7:]):
            time.sleep(0.05)
            send_all(endpoint, part)

    def exchange(tree: ControlTree) -> TreeMessage:
        return tree.exchange(b"", bytearray([tree.rank]), keep, check_nothing)

    monkeypatch.setattr(socket.socket, "sendall", send_late)
    with open_trees(3) as on_all:
        assert [list(answer.values) for answer in on_all(exchange)] == [[0, 1, 2]] * 3


def test_a_rank_that_is_gone_breaks_its_neighbours_waits() -> None:
    def exchange(tree: ControlTree) -> str:
        if tree.rank == 1:
            tree.close()
            return "gone"
        try:
            tree.exchange(b"", bytearray(), keep, check_nothing)
        except OSError as error:
            tree.close()  # as its process would end
            return str(error)
        return "arrived"

    with open_trees(4) as on_all:
        outcomes = on_all(exchange)
    assert "closed by peer" in outcomes[0] or "reset" in outcomes[0]
    assert outcomes[1] == "gone"
    assert all("closed by peer" in text or "reset" in text for text in outcomes[2:])
