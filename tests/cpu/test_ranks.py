"""The ``ranks`` fixture itself: what every multi-process test rests on."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.environment import clean
from tests.support.ranks import RanksError, RankServer, same_on_all

# What the rank server imports once for this module.
PRELOAD = ("wave",)


def identity(extra: str) -> tuple[str, int, str]:
    return os.environ["RANK"], os.getpid(), extra


def all_reduce() -> tuple[float, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def only_open() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(0.3)  # rank 0, which hosts the store, has returned long before
        dist.new_group([0, 1])
    else:
        dist.new_group([0, 1])
    return dist.get_world_size()


def has_imported(module: str) -> bool:
    return module in sys.modules


def environment() -> dict[str, str]:
    return dict(os.environ)


def fail_on_one(rank: int) -> str:
    print("spoken before the failure")
    me = int(os.environ["RANK"])
    if me == rank:
        expected = 3
        assert me == expected
    return "fine"


def fail_in_turn() -> None:
    me = int(os.environ["RANK"])
    time.sleep(0.2 * (2 - me))
    raise ValueError(f"reason of rank {me}")


def fail_while_peer_waits() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("the real reason")
    wait_for_nothing()


def wait_for_nothing() -> None:
    time.sleep(100)


def hang_in_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        wait_for_nothing()
    dist.all_reduce(torch.zeros(1))


def die() -> None:
    os.kill(os.getpid(), 9)


def leave_silently() -> None:
    if os.environ["RANK"] == "0":
        os._exit(0)
    wait_for_nothing()


def return_unpicklable() -> object:
    return lambda: None


def leave_processes_behind() -> list[int]:
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    same_group = subprocess.Popen(command)
    own_session = subprocess.Popen(command, start_new_session=True)
    return [same_group.pid, own_session.pid]


def set_module_state() -> int:
    import torch

    torch.manual_seed(int(torch.initial_seed() == 5) + 5)
    return torch.initial_seed()


def test_results_come_in_rank_order_from_separate_processes(ranks: RankServer) -> None:
    results = ranks(3, identity, "x")
    assert [(rank, extra) for rank, _, extra in results] == [("0", "x"), ("1", "x"), ("2", "x")]
    assert len({pid for _, pid, _ in results} | {os.getpid()}) == 4


@pytest.mark.parametrize("n", [2, 4])
def test_all_reduce_over_gloo(ranks: RankServer, n: int) -> None:
    threads = int(clean()["OMP_NUM_THREADS"])
    assert same_on_all(ranks(n, all_reduce)) == (n * (n + 1) / 2, threads)


def test_a_rank_that_returns_early_does_not_disturb_the_others(ranks: RankServer) -> None:
    assert ranks(2, only_open) == [2, 2]


def test_ranks_see_a_clean_environment(ranks: RankServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "SLURM_JOB_ID", "FSDP_VERSION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    zero, one = ranks(2, environment, env={"MINE": "yes", "LANG": None})
    assert not [name for name in zero if name.startswith(("ACCELERATE_", "SLURM_", "FSDP_", "TORCHELASTIC_"))]
    assert zero["MINE"] == "yes"
    assert "LANG" not in zero
    assert {n for n in zero if zero[n] != one.get(n)} == {"RANK", "LOCAL_RANK"}
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert {name: one[name] for name in expected} == expected


def test_devices_are_given_rank_by_rank(ranks: RankServer) -> None:
    seen = ranks(2, environment, devices=["cpu", "meta"])
    assert [e["ACCELERATE_TORCH_DEVICE"] for e in seen] == ["cpu", "meta"]
    with pytest.raises(ValueError, match="1 devices for 2 ranks"):
        ranks(2, environment, devices=["cpu"])


def test_no_state_goes_from_one_call_to_the_next(ranks: RankServer) -> None:
    assert ranks(1, set_module_state) == ranks(1, set_module_state) == [5]


def test_a_module_names_what_its_ranks_have_imported(
    ranks: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PRELOAD`` is imported once for the tests of a module, and not for those of another one."""
    assert ranks(1, has_imported, "wave") == [True]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/cpu/test_exit.py::test_of_another_module (call)")
    assert ranks(1, has_imported, "wave") == [False]


def test_a_failing_rank_shows_its_traceback_values_and_output(ranks: RankServer) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, fail_on_one, 1)
    text = str(caught.value)
    assert text.startswith("1 of 2 ranks failed: 1\n----- rank 1 raised AssertionError -----")
    assert "assert me == expected" in text
    assert "expected = 3" in text
    assert "spoken before the failure" in text
    assert caught.value.kinds() == ["", "AssertionError"]


def test_all_tracebacks_are_shown_the_first_failure_first(ranks: RankServer) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(3, fail_in_turn)
    text = str(caught.value)
    places = [text.index(f"ValueError: reason of rank {rank}") for rank in (2, 1, 0)]
    assert places == sorted(places)
    assert [o.message for o in caught.value.outcomes] == [f"reason of rank {rank}" for rank in range(3)]


def test_a_peer_of_a_failed_rank_is_stopped_soon_and_shows_where_it_was(ranks: RankServer) -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        ranks(2, fail_while_peer_waits)
    assert time.monotonic() - start < 15
    text = str(caught.value)
    assert text.index("KeyError: 'the real reason'") < text.index("in wait_for_nothing")
    assert [o.status for o in caught.value.outcomes] == ["stopped", "raised"]


def test_a_hang_ends_with_the_stacks_of_every_rank(ranks: RankServer) -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        ranks(2, hang_in_collective, timeout=3)
    assert 3 <= time.monotonic() - start < 15
    zero, one = caught.value.outcomes
    assert "2 of 2 ranks did not end within 3 s" in str(caught.value)
    assert "in wait_for_nothing" in zero.stacks
    assert "in all_reduce" in one.stacks
    assert zero.stacks in str(caught.value)
    assert not ranks.survivors()


def test_a_killed_rank_and_one_that_leaves_are_named(ranks: RankServer) -> None:
    with pytest.raises(RanksError, match="rank 0 died -----\nkilled by SIGKILL"):
        ranks(1, die)
    with pytest.raises(RanksError, match="left with exit status 0 before its function returned"):
        ranks(2, leave_silently)


def test_an_unpicklable_result_is_a_clear_error(ranks: RankServer) -> None:
    with pytest.raises(RanksError, match="the function that this rank returned cannot be pickled"):
        ranks(1, return_unpicklable)


def test_a_function_made_inside_another_is_refused(ranks: RankServer) -> None:
    with pytest.raises(TypeError, match="top-level function"):
        ranks(1, lambda: None)


def test_no_process_is_left(ranks: RankServer) -> None:
    left = [pid for pids in ranks(2, leave_processes_behind) for pid in pids]
    assert len(left) == 4
    assert not [pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not ranks.survivors()


def test_the_server_is_started_again_when_it_dies(ranks: RankServer) -> None:
    ranks(1, environment)
    assert ranks.pid is not None
    psutil.Process(ranks.pid).kill()
    psutil.Process(ranks.pid).wait(10)
    assert len(ranks(1, environment)) == 1


def test_same_on_all_tells_the_ranks_that_differ() -> None:
    import torch

    assert same_on_all([{"a": torch.ones(2)}, {"a": torch.ones(2)}])["a"].sum() == 2
    with pytest.raises(AssertionError, match=r"ranks \[2\] differ"):
        same_on_all([1, 1, 2])
    with pytest.raises(AssertionError, match=r"ranks \[1\] differ"):
        same_on_all([[torch.ones(2)], [torch.ones(2, dtype=torch.float64)]])


def test_a_warm_call_is_quick(ranks: RankServer, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2, all_reduce)
    start = time.perf_counter()
    ranks(2, all_reduce)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f" [two ranks and a gloo group: {seconds * 1000:.0f} ms] ", end="")
    assert seconds < 10  # far above what it takes; a cold start per rank would not fit
