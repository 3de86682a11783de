"""Runs the checks on all ranks, one after the other, and prints a line for each.

The outcomes of all ranks go through the key-value store of the process group, not through the collectives
that are checked: a rank that fails reports it even where the others wait for it in a collective. Rank 0 reads
all and tells the others in one text. Ranks that do not come back are given up after ``grace`` seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from accelerate.check.checks import CHECKS, Check, CheckOutcome, run_check
from accelerate.core.errors import name_ranks
from accelerate.facade.accelerator import Accelerator
from accelerate.world.process_group import StoreClient

GRACE_SECONDS = 20.0  # seconds that ranks have to come back after another rank failed
CHECK_SECONDS = 300.0  # seconds that a check may take on one rank longer than on another
_SUMMARY_SECONDS = 2.0  # seconds that the others wait longer than rank 0, which tells them who is missing
_FINISH_SECONDS = 5.0  # seconds that rank 0, which may hold the store, stays for the others to read it
_NAME, _RESULT = 16, 8  # widths of the columns

CheckTable = Sequence[tuple[str, Check]]


def main(rows: CheckTable = CHECKS, *, grace: float = GRACE_SECONDS) -> None:
    """Run the checks and end this process: with code 0 if none failed, else with 1.

    Args:
        rows: the checks, in order.
        grace: seconds that ranks have to come back after another rank failed.

    Raises:
        AccelerateError: the process group cannot be opened.
    """
    accelerator = Accelerator()
    run = TestCommandState(accelerator, grace)
    run.print_line(_format_head(accelerator))
    for index, (name, check) in enumerate(rows):
        outcomes = run.exchange_outcomes(name, run_check(check, accelerator))
        run.print_check(name, outcomes)
        if len(outcomes) < run.size:
            run.give_up(rows[index + 1 :], outcomes)
    run.finish()
    accelerator.end_training()
    sys.exit(1 if run.failed else 0)


class TestCommandState:
    """The state of ``accelerate test`` on this rank.

    Attributes:
        rank, size: this rank and the world size.
        prints: whether this process prints. That is rank 0, unless it does not come back.
        failed: whether a check failed on any rank.
    """

    def __init__(self, accelerator: Accelerator, grace: float) -> None:
        self.rank, self.size, self.grace = accelerator.process_index, accelerator.num_processes, grace
        self.prints, self.failed = accelerator.is_main_process, False
        self.traces: list[str] = []
        self.store: StoreClient | None = None
        if self.size > 1:
            # The checks may break every group; the store below them stays.
            store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self.store = StoreClient(store, self.size)

    def exchange_outcomes(self, name: str, own: CheckOutcome) -> dict[int, CheckOutcome]:
        """Return the outcomes of all ranks; ranks that do not come back are missing."""
        if self.store is None:
            return {self.rank: own}
        keys, summary = [f"check/{name}/{rank}" for rank in range(self.size)], f"check/{name}/summary"
        self.store.put(keys[self.rank], own.to_json())
        if own.result == "failed":
            self.store.put(f"check/{name}/failed", "")
        self._wait(self.store, name, [summary] if self.rank else keys)
        text = self.store.get(summary) if self.rank else None
        if text is None:  # also where rank 0 does not come back
            texts = self.store.read(keys)
            outcomes = {r: CheckOutcome.from_json(texts[key]) for r, key in enumerate(keys) if key in texts}
            outcomes = {self.rank: own, **outcomes}
            if self.rank == 0:
                failures = {r: each.to_json() for r, each in outcomes.items() if each.result == "failed"}
                missing = [rank for rank in range(self.size) if rank not in outcomes]
                self.store.put(summary, json.dumps([failures, missing]))
            return outcomes
        failures, missing = json.loads(text)
        failures = {int(rank): CheckOutcome.from_json(each) for rank, each in failures.items()}
        ok = CheckOutcome("ok", "")  # rank 0 prints
        return {rank: failures.get(rank, ok) for rank in range(self.size) if rank not in missing}

    def _wait(self, store: StoreClient, name: str, keys: Sequence[str]) -> None:
        """Wait until all keys are set, or some ranks of a check have to be given up."""
        slack, failed = (_SUMMARY_SECONDS if self.rank else 0.0), 0.0  # rank 0 gives up first, and says so

        def watch() -> None:
            nonlocal failed
            failed = failed or (time.monotonic() if store.has(f"check/{name}/failed") else 0.0)
            if failed and time.monotonic() > failed + self.grace + slack:
                raise TimeoutError

        with suppress(TimeoutError):
            store.wait(keys, CHECK_SECONDS + slack, watch)

    def print_check(self, name: str, outcomes: Mapping[int, CheckOutcome]) -> None:
        """Print the line of one check."""
        missing = [rank for rank in range(self.size) if rank not in outcomes]
        if 0 in missing and self.store is not None:
            # Rank 0 does not come back: the first that asks the store prints.
            self.prints = self.store.put_if_absent("check/prints", str(self.rank)) == str(self.rank)
        bad = {rank: outcome for rank, outcome in outcomes.items() if outcome.result == "failed"}
        self.failed = self.failed or bool(bad or missing)
        self.traces += [f"{name}, rank {rank}:\n{outcome.trace}" for rank, outcome in sorted(bad.items())[:1]]
        if bad or missing:
            texts = {rank: outcome.text for rank, outcome in bad.items()}
            texts |= dict.fromkeys(missing, "did not come back: it still waits for the others")
            self.print_row(name, "failed", "; ".join(_group_by_rank(texts, self.size)))
        else:
            first = outcomes[min(outcomes)]
            self.print_row(name, first.result, first.text)

    def give_up(self, rest: CheckTable, outcomes: Mapping[int, CheckOutcome]) -> None:
        """End this process: some ranks wait for ever, and closing the process group would wait too."""
        missing = [rank for rank in range(self.size) if rank not in outcomes]
        for name, _ in rest:
            self.print_row(name, "skipped", f"{_format_ranks(missing, self.size)} did not come back")
        self._print_traces()
        sys.stdout.flush()
        sys.stderr.flush()
        if self.rank == min(outcomes):
            time.sleep(0.5)  # it may hold the store, or be the one whose end ends the job: the others print
        os._exit(1)

    def finish(self) -> None:
        """Wait until all ranks have read the last outcomes, and print the tracebacks of failures."""
        if self.store is not None:
            self.store.put(f"check/done/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"check/done/{rank}" for rank in range(self.size)], _FINISH_SECONDS)
        self._print_traces()

    def _print_traces(self) -> None:
        if self.prints:
            for trace in self.traces:
                sys.stderr.write(f"\n{trace}")
            sys.stderr.flush()

    def print_row(self, name: str, result: str, text: str) -> None:
        """Print a row of the table."""
        self.print_line(f"{name:<{_NAME}}  {result:<{_RESULT}}  {text}")

    def print_line(self, text: str) -> None:
        """Print a line on the printing rank, in one write."""
        if self.prints:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def _format_head(accelerator: Accelerator) -> str:
    count, device = accelerator.num_processes, accelerator.device.type
    several = f"{count} processes" if count > 1 else "1 process"
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    head = f"{several} on {device}, group {kind}, precision {accelerator.mixed_precision}"
    return f"{head}\n\n{'check':<{_NAME}}  {'result':<{_RESULT}}  what was seen"


def _group_by_rank(texts: Mapping[int, str], size: int) -> Iterator[str]:
    """Yield each text with its ranks: ``"rank 1: ..."``."""
    ranks_of_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_of_text.setdefault(text, []).append(rank)
    for text, ranks in ranks_of_text.items():
        yield f"{_format_ranks(ranks, size)}: {text}"


def _format_ranks(ranks: Sequence[Any], size: int) -> str:
    if len(ranks) == size:
        return "every rank" if size > 1 else "rank 0"
    return name_ranks(ranks)
