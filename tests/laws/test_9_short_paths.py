"""Law 9: short paths. What a call runs through is counted on real calls, and bounded.

``python -m tests.support.call_path -v`` prints the counts and the functions. A bound is what is reached, with
little room for other machines; the goal is beside it. No path grows while others get shorter.
"""

from __future__ import annotations

import re

import pytest

from tests.support.call_path import CallCounts, measure_all
from tests.support.environment import ROOT
from tests.support.ranks import RankServer

# Call: at most (functions, files).         the goal
BOUNDS = {
    # Of them 41 functions in 11 files detect the launcher and the device, and open the process group.
    "Accelerator(), FSDP2": (101, 34),  #   70 / 20
    "Accelerator(), DDP": (87, 31),
    # Two of them are where programs change or shard the models by functions of their own.
    "prepare, FSDP2": (102, 29),  #         110 / 20: functions reached
    "prepare, DDP": (55, 19),  #            80 / 18: functions reached
    # Two of them see whether the optimizer reads numbers of partial DTensors.
    "first optimizer.step, FSDP2": (10, 7),  # 10 / 5: functions reached
    "first optimizer.step, DDP": (8, 6),
    "later optimizer.step, FSDP2": (1, 1),
    "later optimizer.step, DDP": (1, 1),
    "forward, DDP": (2, 1),
    # One shards again what a forward without gradients left; one looks for tensors that torch does not find.
    "forward, FSDP2": (2, 2),
    # Four see which parameters this rank has not used, at the reduction of a unit and at the end.
    "backward, FSDP2": (7, 4),
    "backward, DDP": (3, 3),
    # With the lines that it logs, the lock of the place, and the comparison of the ranks. Rank 0 is counted,
    # which combines what the ranks say for all of them, in 3 of these functions; in 2 it is seen that nothing
    # new is planned. One asks a batch sampler for its batch size, which may have changed.
    "save_state, FSDP2": (134, 31),  #      90 / 15
    "save_state, DDP": (132, 28),  # with the question who calls: the main process may do so alone
    # It compares everything with the objects, takes back what one of them refuses, and shows its progress.
    "load_state, FSDP2": (155, 31),  #      90 / 15
    "load_state, DDP": (148, 30),
    # Reached. Two functions more count the cores where OMP_NUM_THREADS says nothing.
    "launch of 2 processes": (119, 24),  #  120 / 25
}


@pytest.fixture(scope="module")
def measured(ranks: RankServer) -> dict[str, CallCounts]:
    """What each call of the law runs through."""
    return measure_all(ranks)


def test_calls_run_through_few_functions_and_files(measured: dict[str, CallCounts]) -> None:
    assert measured.keys() == BOUNDS.keys()
    longer = {
        call: f"{counts.functions} functions in {counts.files} files, at most {BOUNDS[call]}"
        for call, counts in measured.items()
        if counts.functions > BOUNDS[call][0] or counts.files > BOUNDS[call][1]
    }
    assert not longer, f"{longer}; python -m tests.support.call_path -v prints the functions"


def test_the_newcomers_walk_names_every_file_of_prepare(measured: dict[str, CallCounts]) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    walk = page.partition("## A newcomer's walk")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", walk)) - {"tests/laws/test_9_short_paths.py"}
    passed = {name.partition(":")[0].lstrip("/") for name in measured["prepare, FSDP2"].names}
    assert named == passed
