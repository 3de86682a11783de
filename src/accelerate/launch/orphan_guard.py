"""Outlives the launcher by a moment: when it dies, whatever the reason, its processes end too.

Started by path as ``orphan_guard.py SECONDS``, with the launcher's end of a pipe as stdin. A line ``+PID`` is
a process that was started as the leader of its own session, ``-PID`` one that has ended. ``done`` is the
launcher's farewell; an end of the pipe without it means that the launcher is dead: every process is asked to
stop, and after SECONDS killed with all it started.

The launcher starts it with all signals blocked. It imports what Python has loaded already:
it starts with every job, and before its processes.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main(seconds: float) -> None:
    """Wait for the launcher's end."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line == "done\n":
            return
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    stop_groups(groups, seconds)


def stop_groups(groups: set[int], seconds: float) -> None:
    """Ask the leaders of process groups to stop, and kill each group when its leader is gone.

    Leaders that are still there after ``seconds`` are killed with their groups.
    """
    import signal

    for leader in groups:
        _send_signal(os.kill, leader, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while groups:
        late = time.monotonic() >= deadline
        for group in [group for group in groups if late or not _send_signal(os.kill, group, 0)]:
            _send_signal(os.killpg, group, signal.SIGKILL)
            groups.discard(group)
        time.sleep(0.05)


def _send_signal(send: "Callable[[int, int], None]", target: int, number: int) -> bool:
    """Send a signal, and say whether there was anybody to get it."""
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]))
