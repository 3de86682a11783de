"""Scripts and tests that wait for a signal to arrive, without a step boundary of their own."""

from __future__ import annotations

import time

from accelerate.launch.supervisor import POLL_SECONDS, REPEAT_SECONDS

# The beginning of a script, which has two functions then.
WAITING = '''
import time
from accelerate.world import preemption, watchdog

def wait_until_told():
    """Wait until this rank knows that the job stops; it passes no step boundary meanwhile."""
    while not preemption.current().reason:
        time.sleep(0.005)

def wait_until_asked(rank):
    """Wait until that rank has asked the others to agree on a step to stop at."""
    while not watchdog.current().store.has(f"stop/{rank}"):
        time.sleep(0.01)
'''

# The beginning of a script without torch that has told its launcher that it stops in good order by SIGTERM:
# the file is the one that ``should_stop`` writes. ``heard`` holds the signals that came, ``rank`` is a text.
ARMED = """
import os, signal, sys, time
from pathlib import Path
heard, rank = [], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
Path(os.environ["ACCELERATE_STOP_FOLDER"], f"armed_{os.getpid()}").write_text(f"75 {signal.SIGTERM:d}")
print("ready", rank, flush=True)
"""


def let_launcher_look() -> None:
    """Wait until the launcher has looked at what its ranks have left for it."""
    time.sleep(2 * POLL_SECONDS)


def let_signals_differ() -> None:
    """Wait until the launcher takes one more signal for another than the one before."""
    time.sleep(REPEAT_SECONDS + 0.1)
