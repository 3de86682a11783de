"""A signal announces the end of a job: all processes stop at one step, save, and the next start goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Finished, Running, start
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.preemption import ARMED, WAITING, let_launcher_look, let_signals_differ
from tests.support.ranks import NO_LAUNCHER, RankServer
from tests.support.scripts import run_to_exit
from tests.support.watchdog import peer_store

LONG = 90  # seconds that nothing takes but on a machine with other work; less than a test may take
# A run of 3 epochs of 6 steps on a process, with an evaluation after each and a save in between. Every random
# number counts: shuffled data, and dropout. It can be held at a place until the signal has arrived, which
# comes from outside, or from the ranks themselves.
TRAINING = (
    WAITING
    + """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import PreemptionKwargs, ProjectConfiguration, set_seed

folder, mode, place, how, log = sys.argv[1:]
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True),
    kwargs_handlers=[PreemptionKwargs(save_and_exit=mode == "automatic")],
)
rank, size = accelerator.process_index, accelerator.num_processes
held = False

def hold(here):
    global held
    if here == place and not held:
        held = True
        print(f"held {rank} {os.getpid()}", flush=True)
        name, _, receiver = how.partition(" to ")
        if receiver in ("all", f"rank {rank}"):
            os.kill(os.getpid(), signal.Signals[name])
        wait_until_told()

def check():
    if mode == "asks" and accelerator.should_stop:
        accelerator.save_state()
        accelerator.exit_to_resume()

set_seed(5, device_specific=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.linspace(-1, 1, 12 * 3 * size).reshape(12 * size, 3)
training = DataLoader(TensorDataset(data), batch_size=2, shuffle=True)
testing = DataLoader(TensorDataset(data), batch_size=4)
model, optimizer, training, testing = accelerator.prepare(model, optimizer, training, testing)
accelerator.register_save_state_pre_hook(lambda models, weights, folder: hold("save"))
if accelerator.resume_from:
    accelerator.load_state(accelerator.resume_from)
out = open(f"{log}_{rank}", "a", buffering=1)
for epoch in range(testing.iteration, 3):
    if training.iteration == epoch:  # else the run was stopped after its last step
        for step, (x,) in enumerate(training):
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if epoch == 1 and step == 2:
                    hold("step")
                optimizer.step()
                optimizer.zero_grad()
            out.write(f"{epoch} {x[0, 0].item()} {loss.item().hex()}\\n")
            if epoch == 0 and step == 3:
                accelerator.save_state()
            check()
    model.eval()
    for number, (x,) in enumerate(testing):
        with torch.no_grad():
            accelerator.gather(model(x))
        if epoch == 0 and number == 1:
            hold("evaluation")
        check()
    model.train()
total = sum(p.double().sum() for p in model.parameters()).item()
out.write(f"weights {total.hex()}\\n")
"""
)


def train(size: int, folder: Path, mode: str, place: str) -> Running:
    """Begins the run under the launcher, or goes on with it."""
    args = [str(folder / "run"), mode, place, "a signal from outside", str(folder / "log")]
    return start("--cpu", "-n", str(size), "--resume", "auto", script_text=TRAINING, script_args=args)


def train_on_ranks(
    ranks: RankServer, size: int, folder: Path, mode: str, place: str = "nowhere", how: str = "no signal"
) -> list[tuple[int, str]]:
    """Begins the run or goes on with it on forked ranks; return the exit status and output of each."""
    args = [str(folder / "run"), mode, place, how, str(folder / "log")]
    env = {"ACCELERATE_RESUME": "auto", "ACCELERATE_USE_CPU": "true", **(NO_LAUNCHER if size == 1 else {})}
    return run_to_exit(ranks, size, TRAINING.replace("sys.argv[1:]", repr(args)), folder, env)


def train_to_the_end(ranks: RankServer, size: int, folder: Path, mode: str) -> None:
    ends = train_on_ranks(ranks, size, folder, mode)
    assert [code for code, _ in ends] == [0] * size, ends


def logs(size: int, folder: Path) -> list[list[str]]:
    """Return what each rank wrote: a line per micro-batch."""
    return [(folder / f"log_{rank}").read_text().splitlines() for rank in range(size)]


def pids(running: Running, size: int) -> list[int]:
    """The processes of the ranks, once all are held."""
    for rank in range(size):
        running.wait_for(f"held {rank} ", LONG)
    found = dict(re.findall(r"held (\d+) (\d+)", running.text()))
    return [int(found[str(rank)]) for rank in range(size)]


@pytest.fixture(scope="module")
def undisturbed(
    ranks: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[list[str]]]:
    """Return what the ranks write in a run without a signal, by world size."""
    known: dict[int, list[list[str]]] = {}

    def run(size: int) -> list[list[str]]:
        if size not in known:
            folder = tmp_path_factory.mktemp("whole")
            train_to_the_end(ranks, size, folder, "asks")
            known[size] = logs(size, folder)
        return known[size]

    return run


def asks_for_another_start(done: Finished, size: int, code: int = 75) -> None:
    assert done.returncode == code, done.output
    assert "Traceback" not in done.stderr, done.output
    said = f"accelerate launch: stopped to be resumed (exit code {code})"
    assert (said in done.stderr) == (size > 1)  # alone the launcher is the script
    assert done.survivors(5) == []


def stopped_once(size: int, folder: Path, whole: list[list[str]]) -> None:
    """Every rank has stopped after the same step, and the checkpoints are those of one stop."""
    first = logs(size, folder)
    assert len({len(lines) for lines in first}) == 1
    assert 0 < len(first[0]) < len(whole[0])
    assert len(first[0]) % 2 == 0  # no window was open
    saved = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert saved == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.parametrize(
    ("size", "mode", "place", "how"),
    [
        (1, "asks", "step", "SIGTERM to all"),
        (1, "automatic", "save", "SIGUSR1 to all"),
        (2, "asks", "evaluation", "SIGUSR1 to all"),
        (2, "asks", "save", "SIGTERM to rank 1"),
        (2, "automatic", "step", "SIGTERM to all"),
        (2, "automatic", "evaluation", "SIGUSR1 to rank 0"),
    ],
)
def test_one_checkpoint_and_the_run_goes_on_as_if_nothing_had_been(
    undisturbed: Callable[[int], list[list[str]]],
    ranks: RankServer,
    tmp_path: Path,
    size: int,
    mode: str,
    place: str,
    how: str,
) -> None:
    """D12: the signal arrives in a step, an evaluation or a save; D11: the two parts are the whole.

    No launcher takes part, but there are torchrun's variables.
    """
    ends = train_on_ranks(ranks, size, tmp_path, mode, place, how)
    assert [code for code, _ in ends] == [75] * size, ends
    assert not any("Traceback" in output for _, output in ends)
    stopped_once(size, tmp_path, undisturbed(size))
    train_to_the_end(ranks, size, tmp_path, mode)
    assert logs(size, tmp_path) == undisturbed(size)


@pytest.mark.parametrize(
    ("size", "mode", "place", "how"),
    [
        long_run_param(1, "asks", "step", "SIGTERM to the launcher"),
        long_run_param(1, "automatic", "save", "SIGUSR1 to the launcher"),
        (2, "asks", "evaluation", "SIGUSR1 to the launcher"),
        long_run_param(2, "asks", "save", "SIGTERM to rank 1"),
        long_run_param(2, "automatic", "step", "SIGTERM to the launcher"),
        long_run_param(2, "automatic", "evaluation", "SIGUSR1 to rank 0"),
    ],
)
def test_the_launcher_hands_the_signal_on_and_asks_for_another_start(
    undisturbed: Callable[[int], list[list[str]]],
    ranks: RankServer,
    tmp_path: Path,
    size: int,
    mode: str,
    place: str,
    how: str,
) -> None:
    """D12 as a user launches it."""
    running = train(size, tmp_path, mode, place)
    processes = pids(running, size)
    number, _, where = how.partition(" to ")
    to = running.pid if where == "the launcher" else processes[int(where[-1])]
    os.kill(to, signal.Signals[number])
    asks_for_another_start(running.wait(LONG), size)
    stopped_once(size, tmp_path, undisturbed(size))
    if size == 1:
        done = train(size, tmp_path, mode, "nowhere").wait(LONG)
        assert done.returncode == 0, done.output
    else:
        train_to_the_end(ranks, size, tmp_path, mode)
    assert logs(size, tmp_path) == undisturbed(size)


# ---------------------------------------------------------------- what ends at once

STUCK = (
    WAITING
    + """
import ctypes, os, sys, threading, time
import torch
from accelerate import Accelerator
accelerator = Accelerator()
accelerator.should_stop
def tell():
    wait_until_told()
    print("heard", accelerator.process_index)
threading.Thread(target=tell, daemon=True).start()
print("ready", accelerator.process_index)
if accelerator.process_index == 0:
    torch.distributed.barrier()  # in C code, and nobody comes
while True:
    ctypes.CDLL(None).pause()
"""
)


def ready(text: str, *flags: str) -> Running:
    """Two ranks that have said that they are ready."""
    running = start("--cpu", "-n", "2", *flags, script_text=text)
    running.wait_for("ready 0", LONG)
    running.wait_for("ready 1", LONG)
    return running


def test_a_second_signal_ends_a_job_that_does_not_come_to_a_boundary() -> None:
    """D12, F8: the first one waits for as long as it takes."""
    running = ready(STUCK)
    running.signal(signal.SIGTERM)
    running.wait_for("heard 0", LONG)
    running.wait_for("heard 1", LONG)
    let_signals_differ()
    running.signal(signal.SIGTERM)
    result = running.wait(LONG)
    assert result.returncode == 143, result.output
    assert "stopped by SIGTERM" in result.stderr
    assert not result.survivors()


def test_the_time_of_those_who_stop_by_themselves_can_be_limited() -> None:
    running = ready(f"{ARMED}\ntime.sleep(600)", "--preemption_grace", "0.5", "--stop_timeout", "0.5")
    running.signal(signal.SIGTERM)
    result = running.wait(LONG)
    assert result.returncode == 143, result.output
    assert not result.survivors()


def test_ctrl_c_is_no_preemption() -> None:
    """F8: nobody waits for a boundary."""
    deaf = f"{ARMED}\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', rank)\ntime.sleep(600)"
    running = ready(deaf, "--stop_timeout", "0.5")
    for rank in range(2):
        running.wait_for(f"deaf {rank}", LONG)
    running.interrupt()
    result = running.wait(LONG)
    assert result.returncode == 130, result.output
    assert not result.survivors()


def test_a_failing_job_does_not_wait_for_boundaries() -> None:
    """A rank that would take SIGTERM for the end of a good job is not asked by a job that fails."""
    fails = f"{ARMED}\nif rank == '1':\n    time.sleep(0.2)\n    os._exit(3)\ntime.sleep(600)"
    result = ready(fails, "--stop_timeout", "600").wait(LONG)
    assert result.returncode == 3, result.output
    assert not result.survivors()


WAITS = f"{ARMED}\nwhile not heard:\n    time.sleep(0.01)\n"


def test_a_graceful_stop_is_remembered_when_its_folder_is_cleaned_away() -> None:
    """After some days in /tmp. The save takes longer than ranks get that have announced nothing."""
    text = f"print('folder', os.environ['ACCELERATE_STOP_FOLDER'], flush=True)\n{WAITS}"
    running = ready(f"import os\n{text}time.sleep(1.5)\nsys.exit(75)", "--stop_timeout", "0.3")
    let_launcher_look()
    folder = next(line for line in running.text().splitlines() if line.startswith("folder "))
    shutil.rmtree(folder.removeprefix("folder "))
    running.signal(signal.SIGTERM)
    result = running.wait(LONG)
    assert result.returncode == 75, result.output


def test_a_save_that_fails_is_a_failure() -> None:
    """Its own code and traceback, not those of the signal."""
    running = ready(f"{WAITS}raise OSError('the disk is full')")
    running.signal(signal.SIGTERM)
    result = running.wait(LONG)
    assert result.returncode == 1, result.output
    assert result.stderr.endswith("OSError: the disk is full\n")


def test_a_script_that_ends_well_after_the_signal_has_ended_well() -> None:
    """The code is the script's."""
    running = ready(WAITS)
    running.signal(signal.SIGTERM)
    result = running.wait(LONG)
    assert (result.returncode, "accelerate launch" in result.stderr) == (0, False), result.output


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise OSError('the disk is full')", 1)])
def test_a_script_that_has_been_asked_to_stop_ends_with_its_own_code(
    ranks: RankServer, tmp_path: Path, end: str, code: int
) -> None:
    asked = """
        import os, signal, time
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        if not accelerator.should_stop and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while not accelerator.should_stop:
            time.sleep(0.01)
    """
    ends = run_to_exit(ranks, 2, textwrap.dedent(asked) + end, tmp_path)
    assert [found for found, _ in ends] == [code] * 2, ends
    assert all(("OSError: the disk is full" in output) == bool(code) for _, output in ends)


def test_a_rank_that_fails_does_not_leave_the_others_waiting_for_agreement(
    ranks: RankServer, tmp_path: Path
) -> None:
    """D12, C3: rank 0 waits for a word of rank 1, which never asks and raises."""
    disagrees = (
        WAITING
        + """
import os, signal
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.process_index == 1:
    wait_until_asked(0)
    raise ValueError("a bad batch")
accelerator.should_stop
os.kill(os.getpid(), signal.SIGUSR1)
while not accelerator.should_stop:
    time.sleep(0.01)
"""
    )
    (first, told), (second, raised) = run_to_exit(ranks, 2, disagrees, tmp_path)
    assert (first, second) == (1, 1)
    assert "PeerError: rank 1 failed" in told, told
    assert raised.endswith("ValueError: a bad batch\n")


# ---------------------------------------------------------------- who asks, and how often


def steps(every: tuple[int, ...]) -> int:
    """Steps with a collective in each; rank r asks in every ``every[r]``-th. Returns how many were begun."""
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator()
    own = every[accelerator.process_index]
    for step in range(1, 100_000):
        accelerator.gather(torch.ones(1))
        if step == 7 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step % own == 0 and accelerator.should_stop:
            assert accelerator.should_stop
            accelerator.wait_for_everyone()
            return step
    return 0


def test_a_signal_to_one_stops_all_at_one_step(ranks: RankServer) -> None:
    """D12: also where a collective holds them together in every step."""
    (step,) = set(ranks(3, steps, (1, 1, 1)))
    assert step >= 7


def test_ranks_that_do_not_ask_equally_often_are_told(ranks: RankServer) -> None:
    outcomes = ranks.outcomes(2, steps, (1, 2), grace=30)
    assert [outcome.kind for outcome in outcomes] == ["CollectiveError"] * 2
    assert "should_stop at test_preemption.py" in outcomes[0].message
    assert "gather at test_preemption.py" in outcomes[0].message


def one_ends_early() -> int:
    """Rank 1 has nothing left to do when the signal comes; rank 0 goes on alone."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert not accelerator.should_stop
    if accelerator.process_index == 1:
        accelerator.end_training()
        return 0
    assert peer_store().wait(["ended/1"], 30)
    os.kill(os.getpid(), signal.SIGTERM)
    asked = 0
    while not accelerator.should_stop:
        asked += 1
    return 1


def test_who_has_ended_does_not_hold_the_others_up(ranks: RankServer) -> None:
    assert ranks(2, one_ends_early) == [1, 0]


def with_workers() -> list[Any]:
    """A loader's workers while signals come: to a worker, and to the whole group of processes."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator
    from accelerate.utils import PreemptionKwargs

    accelerator = Accelerator(kwargs_handlers=[PreemptionKwargs()])
    data = TensorDataset(torch.arange(64.0))
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=2))
    told, number = [], 0
    for number, _ in enumerate(loader):
        if number == 1:
            for process in torch.multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGUSR1)
        if number == 3:
            told.append(accelerator.should_stop)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not accelerator.should_stop:
        pass
    return [*told, number]


def test_workers_of_loaders_survive_a_user_signal(ranks: RankServer) -> None:
    """Schedulers signal every process of a job; torch's loader would report a dead worker as an error."""
    assert ranks(2, with_workers) == [[False, 15]] * 2


def in_a_thread() -> str:
    """A rank that asks in another thread cannot catch signals, and hears of them from the others."""
    import threading
    import warnings

    from accelerate import Accelerator

    accelerator, said = Accelerator(), []
    if accelerator.process_index == 0:
        assert not accelerator.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        while not accelerator.should_stop:
            pass
        return ""

    def ask() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not accelerator.should_stop:
                pass
            said.extend(str(each.message) for each in caught)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    (line,) = said
    return line


def test_only_the_main_thread_catches_signals(ranks: RankServer) -> None:
    first, second = ranks(2, in_a_thread)
    assert first == ""
    assert second.startswith("signals are not caught in this process")


@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_torchruns_ranks_stop_together_too() -> None:
    """A rank of another launcher exits with the code; what that launcher makes of it is its own affair."""
    running = Running(
        [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node=2"],
        script_text="""
            import os, time
            from accelerate import Accelerator
            accelerator = Accelerator(cpu=True)
            accelerator.should_stop
            # One write for each line: torchrun starts Python unbuffered, so the parts of a print would mix.
            print(f"ready {accelerator.process_index} {os.getpid()}\\n", end="", flush=True)
            while not accelerator.should_stop:
                time.sleep(0.01)
            print(f"stopped {accelerator.process_index}\\n", end="", flush=True)
            accelerator.exit_to_resume()
        """,
    )
    running.wait_for("ready 0 ", LONG)
    running.wait_for("ready 1 ", LONG)
    os.kill(int(re.findall(r"ready 1 (\d+)", running.text())[0]), signal.SIGTERM)
    result = running.wait(LONG)
    assert sorted(re.findall("stopped .", result.stdout)) == ["stopped 0", "stopped 1"]
    assert "75" in result.stderr
