"""The helper that starts commands: what every test of the command line rests on."""

from __future__ import annotations

import signal
import sys
import time

import psutil
import pytest

from tests.support import command
from tests.support.command import Running

SLEEPER = [sys.executable, "-c", "import time; time.sleep(100)"]
SLOW = """
    import time
    print("begun", flush=True)
    time.sleep(100)
"""
# A parent that leaves one child in its own session and one in a new one.
FORGETFUL = f"""
    import subprocess
    for new in (False, True):
        subprocess.Popen({SLEEPER!r}, start_new_session=new)
    print("left", flush=True)
"""


def test_a_script_gets_its_arguments_and_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    script = """
        import os, sys
        print(sys.argv[1:], os.environ.get("ACCELERATE_USE_CPU"), os.environ["MINE"])
        sys.exit(3)
    """
    running = Running(
        [sys.executable], script_text=script, script_args=["a b", "--", "'c'"], env={"MINE": "yes"}
    )
    returncode, stdout, stderr, seconds = running.wait()
    assert (returncode, stderr) == (3, "")
    assert stdout == "['a b', '--', \"'c'\"] None yes\n"
    assert 0 < seconds < 60


def test_survivors_are_found_in_any_session_and_killed() -> None:
    result = Running([sys.executable], script_text=FORGETFUL).wait()
    assert result.stdout == "left\n"
    survivors = result.survivors(0.2)
    assert len(survivors) == 2
    assert all("time.sleep(100)" in line for line in survivors)
    assert result.survivors(0) == []


def test_what_is_left_is_swept_after_a_test() -> None:
    running = Running([sys.executable], script_text=FORGETFUL)
    running.wait_for("left")
    members = running.members()
    assert len(members) >= 2
    command.sweep()
    _, alive = psutil.wait_procs(members, 5)
    assert not alive
    assert not running.folder.exists()


def test_a_late_command_is_killed_and_shows_its_stack() -> None:
    start = time.monotonic()
    running = Running([sys.executable], script_text=SLOW)
    running.wait_for("begun")
    with pytest.raises(AssertionError, match="did not end within 1 s") as caught:
        running.wait(1)
    assert time.monotonic() - start < 20
    assert 'script.py", line 4' in str(caught.value)
    assert not running.members()


def test_signals_reach_the_command() -> None:
    running = Running([sys.executable], script_text=SLOW)
    running.wait_for("begun")
    running.signal(signal.SIGTERM)
    assert running.wait(10).returncode == -signal.SIGTERM


def test_waiting_for_a_text_ends_with_the_command() -> None:
    with pytest.raises(AssertionError, match="no 'never' in stdout"):
        Running([sys.executable], script_text="print('something')").wait_for("never")
