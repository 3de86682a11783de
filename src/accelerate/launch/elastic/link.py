"""The launcher's side of the agent: start it, talk with it, and end it whatever it does.

Both sides write one JSON object per line. The agent may hang in a call to a machine that is gone, and then
even a signal that Python handles does not reach it; here nothing waits for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.launch.ranks import Guard

AGENT = str(Path(__file__).with_name("agent.py"))
FAREWELL = 6.0  # seconds that the agent has to tell the others and end; a little more than its own limit

Message = dict[str, Any]


class Link:
    """The agent of this launch.

    Args:
        job: what it has to know, as JSON has it.
        guard: ends it when this process dies.
        stop_timeout: seconds between asking it to stop and killing it.

    Attributes:
        heard: when it last said that it reached the others, in s of the monotonic clock.
    """

    def __init__(self, job: Message, guard: Guard, stop_timeout: float) -> None:
        self.guard, self.stop_timeout = guard, stop_timeout
        self.process = subprocess.Popen(
            [sys.executable, AGENT],
            # The library shares one store between attempts; what the last one left in it breaks the next.
            env=environ.child({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        guard.tell(f"+{self.process.pid}")
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.rest, self.ended = b"", False
        self.heard = time.monotonic()
        self.tell(job)

    def tell(self, message: Message) -> None:
        """Says something to the agent; to one that has ended, nothing."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen when it is read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> Iterator[Message]:
        """What it has said since the last look. ``{"event": "ended"}`` is its end, once."""
        while not self.ended:
            try:
                chunk = os.read(self.output, 65536)
            except BlockingIOError:
                break
            self.rest += chunk
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.heard = time.monotonic()
                if message["event"] != "beat":
                    yield message
            if not chunk:
                self.ended = True
                yield {"event": "ended"}

    @property
    def silence(self) -> float:
        """Seconds since it last reached the others."""
        return time.monotonic() - self.heard

    def finish(self, patience: float = 0.0) -> int:
        """Ends it, with time to say farewell to the others; returns its exit code."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        for seconds, end in ((patience, self.process.terminate), (self.stop_timeout, self.process.kill)):
            try:
                self.process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                end()
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.guard.tell(f"-{self.process.pid}")
        return code
