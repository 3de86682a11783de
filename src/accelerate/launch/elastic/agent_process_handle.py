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
from accelerate.launch.supervisor import GuardProcess

AGENT_FILE = str(Path(__file__).with_name("rendezvous_agent.py"))
FAREWELL_SECONDS = (
    6.0  # seconds that the agent has to tell the others and end; a little more than its own limit
)

Message = dict[str, Any]


class ElasticAgentProcess:
    """The agent process of this launch.

    Args:
        job: what it has to know, as JSON has it.
        guard: ends it when this process dies.
        stop_timeout: seconds between asking it to stop and killing it.

    Attributes:
        heard: when it last said that it reached the others, in s of the monotonic clock.
    """

    def __init__(self, job: Message, guard: GuardProcess, stop_timeout: float) -> None:
        self.guard, self.stop_timeout = guard, stop_timeout
        self.process = subprocess.Popen(
            [sys.executable, AGENT_FILE],
            # The library shares one store between attempts; what the last one left in it breaks the next.
            env=environ.make_child_environment(
                {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        guard.write_line(f"+{self.process.pid}")
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.unread, self.has_ended = b"", False
        self.last_contact = time.monotonic()
        self.send(job)

    def send(self, message: Message) -> None:
        """Send a message to the agent; do nothing if it has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen when it is read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read_messages(self) -> Iterator[Message]:
        """Yield the agent's messages since the last call. ``{"event": "ended"}`` marks its end, once."""
        while not self.has_ended:
            try:
                chunk = os.read(self.output, 65536)
            except BlockingIOError:
                break
            self.unread += chunk
            *lines, self.unread = self.unread.split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.last_contact = time.monotonic()
                if message["event"] != "beat":
                    yield message
            if not chunk:
                self.has_ended = True
                yield {"event": "ended"}

    @property
    def seconds_silent(self) -> float:
        """Seconds since it last reached the others."""
        return time.monotonic() - self.last_contact

    def finish(self, timeout: float = 0.0) -> int:
        """Ends it, with time to say farewell to the others; returns its exit code."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        for seconds, end in ((timeout, self.process.terminate), (self.stop_timeout, self.process.kill)):
            try:
                self.process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                end()
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.guard.write_line(f"-{self.process.pid}")
        return code
