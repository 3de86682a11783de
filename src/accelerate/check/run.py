"""Runs the checks on all processes, one after the other, and prints a line for each.

What the processes found goes through the key-value store of the group, beside the collectives that are being
checked: a rank that fails says so even where the others wait for it in the middle of a collective. Those that
do not come back are given up after ``grace`` seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from accelerate.check.base import Check, Outcome, tried
from accelerate.check.rows import ROWS
from accelerate.facade.accelerator import Accelerator
from accelerate.world.board import Board

GRACE = 20.0  # seconds that ranks have to come back after another rank failed
LIMIT = 300.0  # seconds that a check may take on one rank longer than on another
_SETTLED = 5.0  # seconds that rank 0, which may hold the store, stays for the others to read it
_NAME, _RESULT = 16, 8  # widths of the columns

Rows = Sequence[tuple[str, Check]]


def main(rows: Rows = ROWS, *, grace: float = GRACE) -> None:
    """Runs the checks and ends this process: with code 0 if none failed, else with 1.

    Args:
        rows: the checks, in order.
        grace: seconds that ranks have to come back after another rank failed.

    Raises:
        AccelerateError: the set-up cannot even be opened.
    """
    accelerator = Accelerator()
    run = Run(accelerator, grace)
    run.say(_head(accelerator))
    for index, (name, check) in enumerate(rows):
        outcomes = run.exchanged(name, tried(check, accelerator))
        run.show(name, outcomes)
        if len(outcomes) < run.size:
            run.give_up(rows[index + 1 :], outcomes)
    run.settle()
    accelerator.end_training()
    sys.exit(1 if run.failed else 0)


class Run:
    """The state of a run on this process.

    Attributes:
        rank, size: this process among all.
        printing: whether this process prints. That is rank 0, unless it does not come back.
        failed: whether a check failed on any rank.
    """

    def __init__(self, accelerator: Accelerator, grace: float) -> None:
        self.rank, self.size, self.grace = accelerator.process_index, accelerator.num_processes, grace
        self.printing, self.failed = accelerator.is_main_process, False
        self.traces: list[str] = []
        self.board: Board | None = None
        if self.size > 1:
            # The checks may break every group; the store below them stays.
            self.board = Board(dist.distributed_c10d._get_default_store())  # pyright: ignore[reportPrivateUsage]

    def exchanged(self, name: str, own: Outcome) -> dict[int, Outcome]:
        """What every rank found; those that do not come back are missing."""
        if self.board is None:
            return {self.rank: own}
        keys = [f"check/{name}/{rank}" for rank in range(self.size)]
        self.board.put(keys[self.rank], own.packed())
        began, failed, pause = time.monotonic(), 0.0, 0.001
        while True:
            there = self.board.read(keys)
            found = {rank: Outcome.unpacked(there[key]) for rank, key in enumerate(keys) if key in there}
            now = time.monotonic()
            if not failed and any(outcome.result == "failed" for outcome in found.values()):
                failed = now
            late = now > began + LIMIT or bool(failed and now > failed + self.grace)
            if len(found) == self.size or late or self.board.lost:
                return {self.rank: own, **found}
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def show(self, name: str, outcomes: Mapping[int, Outcome]) -> None:
        """Prints the line of one check."""
        missing = [rank for rank in range(self.size) if rank not in outcomes]
        if missing:
            self._stand_in(outcomes)
        bad = {rank: outcome for rank, outcome in outcomes.items() if outcome.result == "failed"}
        self.failed = self.failed or bool(bad or missing)
        self.traces += [f"{name}, rank {rank}:\n{outcome.trace}" for rank, outcome in sorted(bad.items())[:1]]
        if bad or missing:
            texts = {rank: outcome.text for rank, outcome in bad.items()}
            texts |= dict.fromkeys(missing, "did not come back: it still waits for the others")
            self.line(name, "failed", "; ".join(_by_rank(texts, self.size)))
        else:
            first = outcomes[min(outcomes)]
            self.line(name, first.result, first.text)

    def _stand_in(self, outcomes: Mapping[int, Outcome]) -> None:
        """Where rank 0 does not come back, the first that asks prints."""
        if 0 not in outcomes and self.board is not None:
            self.printing = self.board.first("check/prints", str(self.rank)) == str(self.rank)

    def give_up(self, rest: Rows, outcomes: Mapping[int, Outcome]) -> None:
        """Ends this process: some ranks wait for ever, and so would what closes the group."""
        missing = [rank for rank in range(self.size) if rank not in outcomes]
        for name, _ in rest:
            self.line(name, "skipped", f"{_ranks(missing, self.size)} did not come back")
        self._say_traces()
        sys.stdout.flush()
        sys.stderr.flush()
        if self.rank == min(outcomes):
            time.sleep(0.5)  # it may hold the store, or be the one whose end ends the job: the others print
        os._exit(1)

    def settle(self) -> None:
        """Waits until all have read what the last check found, and prints the traceback of what failed."""
        if self.board is not None:
            self.board.put(f"check/done/{self.rank}", "")
            if self.rank == 0:
                self.board.wait([f"check/done/{rank}" for rank in range(self.size)], _SETTLED)
        self._say_traces()

    def _say_traces(self) -> None:
        if self.printing:
            for trace in self.traces:
                sys.stderr.write(f"\n{trace}")
            sys.stderr.flush()

    def line(self, name: str, result: str, text: str) -> None:
        """A line of the table."""
        self.say(f"{name:<{_NAME}}  {result:<{_RESULT}}  {text}")

    def say(self, text: str) -> None:
        """A line for people, on one process, in one write."""
        if self.printing:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def _head(accelerator: Accelerator) -> str:
    count, device = accelerator.num_processes, accelerator.device.type
    several = f"{count} processes" if count > 1 else "1 process"
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    head = f"{several} on {device}, group {kind}, precision {accelerator.mixed_precision}"
    return f"{head}\n\n{'check':<{_NAME}}  {'result':<{_RESULT}}  what was seen"


def _by_rank(texts: Mapping[int, str], size: int) -> Iterator[str]:
    """Texts with the ranks that say them: ``"rank 1: ..."``."""
    together: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        together.setdefault(text, []).append(rank)
    for text, ranks in together.items():
        yield f"{_ranks(ranks, size)}: {text}"


def _ranks(ranks: Sequence[Any], size: int) -> str:
    if len(ranks) == size:
        return "every rank" if size > 1 else "rank 0"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
