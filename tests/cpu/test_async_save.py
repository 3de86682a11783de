"""Saving in the background: what is saved, when it is committed, and who hears of a failure."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any, BinaryIO

import psutil
import pytest
import torch

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.checkpoint import async_save, discovery
from accelerate.checkpoint.storage import FileRecord, LocalCheckpointStorage
from accelerate.core.errors import CheckpointError
from accelerate.utils import PreemptionKwargs, ProjectConfiguration
from accelerate.world import watchdog
from tests.support.command import launch, start
from tests.support.long_run import select_cases
from tests.support.ranks import NO_LAUNCHER, RanksError, RankServer, same_on_all
from tests.support.scripts import run_to_exit

WRITE = LocalCheckpointStorage.write
go = threading.Event()
Fill = Callable[[BinaryIO], object]


def write_when_released(store: LocalCheckpointStorage, name: str, fill: Fill) -> FileRecord:
    """Writes no file before it is let go."""
    assert go.wait(30)
    return WRITE(store, name, fill)


def fail_to_write(store: LocalCheckpointStorage, name: str, fill: Fill) -> FileRecord:
    """A disk that is full."""

    def full(file: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    return WRITE(store, name, full)


def deadly(store: LocalCheckpointStorage, name: str, fill: Fill) -> FileRecord:
    """Kills its process when it has written something; a worker that it has forked lives on."""
    WRITE(store, name, fill)
    if os.fork() == 0:
        os.setsid()  # the group of a rank that has died is killed
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def on(write: Callable[..., FileRecord], patch: pytest.MonkeyPatch) -> None:
    """Lets ``save_state`` write so."""
    patch.setattr(LocalCheckpointStorage, "write", write)


class Average:
    """Weights averaged over steps, as users keep them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model: torch.nn.Module) -> None:
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 0.5)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.shadow[name].copy_(value)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 64)


class TrainingRun:
    """A loop with everything that is saved."""

    def __init__(
        self, folder: str, seconds: float = 30, handlers: Sequence[Any] = (), **project: Any
    ) -> None:
        torch.manual_seed(0)
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **project)
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))
        self.accelerator = Accelerator(cpu=True, project_config=config, kwargs_handlers=[group, *handlers])
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.average = Average(model)
        self.accelerator.register_for_checkpointing(self.average)
        self.batches = iter(self.loader)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.accelerator.backward(self.model(next(self.batches)).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.update(self.accelerator.unwrap_model(self.model))
            random.random()

    def values(self) -> Any:
        """All that a checkpoint must bring back, without drawing."""
        return pickle.loads(
            pickle.dumps(
                (
                    self.accelerator.unwrap_model(self.model).state_dict(),
                    self.optimizer.state_dict()["state"],
                    self.scheduler.state_dict(),
                    self.average.shadow,
                    torch.get_rng_state(),
                    random.getstate(),
                    self.loader.state_dict(),
                )
            )
        )


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


# ---------------------------------------------------------------- the values at the call


def train_on(folder: str) -> tuple[bool, str, str, list[str]]:
    patch = pytest.MonkeyPatch()
    on(write_when_released, patch)
    run = TrainingRun(folder, async_save=True)
    run.train(3)
    saved = run.values()
    path = run.accelerator.save_state()
    run.train(3)  # with collectives of its own, while nothing can be written
    assert not equal(saved[0], run.values()[0])
    threads = [thread.name for thread in threading.enumerate() if thread.name == "accelerate-save"]
    assert not Path(path).exists()
    go.set()
    waited = run.accelerator.wait_for_checkpoint()
    listed = sorted(os.listdir(path))
    fresh = TrainingRun(folder)
    fresh.accelerator.load_state(path)
    return equal(fresh.values(), saved), str(path), str(waited), listed + threads


@pytest.mark.parametrize("n", [1, 2])
def test_the_checkpoint_has_the_values_at_the_call(ranks: RankServer, tmp_path: Path, n: int) -> None:
    """D10: weights, moments, scheduler, averages, random states, position; training went on meanwhile."""
    for same, path, waited, listed in ranks(n, train_on, str(tmp_path)):
        assert same
        assert path == waited == str(tmp_path / "checkpoints/checkpoint_0")
        assert "accelerate-save" in listed
        assert f"random_states_{n - 1}.pkl" in listed


def several(folder: str) -> list[Any]:
    run = TrainingRun(folder, total_limit=2)
    accelerator, told = run.accelerator, []
    for _ in range(3):
        run.train(1)
        accelerator.save_state(async_save=True)  # each waits for the one before
        told.append(accelerator.save_iteration)
    loaded = accelerator.load_state()  # and so does a load
    told += [Path(loaded.path).name, accelerator.wait_for_checkpoint()]
    run.train(1)
    accelerator.save_state(async_save=True)
    accelerator.free_memory()
    told.append(sorted(os.listdir(Path(folder, "checkpoints"))))
    accelerator.save_state(async_save=True)
    accelerator.end_training()
    told.append(sorted(os.listdir(Path(folder, "checkpoints"))))
    return told


def test_one_is_written_at_a_time(ranks: RankServer, tmp_path: Path) -> None:
    """Numbered at the call; removed after the commit; a load right after it sees it."""
    told, other = ranks(2, several, str(tmp_path))  # rank 0 removes, while the other looks
    assert told[:5] == other[:5]
    assert told == [
        *(1, 2, 3, "checkpoint_2", None),
        ["checkpoint_2", "checkpoint_3"],
        ["checkpoint_3", "checkpoint_4"],
    ]  # fmt: skip


# ---------------------------------------------------------------- failures


def text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def fail(folder: str, victim: int, caller: str) -> tuple[str, str]:
    run = TrainingRun(folder)
    accelerator = run.accelerator
    accelerator.save_state()
    with pytest.MonkeyPatch.context() as patch:
        if accelerator.process_index == victim:
            on(fail_to_write, patch)
        accelerator.save_state(async_save=True)
        async_save.join()
    text = text_of(getattr(accelerator, caller))
    if caller == "end_training":
        return text, ""
    path = str(accelerator.load_state().path)
    accelerator.save_state(async_save=True)  # all is in order afterwards
    accelerator.wait_for_checkpoint()
    return text, path


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("caller", ["save_state", "load_state", "wait_for_checkpoint"])
def test_a_failure_is_raised_by_the_next_call_on_all_ranks(
    ranks: RankServer, tmp_path: Path, caller: str, victim: int
) -> None:
    text, path = same_on_all(ranks(2, fail, str(tmp_path), victim, caller))
    assert text.startswith("BackgroundSaveError: saving ")
    assert "checkpoint_1 in the background failed" in text
    assert f"rank {victim} of 2: " in text
    assert "No space left on device" in text
    assert path == str(tmp_path / "checkpoints/checkpoint_0")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_2"]


def test_the_end_of_the_training_raises_too(ranks: RankServer, tmp_path: Path) -> None:
    text, _ = same_on_all(ranks(2, fail, str(tmp_path), 1, "end_training"))
    assert "No space left on device" in text
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def fail_in_process_of_multiprocessing(folder: str) -> int | None:
    def save() -> None:
        on(fail_to_write, pytest.MonkeyPatch())
        TrainingRun(folder).accelerator.save_state(async_save=True)

    process = multiprocessing.get_context("fork").Process(target=save)
    process.start()
    process.join()
    return process.exitcode


def test_a_process_of_multiprocessing_fails_with_its_last_save(ranks: RankServer, tmp_path: Path) -> None:
    """It ends without the functions of atexit: nobody heard of the failure."""
    [outcome] = ranks.outcomes(1, fail_in_process_of_multiprocessing, str(tmp_path), env=NO_LAUNCHER)
    assert pickle.loads(outcome.value or b"") == async_save.FAILED, outcome
    assert "checkpoint_0 in the background failed" in outcome.output
    assert os.listdir(tmp_path / "checkpoints") == []


def stopped_after_a_failure(folder: str) -> tuple[int | str | None, list[str]]:
    """Rank 1 gets the signal to stop when the save in the background has failed."""
    run = TrainingRun(folder, handlers=[PreemptionKwargs(save_and_exit=True)])
    with pytest.MonkeyPatch.context() as patch:
        on(fail_to_write, patch)
        run.accelerator.save_state(async_save=True)
        async_save.join()
    if run.accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    with warnings.catch_warnings(record=True) as caught:
        try:
            while True:
                run.train(1)
                run.batches = iter(run.loader)
        except SystemExit as end:
            return end.code, [str(each.message) for each in caught]


def test_the_save_before_the_end_of_a_job_is_made_after_one_that_failed(
    ranks: RankServer, tmp_path: Path
) -> None:
    """Nobody could call it again: the next start would go on from an older checkpoint."""
    (code, said), (other_code, _) = ranks(2, stopped_after_a_failure, str(tmp_path))
    assert code == other_code == 75
    assert any("checkpoint_0 in the background failed" in text for text in said)
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1"]


def heard_on_one_rank_only(folder: str) -> str:
    run = TrainingRun(folder)
    with pytest.MonkeyPatch.context() as patch:
        on(fail_to_write, patch)
        run.accelerator.save_state(async_save=True)
        async_save.join()
    if run.accelerator.is_main_process:
        assert text_of(run.accelerator.wait_for_checkpoint) != "fine"
    return text_of(run.accelerator.save_state)


def test_a_failure_that_one_rank_has_heard_of_is_still_raised_together(
    ranks: RankServer, tmp_path: Path
) -> None:
    text = same_on_all(ranks(2, heard_on_one_rank_only, str(tmp_path)))
    assert "No space left on device" in text


def be_killed(folder: str) -> str:
    run = TrainingRun(folder)
    run.accelerator.save_state()
    patch = pytest.MonkeyPatch()
    if run.accelerator.process_index == 1:
        on(deadly, patch)
    run.accelerator.save_state(async_save=True)
    return text_of(run.accelerator.wait_for_checkpoint)


def test_a_killed_rank_is_missed_and_the_checkpoint_before_is_whole(
    ranks: RankServer, tmp_path: Path
) -> None:
    """D1: with SIGKILL, while both write in the background."""
    zero, one = ranks.outcomes(2, be_killed, str(tmp_path), grace=30)
    assert "SIGKILL" in one.message
    assert zero.value is not None, zero
    assert "rank 1 is gone" in pickle.loads(zero.value)
    newest, _ = discovery.latest_checkpoint(tmp_path / "checkpoints")
    assert newest.name.endswith("checkpoint_0")


def save_late(folder: str) -> str:
    run = TrainingRun(folder, seconds=5)
    patch = pytest.MonkeyPatch()
    if run.accelerator.process_index == 1:
        on(write_when_released, patch)
    run.accelerator.save_state(async_save=True)
    return text_of(run.accelerator.wait_for_checkpoint) if run.accelerator.is_main_process else ""


def leaves_at_once(folder: str) -> str | None:
    """Rank 1 is slow to read that all have committed; rank 0, which holds the store, ends right after."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    read = socket.socket.recv_into

    def slowly(endpoint: socket.socket, *args: Any) -> int:
        if threading.current_thread().name == "accelerate-save":
            threading.Event().wait(0.2)
        return read(endpoint, *args)

    with pytest.MonkeyPatch.context() as patch:
        if accelerator.process_index == 1:
            patch.setattr(socket.socket, "recv_into", slowly)
        accelerator.save_state(folder, async_save=True)
        path = accelerator.wait_for_checkpoint()
    if accelerator.process_index == 0:
        os._exit(0)
    return str(path)


def test_a_rank_that_ends_after_the_commit_leaves_no_other_in_doubt(
    ranks: RankServer, tmp_path: Path
) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, leaves_at_once, f"{tmp_path}/a", grace=30)
    assert [outcome.status for outcome in caught.value.outcomes] == ["died", "returned"]
    assert pickle.loads(caught.value.outcomes[1].value or b"") == f"{tmp_path}/a"


def test_a_rank_that_does_not_come_is_not_waited_for_forever(ranks: RankServer, tmp_path: Path) -> None:
    """C9"""
    zero, _ = ranks.outcomes(2, save_late, str(tmp_path), grace=30)
    assert zero.value is not None, zero
    assert "rank 1 was not ready within 5 s" in pickle.loads(zero.value)


# ---------------------------------------------------------------- the end of a script

SCRIPT = """
    import os, sys, threading
    import torch
    from accelerate import Accelerator
    from accelerate.checkpoint.storage import LocalCheckpointStorage

    write, ends = LocalCheckpointStorage.write, threading.Event()

    def slow(self, name, fill):
        assert ends.wait(30)
        if {full}:
            raise OSError(28, "No space left on device")
        return write(self, name, fill)

    LocalCheckpointStorage.write = slow
    accelerator = Accelerator(cpu=True)
    model, optimizer = torch.nn.Linear(2, 2), None
    model = accelerator.prepare(model)
    accelerator.save_state({folder!r}, async_save=True)
    assert not os.path.exists({folder!r})
    threading._register_atexit(ends.set)  # nothing is written before the interpreter begins to exit
    {end}
"""


def script(folder: Path, end: str = "", *, full: bool = False) -> str:
    return SCRIPT.format(folder=str(folder), end=end, full=full)


ENDS = {"": 0, "raise ZeroDivisionError('mine')": 1, "sys.exit(3)": 3}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("n", [1, 2])
def test_ranks_that_end_have_saved(
    ranks: RankServer, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, n: int, end: str
) -> None:
    """D10: exit right after the call, by whatever way."""
    folder = tmp_path / "c"
    ended = run_to_exit(ranks, n, dedent(script(folder, end)), tmp_path_factory.mktemp("script"))
    assert [code for code, _ in ended] == [ENDS[end]] * n, ended
    assert (folder / "manifest.json").exists(), ended
    assert all(("ZeroDivisionError: mine" in output) == (ENDS[end] == 1) for _, output in ended)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("n", "end", "code"),
    select_cases(
        [(n, end, code) for n in (1, 2) for end, code in ENDS.items()],
        [(1, "sys.exit(3)", 3)],
    ),
)
def test_a_script_that_ends_has_saved(tmp_path: Path, n: int, end: str, code: int) -> None:
    """D10, in processes of its own."""
    folder = tmp_path / "c"
    ended = launch("--cpu", "--num_processes", str(n), script_text=script(folder, end))
    assert ended.returncode == code, ended.output
    assert (folder / "manifest.json").exists(), ended.output
    assert ("ZeroDivisionError: mine" in ended.stderr) == (code == 1)
    assert os.listdir(tmp_path) == ["c"]
    assert not ended.survivors()


def test_a_failure_that_nobody_heard_of_is_said_at_the_exit(
    ranks: RankServer, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    text = dedent(script(tmp_path / "c", full=True))
    ((code, output),) = run_to_exit(ranks, 1, text, tmp_path_factory.mktemp("script"))
    assert code == async_save.FAILED
    assert "BackgroundSaveError: saving" in output
    assert "No space left on device" in output
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
    import threading
    from accelerate import Accelerator
    from accelerate.checkpoint.storage import LocalCheckpointStorage

    ready = threading.Event()

    def held(self, name, fill):
        ready.wait()
        print("writing", flush=True)
        threading.Event().wait()

    LocalCheckpointStorage.write = held
    accelerator = Accelerator(cpu=True)
    accelerator.save_state({folder!r}, async_save=True)
    threading._register_atexit(lambda: print("exits", flush=True))
    ready.set()
    threading.Event().wait()
"""


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    script = INTERRUPTED.format(folder=str(tmp_path / "c"))
    running = start("--cpu", "--num_processes", "1", script_text=script)
    running.wait_for("writing")
    running.signal(signal.SIGINT)
    running.wait_for("exits")
    running.signal(signal.SIGINT)
    assert running.wait().returncode != 0
    assert not (tmp_path / "c").exists()


def count_store_connections() -> int:
    """The connections of this rank to the store, which rank 0 hosts."""
    port = int(os.environ["MASTER_PORT"])
    ends = psutil.Process().net_connections("tcp")
    return sum(end.status == "ESTABLISHED" and end.raddr.port == port for end in ends)


def save_three_times(folder: str) -> tuple[list[int], list[int]]:
    accelerator = Accelerator(project_config=ProjectConfiguration(async_save=True))
    accelerator.prepare(torch.nn.Linear(2, 2))
    counts, keys = [count_store_connections()], list[int]()
    watch = watchdog.current()
    assert watch is not None
    for number in range(3):
        accelerator.save_state(f"{folder}/{number}")
        accelerator.wait_for_checkpoint()
        counts.append(count_store_connections())
        keys.append(watch.store.group_store.num_keys())
    return counts, keys


def test_saves_open_no_connections_to_the_store(ranks: RankServer, tmp_path: Path) -> None:
    """At rank 0 each is a file descriptor: a thousand ranks would open a thousand at each save."""
    of_ranks = ranks(2, save_three_times, str(tmp_path))
    for counts, _ in of_ranks:
        assert 0 < counts[0] < 5
        assert len(set(counts)) == 1, counts
    keys = of_ranks[0][1]  # where rank 0 has come back, the others have left the save
    # A save has a key for each rank at least; the watchdog may have written another one meanwhile.
    assert keys[-1] - keys[0] < 2, "keys of each save stay in the store"
