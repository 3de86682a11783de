"""What is said when a job has failed, from the ends of its processes and what they left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from accelerate.launch.rank_reports import JobOutcome, ProcessExit, build_job_error, rank_file

MS = 1_000_000
START = 10_000 * MS


def end(rank: int, code: int, at: int = 0, *, asked: bool = False) -> ProcessExit:
    """A process that ended ``at`` ms after the start."""
    return ProcessExit(rank, code, START + at * MS, asked)


def raised(
    folder: Path,
    rank: int,
    at: int,
    summary: str = "ValueError: boom",
    code: int = 1,
    because_of: int | str = "own",
) -> None:
    """Leaves what a rank leaves that raised ``at`` ms after the start, maybe because of another rank."""
    text = "" if summary.startswith("sys.exit") else f"Traceback of rank {rank}\n{summary}\n"
    rank_file(folder, rank, "error").write_text(f"{START + at * MS} {code} {because_of} {summary}\n{text}")


def shown(folder: Path, *ends: ProcessExit, stopped_by: int | None = None) -> tuple[int, list[str]]:
    error = build_job_error(JobOutcome(list(ends), stopped_by), folder)
    assert error is not None
    return error.code, [line.removeprefix("accelerate launch: ") for line in error.format_text().splitlines()]


def test_a_good_end_is_no_failure(tmp_path: Path) -> None:
    assert build_job_error(JobOutcome([end(0, 0), end(1, 0)]), tmp_path) is None


def test_the_first_to_raise_is_the_cause_whoever_ended_first(tmp_path: Path) -> None:
    raised(tmp_path, 1, 100)
    raised(tmp_path, 0, 130, "RuntimeError: Connection closed by peer")
    assert shown(tmp_path, end(0, 1, 200), end(1, 3, 900)) == (3, [
        "rank 0 stopped after it: RuntimeError: Connection closed by peer",
        "rank 1 of 2 failed (exit code 3)",
        "Traceback of rank 1",
        "ValueError: boom",
    ])  # fmt: skip


@pytest.mark.parametrize("because_of", [1, -1])
def test_what_a_peers_failure_leads_to_is_no_cause_however_early(tmp_path: Path, because_of: int) -> None:
    """G12: whoever raised, or ended, first."""
    raised(tmp_path, 0, 0, "PeerError: rank 1 failed", because_of=because_of)
    raised(tmp_path, 1, 5000)
    assert shown(tmp_path, end(0, 1, 10), end(1, 1, 5100, asked=True))[1] == [
        "rank 0 stopped after it: PeerError: rank 1 failed",
        "rank 1 of 2 failed (exit code 1)",
        "Traceback of rank 1",
        "ValueError: boom",
    ]
    rank_file(tmp_path, 1, "error").unlink()
    killed = shown(tmp_path, end(0, 1, 10), end(1, -9, 5100))[1]
    assert killed[1] == "rank 1 of 2 was killed by SIGKILL"


def test_a_rank_that_was_stopped_before_it_could_report_is_blamed_by_its_peers(tmp_path: Path) -> None:
    for rank in (1, 2):
        raised(tmp_path, rank, rank, "PeerError: rank 0 failed", because_of=0)
    ends = (end(1, 1, 10), end(2, 1, 20), end(0, -15, 1100, asked=True))
    assert shown(tmp_path, *ends)[1] == [
        "ranks 1-2 stopped after it: PeerError: rank 0 failed",
        "rank 0 of 3 failed (exit code 1), the others were stopped",
        "  why: rank 0 was stopped before it could report; this is what it told another rank",
        "Traceback of rank 1",
        "PeerError: rank 0 failed",
    ]


def test_ranks_that_ended_well_before_are_named(tmp_path: Path) -> None:
    """G11: the one that fails may only have waited for them."""
    raised(tmp_path, 1, 500)
    ends = (end(0, 0, 10), end(3, 0, 20), end(1, 1, 510), end(2, 0, 600))
    assert shown(tmp_path, *ends)[1][:2] == [
        "rank 1 of 4 failed (exit code 1)",
        "  why: ranks 0, 3 had ended before, with exit code 0",
    ]


def test_a_silent_death_is_noticed_late_and_is_still_the_cause(tmp_path: Path) -> None:
    """Its peer complained before its end was seen."""
    raised(tmp_path, 0, 995, "RuntimeError: Connection closed by peer")
    code, lines = shown(tmp_path, end(1, -9, 1000), end(0, 1, 1100))
    assert code == 137
    assert lines[:2] == [
        "rank 0 stopped after it: RuntimeError: Connection closed by peer",
        "rank 1 of 2 was killed by SIGKILL",
    ]


def test_a_library_that_gives_up_is_no_cause(tmp_path: Path) -> None:
    raised(tmp_path, 1, 950)
    rank_file(tmp_path, 0, "fault").write_text("Fatal Python error: Aborted\n\nThread 1\n")
    code, lines = shown(tmp_path, end(0, -6, 1000), end(1, 1, 1300))
    assert (code, lines[:2]) == (1, ["rank 0 stopped after it: SIGABRT", "rank 1 of 2 failed (exit code 1)"])


def test_a_crash_while_shutting_down_is_not_the_news(tmp_path: Path) -> None:
    raised(tmp_path, 0, 10)
    rank_file(tmp_path, 0, "fault").write_text("Fatal Python error: Aborted\n")
    assert shown(tmp_path, end(0, -6, 500))[1][0] == "the script failed (exit code 1)"
    assert shown(tmp_path, end(0, -6, 500))[0] == 1


def test_who_was_asked_to_stop_did_not_fail(tmp_path: Path) -> None:
    raised(tmp_path, 2, 10)
    ends = (end(2, 1, 50), end(0, -15, 1100, asked=True), end(1, -9, 4100, asked=True), end(3, 0, 20))
    assert shown(tmp_path, *ends)[1][0] == "rank 2 of 4 failed (exit code 1), the others were stopped"


def test_who_raised_and_had_to_be_killed_failed(tmp_path: Path) -> None:
    raised(tmp_path, 1, 10)
    code, lines = shown(tmp_path, end(0, -15, 4000, asked=True), end(1, -9, 7000, asked=True))
    assert (code, lines[0]) == (1, "rank 1 of 2 failed (exit code 1), the others were stopped")


def test_the_same_failure_everywhere_is_told_once(tmp_path: Path) -> None:
    for rank in range(4):
        raised(tmp_path, rank, rank, "ImportError: no torch")
    lines = shown(tmp_path, *(end(rank, 1, 50) for rank in range(4)))[1]
    assert lines == [
        "all 4 ranks failed (exit code 1), in the same way",
        "Traceback of rank 0",
        "ImportError: no torch",
    ]


def test_ranks_are_counted_in_runs(tmp_path: Path) -> None:
    for rank in (0, 1, 2, 5):
        raised(tmp_path, rank, rank)
    for rank in (3, 4, 6):
        raised(tmp_path, rank, 50, "RuntimeError: peer")
    lines = shown(tmp_path, *(end(rank, 1, 100) for rank in range(7)), end(7, -15, 900, asked=True))[1]
    assert lines[:2] == [
        "ranks 3-4, 6 stopped after it: RuntimeError: peer",
        "ranks 0-2, 5 of 8 failed (exit code 1), in the same way, the others were stopped",
    ]


@pytest.mark.parametrize(
    ("summary", "code", "why"),
    [("sys.exit(4)", 4, "it called sys.exit(4)"), (None, 7, "it left no traceback")],
)
def test_an_end_without_traceback_says_why(tmp_path: Path, summary: str | None, code: int, why: str) -> None:
    if summary:
        raised(tmp_path, 1, 10, summary, code)
    found, lines = shown(tmp_path, end(1, code, 20), end(0, -15, 1200, asked=True))
    assert found == code
    assert lines[1].startswith(f"  why: {why}")


def test_a_crash_shows_the_stack_without_our_frames(tmp_path: Path) -> None:
    from accelerate.launch import rank_entry_point

    frames = [f'  File "{name}", line 3' for name in ("x.py", rank_entry_point.__file__)]
    rank_file(tmp_path, 0, "fault").write_text(
        "\n".join(["Fatal Python error: Segmentation fault", "", *frames])
    )
    code, lines = shown(tmp_path, end(0, -11, 20))
    assert (code, lines[0], lines[-1]) == (139, "the script was killed by SIGSEGV", '  File "x.py", line 3')


def test_a_report_cut_short_by_a_kill_is_no_report(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, "error").write_text("1234")
    assert shown(tmp_path, end(0, -9, 20))[1][0] == "the script was killed by SIGKILL"
    assert shown(tmp_path, end(0, -9, 20, asked=True))[0] == 137


def test_a_signal_without_a_name(tmp_path: Path) -> None:
    assert shown(tmp_path, end(0, -40, 20)) == (168, ["the script was killed by signal 40"])


def test_a_job_stopped_by_hand_tells_where_its_first_rank_was(tmp_path: Path) -> None:
    raised(tmp_path, 1, 10, "KeyboardInterrupt: ")
    raised(tmp_path, 0, 20, "KeyboardInterrupt: ")
    ends = (end(1, -2, 30, asked=True), end(0, -2, 40, asked=True))
    code, lines = shown(tmp_path, *ends, stopped_by=signal.SIGINT)
    assert (code, lines[:2]) == (130, ["stopped by Ctrl-C; rank 0 was here:", "Traceback of rank 0"])
    code, lines = shown(tmp_path, end(0, 0), stopped_by=signal.SIGTERM)
    assert (code, lines) == (143, ["stopped by SIGTERM"])
