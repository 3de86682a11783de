"""Law 9: short paths. What a call runs through is counted on real calls, and bounded.

``python -m tests.support.call_path -v`` prints the counts and the functions. A bound is what is reached, with
little room for other machines; the goal is beside it. No path grows while others get shorter.
"""

from __future__ import annotations

from tests.support.call_path import measure_all
from tests.support.ranks import RankServer

# Call: at most (functions, files).         the goal
BOUNDS = {
    "Accelerator(), FSDP2": (175, 52),  #   70 / 20
    "Accelerator(), DDP": (150, 51),
    "prepare, FSDP2": (245, 58),  #         110 / 20
    "prepare, DDP": (135, 43),  #           80 / 18
    "first optimizer.step, FSDP2": (14, 9),  # 10 / 5
    "first optimizer.step, DDP": (14, 9),
    "later optimizer.step, FSDP2": (1, 1),
    "later optimizer.step, DDP": (1, 1),
    "forward, DDP": (1, 1),
    "forward, FSDP2": (0, 0),
    "backward, FSDP2": (4, 3),
    "backward, DDP": (4, 3),
    "save_state, FSDP2": (178, 37),  #      90 / 15
    "save_state, DDP": (158, 34),
    "load_state, FSDP2": (184, 40),  #      90 / 15
    "load_state, DDP": (163, 39),
    "launch of 2 processes": (263, 50),  #  120 / 25
}


def test_calls_run_through_few_functions_and_files(ranks: RankServer) -> None:
    measured = measure_all(ranks)
    assert measured.keys() == BOUNDS.keys()
    longer = {
        call: f"{counts.functions} functions in {counts.files} files, at most {BOUNDS[call]}"
        for call, counts in measured.items()
        if counts.functions > BOUNDS[call][0] or counts.files > BOUNDS[call][1]
    }
    assert not longer, f"{longer}; python -m tests.support.call_path -v prints the functions"
