"""When a rank fails, a user gives up, or the launcher is killed: what is said, and that nothing is left."""

from __future__ import annotations

import re
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

from accelerate.core.errors import SettingError, nearest, trim_traceback
from accelerate.utils import PreemptionKwargs
from tests.support.command import Running, launch, start
from tests.support.long_run import long_run_param

TWO = ("--cpu", "-n", "2")
HEAD = """
import os, signal, subprocess, sys, threading, time
rank = int(os.environ.get("RANK", 0))
"""
# The other rank would work for ever.
FAILS = (
    HEAD
    + """
if rank == 1:
    {how}
time.sleep(600)
"""
)


def says(stderr: str) -> list[str]:
    """The launcher's own lines."""
    start = "accelerate launch: "
    return [line.removeprefix(start) for line in stderr.splitlines() if line.startswith(start)]


# ---------------------------------------------------------------- one rank fails


@pytest.mark.parametrize(
    ("how", "code", "line", "end"),
    [
        ("raise ValueError('no data')", 1, "failed (exit code 1)", "ValueError: no data"),
        ("sys.exit(3)", 3, "failed (exit code 3)", "it called sys.exit(3)"),
        ("sys.exit(not 0)", 1, "failed (exit code 1)", "it called sys.exit(1)"),
        ("sys.exit('no data found')", 1, "failed (exit code 1)", "no data found"),
        ("os._exit(7)", 7, "failed (exit code 7)", "it left no traceback: it called os._exit"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL", "when memory runs out"),
        (
            "import ctypes; ctypes.string_at(0)",
            139,
            "was killed by SIGSEGV",
            'script.py", line 6 in <module>',
        ),
        ("os.abort()", 134, "was killed by SIGABRT", 'script.py", line 6 in <module>'),
    ],
)
def test_the_exit_code_and_the_last_words_are_the_failing_ranks(
    how: str, code: int, line: str, end: str
) -> None:
    env = {"PYTHONFAULTHANDLER": None}  # a crash is reported all the same
    result = launch(*TWO, script_text=FAILS.format(how=how), env=env)
    assert result.returncode == code, result.output
    assert says(result.stderr) == [f"rank 1 of 2 {line}, the others were stopped"]
    assert end in result.stderr.splitlines()[-1]
    assert "accelerate/" not in result.stderr
    assert result.seconds < 25
    assert not result.survivors()


def test_the_traceback_is_whole_last_and_the_only_one() -> None:
    result = launch(
        *TWO,
        script_text=HEAD
        + """
def load(path):
    try:
        open(path)
    except OSError as error:
        raise RuntimeError("no data\\nin two lines") from error

if rank == 1:
    load("/no/such/file")
time.sleep(600)
""",
    )
    first, _, rest = result.stderr.partition("\n")
    assert first == "accelerate launch: rank 1 of 2 failed (exit code 1), the others were stopped"
    plain = re.sub(r'File ".*/', 'File "', rest)
    assert plain.startswith('Traceback (most recent call last):\n  File "script.py", line 7, in load\n')
    assert "FileNotFoundError: [Errno 2]" in plain
    assert plain.endswith("RuntimeError: no data\nin two lines\n")
    assert "rank_entry_point.py" not in plain


def test_an_error_of_the_package_ends_at_the_line_of_the_script() -> None:
    """Its frames say nothing that its text does not; a fault of the package keeps them."""
    text = "from accelerate import debug_launcher\ndef train():\n    debug_launcher(3)\n"
    result = launch(*TWO, script_text=text + "train()\n")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    frames = [line.strip().partition(", in ")[2] for line in lines if line.startswith("  File ")]
    assert frames == ["<module>", "train"], result.stderr
    assert lines[-2:] == [
        "accelerate.core.errors.SettingError: 3 cannot be called",
        "  fix: pass the function itself: notebook_launcher(train, args=(...))",
    ]
    with pytest.raises(TypeError) as fault:
        nearest("x", None)  # type: ignore[arg-type]
    assert trim_traceback(fault.value, fault.tb) is fault.tb
    with pytest.raises(SettingError) as refused:
        PreemptionKwargs(signals=())  # in a constructor that a dataclass has generated
    trimmed = trim_traceback(refused.value, refused.tb)
    assert trimmed is not None
    assert [Path(frame.filename) for frame in traceback.extract_tb(trimmed)] == [Path(__file__)]


def test_the_error_is_the_one_that_python_prints() -> None:
    """Letter by letter, for an error in the script's text, which has no frame, and for a group of errors."""
    for text in (
        "x = 1\nif x\n",
        "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
        "import nothing_here",
    ):
        plain = Running([sys.executable], script_text=text)
        expected = plain.wait().stderr.replace(str(plain.folder), "")
        running = start(*TWO, script_text=text)
        result = running.wait()
        assert says(result.stderr) == ["all 2 ranks failed (exit code 1), in the same way"]
        assert result.stderr.partition("\n")[2].replace(str(running.folder), "") == expected
        assert result.returncode == 1


FIRST_FAILS = """
import time
import traceback
from pathlib import Path
from accelerate import PartialState
state = PartialState(cpu=True)

def read():
    raise FileNotFoundError("no data set")

try:
    with state.main_process_first():
        read()
finally:
    if state.is_main_process and {slow}:
        time.sleep({slow})
"""
# The same without torch: both know when they fail, and what rank 1 would hear.
FIRST_SEEMS_TO_FAIL = (
    HEAD
    + """
from accelerate.core.errors import PeerError

def read():
    raise FileNotFoundError("no data set")

try:
    if rank == 1:
        raise PeerError("rank 0 failed in a block that it ran first: FileNotFoundError: no data set")
    read()
finally:
    if rank == 0:
        time.sleep({slow})
"""
)


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        (FIRST_SEEMS_TO_FAIL, 0.3),
        *[long_run_param(FIRST_FAILS, slow) for slow in (0.3, 5, *[0] * 18)],
    ],
)
def test_the_traceback_of_the_rank_that_goes_first_is_last(text: str, slow: float) -> None:
    """G12: the others, which hear of it, may end sooner than rank 0."""
    result = launch(*TWO, script_text=text.format(slow=slow), env={"OMP_NUM_THREADS": 1})
    assert says(result.stderr) == [
        "rank 1 stopped after it: PeerError: rank 0 failed in a block that it ran first: "
        "FileNotFoundError: no data set",
        "rank 0 of 2 failed (exit code 1)" + (", the others were stopped" if slow > 3 else ""),
    ]
    assert result.stderr.endswith(
        'in read\n    raise FileNotFoundError("no data set")\nFileNotFoundError: no data set\n'
    )


def test_a_failed_peer_is_told_in_one_line() -> None:
    """C3 without torch: what follows from the first failure is not taken for it, whoever ends first."""
    result = launch(
        *TWO,
        script_text=HEAD
        + """
if rank == 1:
    def stay():  # its process ends after its peer's
        time.sleep(1.5)
    threading.Thread(target=stay).start()
    raise ValueError("boom")
time.sleep(0.6)
raise ConnectionError("Connection closed by peer\\nmore of it")
""",
    )
    assert says(result.stderr) == [
        "rank 0 stopped after it: ConnectionError: Connection closed by peer",
        "rank 1 of 2 failed (exit code 1)",
    ]
    assert result.stderr.endswith("ValueError: boom\n")
    assert "more of it" not in result.stderr


def test_a_rank_that_fails_in_a_collective() -> None:
    """C3: one rank raises while the other waits in gather; seconds later its traceback is the last word."""
    result = launch(
        *TWO,
        script_text="""
            import torch
            from accelerate import Accelerator
            accelerator = Accelerator()
            accelerator.gather(torch.ones(1))
            if accelerator.process_index == 1:
                raise ValueError("a bad batch")
            accelerator.gather(torch.ones(1))
        """,
    )
    assert result.returncode == 1, result.output
    assert says(result.stderr)[-1].startswith("rank 1 of 2 failed (exit code 1)")
    assert result.stderr.endswith("ValueError: a bad batch\n")
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert not result.survivors()


def test_a_rank_that_has_raised_and_does_not_end_is_ended() -> None:
    """A thread that never stops would hide the traceback for ever."""
    result = launch(
        *TWO,
        "--stop_timeout",
        "1",
        script_text=HEAD
        + """
if rank == 1:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("boom")
time.sleep(600)
""",
    )
    assert result.returncode != 0
    assert result.stderr.endswith("ValueError: boom\n"), result.output
    assert result.seconds < 25
    assert not result.survivors()


def test_a_script_with_a_hook_of_its_own_prints_its_error_itself() -> None:
    result = launch(
        *TWO, script_text=FAILS.format(how="sys.excepthook = lambda *_: print('mine'); raise ValueError")
    )
    assert "mine" in result.stdout
    assert says(result.stderr) == ["rank 1 of 2 failed (exit code 1), the others were stopped"]


def test_an_error_of_a_forked_process_is_not_the_ranks() -> None:
    result = launch(
        *TWO,
        script_text=HEAD
        + """
if rank == 1 and os.fork() == 0:
    raise ValueError("in the fork")
time.sleep(0.5)
if rank == 1:
    os.wait()
""",
    )
    assert result.returncode == 0, result.output
    assert "ValueError: in the fork" in result.stderr
    assert says(result.stderr) == []


def test_a_lone_process_fails_as_under_python() -> None:
    result = launch("--cpu", script_text="raise ValueError('boom')")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("ValueError: boom\n")


def test_a_failure_shows_also_when_output_is_logged(tmp_path: Path) -> None:
    """And in the log of the rank, which keeps what an earlier launch has left there."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_1.log").write_text("earlier\n")
    result = launch(
        *TWO, "--log_dir", f"{tmp_path}/logs", script_text=FAILS.format(how="raise ValueError('boom')")
    )
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: boom\n")
    first, mark, *lines = (tmp_path / "logs/rank_1.log").read_text().splitlines()
    assert first == "earlier"
    assert mark.startswith("--- accelerate launch, 20")
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "ValueError: boom"
    assert "Traceback" not in (tmp_path / "logs/rank_0.log").read_text()


# ---------------------------------------------------------------- giving up

# Each rank has a process of its own, as loaders have workers.
WORKS = (
    HEAD
    + """
worker = subprocess.Popen([sys.executable, "-c", "import time; print('worker', flush=True); time.sleep(600)"],
                          stderr=subprocess.DEVNULL)
"""
)
WAITS = (
    WORKS
    + """
print("ready", rank)
time.sleep(600)
"""
)
IGNORES = (
    HEAD
    + """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""
    + WORKS.removeprefix(HEAD)
    + """
print("ready", rank)
while True:
    time.sleep(1)
"""
)


def running(text: str, *flags: str) -> Running:
    """Two ranks and their workers, at work."""
    job = start(*TWO, *flags, script_text=text)
    for line in ("ready 0", "ready 1"):
        job.wait_for(line)
    deadline = time.monotonic() + 10
    while job.text().count("worker") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return job


@pytest.mark.parametrize("text", [WAITS, IGNORES], ids=["polite", "stubborn"])
@pytest.mark.parametrize(
    ("how", "code"),
    [("ctrl-c", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "term", "hup"],
)
def test_giving_up_leaves_nothing(how: signal.Signals | str, code: int, text: str) -> None:
    """F8: the ranks, and what they started, are gone; the exit code is the shell's for that signal."""
    job = running(text, "--stop_timeout", "1")
    job.interrupt() if how == "ctrl-c" else job.signal(how)  # type: ignore[arg-type]
    began = time.monotonic()
    result = job.wait()
    assert result.returncode == code, result.output
    assert time.monotonic() - began < 25
    assert not result.survivors(0)
    (line,) = says(result.stderr)
    assert line.startswith("stopped by " + ("Ctrl-C" if how == "ctrl-c" else signal.Signals(how).name))  # type: ignore[arg-type]
    assert result.stderr.count("Traceback") <= 1


def test_ctrl_c_tells_where_the_first_rank_was() -> None:
    job = running(WAITS)
    job.interrupt()
    result = job.wait()
    assert says(result.stderr) == ["stopped by Ctrl-C; rank 0 was here:"]
    assert result.stderr.endswith("KeyboardInterrupt\n")
    assert "time.sleep(600)" in result.stderr


def test_a_second_ctrl_c_does_not_wait() -> None:
    job = running(IGNORES, "--stop_timeout", "60")
    job.interrupt()
    time.sleep(0.3)
    job.interrupt()
    result = job.wait(10)
    assert result.returncode == 130
    assert not result.survivors(1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rank_may_use_the_time_it_is_given(number: signal.Signals, code: int) -> None:
    """By default as long as torchrun gives: a handler that saves needs more than a job that fails."""
    job = start(
        *TWO,
        script_text=HEAD
        + """
def save(*_):
    time.sleep(5)
    print("saved", rank)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
print("ready", rank)
time.sleep(600)
""",
    )
    job.wait_for("ready 0")
    job.wait_for("ready 1")
    job.signal(number)
    if number == signal.SIGTERM:  # schedulers send it to each process and to the group, or SIGHUP after it
        for repeated in (signal.SIGTERM, signal.SIGHUP):
            time.sleep(0.1)
            job.signal(repeated)
    result = job.wait()
    assert result.returncode == code
    hint = "waiting for ranks 0-1 to end; Ctrl-C once more does not wait"
    assert (hint in says(result.stderr)) == (number == signal.SIGINT)
    assert sorted(re.findall("saved .", result.stdout)) == ["saved 0", "saved 1"]


@pytest.mark.parametrize("text", [WAITS, IGNORES], ids=["polite", "stubborn"])
def test_a_killed_launcher_leaves_nothing(text: str) -> None:
    """F8: SIGKILL gives the launcher no chance to clean up."""
    job = running(text)
    assert len(job.members()) >= 6  # launcher, guard, two ranks, two workers
    job.signal(signal.SIGKILL)
    assert job.wait().returncode == -signal.SIGKILL
    assert job.survivors(5) == []


def test_the_guard_stays_when_everybody_is_asked_to_end() -> None:
    """F8: a scheduler may signal each process of a job, and kill the launcher a moment later."""
    job = running(WAITS)
    (guard,) = (p for p in job.members() if any(word.endswith("orphan_guard.py") for word in p.cmdline()))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        guard.send_signal(number)
    job.signal(signal.SIGKILL)
    assert job.wait().returncode == -signal.SIGKILL
    assert job.survivors(5) == []


def test_a_user_signal_reaches_the_script() -> None:
    """Schedulers announce the end of a job so."""
    job = start(
        *TWO,
        script_text=HEAD
        + """
signal.signal(signal.SIGUSR1, lambda *_: (print("heard", rank), sys.exit(0)))
print("ready", rank)
time.sleep(600)
""",
    )
    job.wait_for("ready 0")
    job.wait_for("ready 1")
    job.signal(signal.SIGUSR1)
    result = job.wait()
    assert result.returncode == 0, result.output
    assert sorted(re.findall("heard .", result.stdout)) == ["heard 0", "heard 1"]


def test_what_a_good_script_leaves_running_is_its_own_affair() -> None:
    job = start(*TWO, script_text=WORKS + "\ntime.sleep(0.5)")
    result = job.wait()
    assert result.returncode == 0, result.output
    assert len(job.members()) == 2
