"""Collectives of tensors on an accelerator: the ranks agree on the device, and the host waits for nothing.

Ahead of the transfer, in the same stream, a digest of the call (operation, structure, dtypes, shapes) goes
through an all-reduce of 16 bytes. Its result is copied to the host behind it, and read once it is there, by
a later collective or by the watchdog. A collective of the host, and so a save, waits for all results first.
Where the ranks disagree, every rank publishes what it called, and all raise the same error. The transfer of
that call may hang by then, or have brought wrong values: the watchdog interrupts a rank that waits for the
device (``FailureReport.interrupts``).
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import json
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.world import world as worlds
from accelerate.world.peers import ANSWER_TIMEOUT
from accelerate.world.rank_failure_report import (
    SAME_CALLS,
    FailureReport,
    RankStatus,
    find_difference,
    rank_table,
)
from accelerate.world.watchdog import Watchdog

MAX_PENDING = 64  # calls whose agreement is not known yet; one more waits for the oldest
MAX_KINDS = 256  # calls of other digests whose tensors stay on the device
_POLL_INTERVAL = 0.0005  # seconds between looks at a result that is waited for
_WORDS = 4  # int32, which every back end can reduce: two of the digest, and both negated


class _CallDigest(NamedTuple):
    """The digest of a call, as numbers and on the device, and (path, description) of its tensors."""

    words: list[int]
    template: torch.Tensor
    leaves: list[tuple[str, str]]


class _PendingCall(NamedTuple):
    number: int
    operation: str
    label: str
    digest: _CallDigest
    maxima: torch.Tensor
    event: Any


class DeferredAgreement:
    """The calls of this rank on which the ranks may still disagree, in order.

    Args:
        watch: that of the world.
        world: its device has streams.
    """

    def __init__(self, watch: Watchdog, world: worlds.World) -> None:
        self._watch, self._world = watch, world
        self._lock = threading.Lock()
        self._pending: deque[_PendingCall] = deque()
        self._digests: OrderedDict[bytes, _CallDigest] = OrderedDict()
        with torch.inference_mode(False):  # what is made inside of it cannot be written outside
            memory = world.hardware.host_memory(MAX_PENDING * _WORDS * 4)
            self._maxima = memory.view(torch.int32).view(MAX_PENDING, _WORDS)
        self._count = 0
        watch.poll_actions.append(self.find_disagreement)
        worlds.add_group_user(self, DeferredAgreement._forget)

    def _forget(self) -> None:
        """Drop the calls of a group that was interrupted; all ranks do."""
        with self._lock:
            self._pending.clear()

    def post(
        self,
        operation: str,
        label: str,
        content: bytes,
        describe: Callable[[], list[tuple[str, str]]],
    ) -> None:
        """Send the digest of a call, which the transfer follows.

        Args:
            operation: name of the collective, with its arguments.
            label: the operation and the line of the user's code.
            content: structure, dtypes and shapes.
            describe: returns (path, description) of each tensor.

        Raises:
            CollectiveError: the ranks disagree about an earlier call, or are known to about this one.
        """
        self.check()
        digest = self._digest(operation.encode() + content, describe)
        with self._lock:  # the watchdog's thread takes those that are done
            oldest = self._pending[0] if len(self._pending) == MAX_PENDING else None
        if oldest is not None:
            oldest.event.synchronize()
            self.check()
        maxima = digest.template.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        on_host = self._maxima[self._count % MAX_PENDING]
        on_host.copy_(maxima, non_blocking=True)
        hardware = self._world.hardware
        event = hardware.record_event(hardware.current_stream(self._world.device.index))
        with self._lock:
            self._pending.append(_PendingCall(self._count, operation, label, digest, on_host, event))
        self._count += 1
        self.check()

    def _digest(self, call: bytes, describe: Callable[[], list[tuple[str, str]]]) -> _CallDigest:
        """Return the digest of a call; those of the last calls are kept, since steps repeat."""
        digest = self._digests.get(call)
        if digest is None:
            # Without the sign bit, so that the negated words are int32 as well.
            words = [
                word >> 1 for word in struct.unpack("<2I", hashlib.blake2b(call, digest_size=8).digest())
            ]
            words += [-word for word in words]
            template = torch.empty(_WORDS, dtype=torch.int32, device=self._world.device)
            for place, word in enumerate(words):
                template[place].fill_(word)  # a copy from the host may wait for the device
            digest = self._digests[call] = _CallDigest(words, template, describe())
            if len(self._digests) > MAX_KINDS:
                self._digests.popitem(last=False)
        self._digests.move_to_end(call)
        return digest

    def check(self) -> None:
        """Read the maxima that have arrived.

        Raises:
            CollectiveError: the ranks disagree about a call; the same on every rank.
        """
        report = self.find_disagreement()
        if report is not None:
            raise report.error(self._world.rank)

    def settle(self, check_wait: Callable[[], None]) -> None:
        """Wait until the agreement of all calls is known.

        Args:
            check_wait: called meanwhile; raises if the wait cannot end.

        Raises:
            CollectiveError: the ranks disagree about a call; the same on every rank.
        """
        self.check()
        while self._pending and not self._watch.was_interrupted:
            check_wait()
            time.sleep(_POLL_INTERVAL)
            self.check()

    def find_disagreement(self) -> FailureReport | None:
        """Read the maxima that have arrived; return the report about a call on which the ranks disagree."""
        while True:
            with self._lock:
                if not self._pending or self._watch.was_interrupted or not self._pending[0].event.query():
                    return self._watch.report
                call = self._pending.popleft()
                # The largest word is that of this rank, and the smallest one too: all ranks have it.
                is_agreed = call.maxima.tolist() == call.digest.words
            if not is_agreed:
                return self._report(call)

    def _report(self, call: _PendingCall) -> FailureReport:
        """Publish what this rank called, and report what all have."""
        watch, size = self._watch, self._world.size
        keys = {f"call/{call.number}/{rank}": rank for rank in range(size)}
        text = json.dumps((call.operation, call.label, call.digest.leaves))
        watch.store.put(f"call/{call.number}/{watch.rank}", text)
        watch.raise_alarm()

        def make(statuses: dict[int, RankStatus]) -> FailureReport:
            watch.store.wait(list(keys), ANSWER_TIMEOUT)
            texts = {keys[key]: text for key, text in watch.store.read(list(keys)).items()}
            return self._explain(texts, statuses)

        return watch.write_report(make)

    def _explain(self, texts: dict[int, str], statuses: dict[int, RankStatus]) -> FailureReport:
        """Report what the ranks have called; ``statuses`` say where those are that published nothing."""
        calls = {rank: json.loads(text) for rank, text in texts.items()}
        ranks = range(self._world.size)
        operations = {operation for operation, *_ in calls.values()}
        if len(calls) == len(ranks) and len(operations) == 1:
            (operation,), fix = operations, "make the structures, dtypes and shapes equal on all ranks"
            path, rows = find_difference([dict(calls[rank][2]) for rank in ranks])
            title = f"the ranks do not agree about a tensor to {operation}{path and f', {path}'}"
            if path is None:
                title = f"the ranks have the tensors to {operation} in different orders"
        else:
            title, fix = "the ranks called different collectives", SAME_CALLS
            said = {rank: status.describe() for rank, status in statuses.items()}
            said |= {rank: label for rank, (_, label, _) in calls.items()}
            rows = [said.get(rank, "is silent") for rank in ranks]
        return FailureReport(self._world.rank, title, rank_table(rows), fix, interrupts=True)


def is_deferrable(world: worlds.World, leaves: list[torch.Tensor]) -> bool:
    """Return whether ranks can agree on the device about a call with these tensors.

    ``world.debug`` asks for the form that waits: there nothing is moved before all ranks agree.
    """
    device = world.device.type
    return (
        device != "cpu"
        and not world.debug
        and not world.hardware.is_lazy
        and world.hardware.current_stream(world.device.index) is not None
        and bool(leaves)
        and all(leaf.device.type == device and not leaf.is_nested for leaf in leaves)
    )
