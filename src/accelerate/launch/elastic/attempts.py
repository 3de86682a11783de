"""The attempts of a job on several machines, as each launcher runs them. Nothing here waits for the network.

The agent says when an attempt starts and that it is over; this process starts, watches and stops its own
processes (``MultiMachineAttemptRunner``). When the agent has not reached the others for ``machine_timeout``,
everything here is ended. Both write one JSON object per line. The agent may hang in a call to a machine that
is gone, and then even a signal that Python handles does not reach it; here nothing waits for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import LaunchError, RankError
from accelerate.launch import rank_reports
from accelerate.launch.base import Variables
from accelerate.launch.rank_reports import ProcessExit
from accelerate.launch.supervisor import (
    STOP_SIGNALS,
    AttemptRunner,
    GuardProcess,
    SignalAndChildExitWaiter,
    WorkerSupervisor,
    describe_failure,
    print_restart,
)

AGENT_FILE = str(Path(__file__).with_name("rendezvous_agent.py"))
FAREWELL_SECONDS = 6.0  # seconds that the agent has to tell the others and end; a little more than its limit
QUIET_WAIT_SECONDS = 10.0  # of waiting for other machines before it is said (half of a shorter join_timeout)
RENDEZVOUS_MARGIN = 60.0  # seconds that a rendezvous may take longer than the machines wait for each other
MAX_TRACEBACK = 16_000  # characters of a traceback that go to the other machines: its last ones

Message = dict[str, Any]


class LocalAttempt(WorkerSupervisor):
    """Processes that may be called off, because another machine says so.

    Args:
        should_cancel: asked again and again whether to stop all.
        arguments, options: those of ``WorkerSupervisor``.
    """

    def __init__(
        self, *arguments: Any, should_cancel: Callable[[LocalAttempt], bool], **options: Any
    ) -> None:
        super().__init__(*arguments, keeps_leftovers=False, **options)
        self.should_cancel, self.was_cancelled = should_cancel, False

    @property
    def has_failed(self) -> bool:
        """Return whether a process has failed, or left a traceback and does not exit."""
        return self.stop_at is not None and not self.was_cancelled

    def seconds_since_failure(self) -> float:
        """Seconds since the first process failed by itself; 0 if all failed because of other machines."""
        now = time.monotonic_ns()
        ends = [end for end in self.outcome.exits if end.code]
        raised = [rank for rank in self.alive if rank_reports.rank_file(self.folder, rank, "error").is_file()]
        ends += [ProcessExit(rank, 1, now, was_asked_to_stop=False) for rank in raised]
        failures = (rank_reports.read_failure(end, self.folder) for end in ends)
        ages = ((now - each.failed_at) / 1e9 for each in failures if each.failed_rank is None)
        return max(ages, default=0.0)

    def _apply_deadlines(self) -> None:
        if not self.was_cancelled and self.should_cancel(self):
            self.was_cancelled, self.wake_fds = True, ()
            self.stop_at = time.monotonic()
        super()._apply_deadlines()

    def _asks_to_end_output(self, signals: SignalAndChildExitWaiter) -> bool:
        self.should_cancel(self)  # it reads what the agent says, which must not wait for a slow console
        return super()._asks_to_end_output(signals)


class ElasticAgentProcess:
    """The agent process of this launch.

    Args:
        job: what it has to know, as JSON has it.
        guard: ends it when this process dies.

    Attributes:
        last_contact: when it last said that it reached the others, in s of the monotonic clock.
    """

    def __init__(self, job: Message, guard: GuardProcess) -> None:
        self.guard = guard
        self.process = subprocess.Popen(
            [sys.executable, AGENT_FILE],
            # The library shares one store between attempts; what the last one left in it breaks the next.
            # Its errors come with forty lines of C++ frames; the agent says each in a sentence.
            env=environ.make_child_environment(
                {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "TORCH_CPP_LOG_LEVEL": "FATAL"}
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
        """Yield the agent's messages since the last call. ``{"event": "ended"}`` marks its end, once.

        Whoever stops in between gets the others at the next call.
        """
        while True:
            while b"\n" in self.unread:
                line, _, self.unread = self.unread.partition(b"\n")
                message = json.loads(line)
                self.last_contact = time.monotonic()
                if message["event"] != "beat":
                    yield message
            if self.has_ended:
                return
            try:
                chunk = os.read(self.output, 65536)
            except BlockingIOError:
                return
            self.unread += chunk
            if not chunk:
                self.has_ended = True
                yield {"event": "ended"}

    @property
    def seconds_silent(self) -> float:
        """Seconds since it last reached the others."""
        return time.monotonic() - self.last_contact

    def finish(self, timeout: float = 0.0) -> int:
        """End it, with time to say farewell to the others; return its exit code."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()  # it may hang in a call to a machine that is gone, and has no last words then
            code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.guard.write_line(f"-{self.process.pid}")
        return code


class MultiMachineAttemptRunner:
    """The attempts of a job on several machines.

    Args:
        attempts: of this machine.
        agent: to the agent.
        rank_variables: the environment of each process here, by what the agent says of an attempt.
        job: what the agent is told of it.
        endpoint: where the machines meet.
        print_line: prints a line.
    """

    def __init__(
        self,
        attempts: AttemptRunner,
        agent: ElasticAgentProcess,
        rank_variables: Callable[[Message], Sequence[Variables]],
        job: Message,
        endpoint: str,
        print_line: Callable[[str], None],
    ) -> None:
        self.attempts, self.agent, self.rank_variables = attempts, agent, rank_variables
        self.endpoint, self.print_line = endpoint, print_line
        # Seconds without a word from the others after which they are lost, and that they wait for each other.
        self.timeout, self.join = job["machine_timeout"], job["join"]
        self.is_static = job["backend"] == "static"  # they meet at machine 0
        self.world: Message = {}
        self.verdict: Message | None = None
        self.reported_failure = False
        self.error: RankError | None = None
        self.is_local_error = False  # the error is of this machine's processes

    def run(self) -> None:
        """Return when the job has ended well on all machines.

        Raises:
            RankError: a rank failed on some machine, a machine is lost, or the job was stopped.
            LaunchError: the machines do not find each other.
        """
        patience = 0.0
        try:
            while self._wait_next_attempt():
                self._run_attempt()
            patience = FAREWELL_SECONDS
        finally:
            self.agent.finish(patience)
        error = self._final_error(self.verdict or {})
        if error is not None:
            raise error

    # --- between attempts

    def _wait_next_attempt(self) -> bool:
        """Wait for the next attempt; False when there is none."""
        began, has_announced = time.monotonic(), False
        watched = bool(self.world)  # before the first attempt nobody is there to be lost
        while True:
            for number in self.attempts.signals.wait(0.5, self.agent.output):
                if number in STOP_SIGNALS:
                    self._stop_while_waiting(number)
            for message in self.agent.read_messages():
                event = message["event"]
                if event == "start":
                    self.world, self.verdict, self.reported_failure, self.error = message, None, False, None
                    return True
                if event == "over":
                    self.verdict = message
                    return False
                if event == "meeting":
                    began, watched = time.monotonic(), False
                self._handle_message(message)
            if watched and self.agent.seconds_silent > self.timeout:
                raise self._lost_contact_error()
            waits = time.monotonic() - began
            if not watched and waits > self.join + RENDEZVOUS_MARGIN:
                raise self._lost_contact_error()
            if not watched and not has_announced and waits > min(QUIET_WAIT_SECONDS, self.join / 2):
                has_announced = True
                others = f"the other machines at {self.endpoint}"
                self.print_line(f"waiting for {others}, for {self.join:g} s at most")

    def _handle_message(self, message: Message) -> None:
        if message["event"] == "verdict":
            self.verdict = message
            if message.get("restart"):
                print_restart(self._restart_line(message), message.get("traceback", ""), self.print_line)
        elif message["event"] == "error":
            raise LaunchError(message["what"], why=message["why"], fix=message["fix"])
        elif message["event"] == "ended":
            code = self.agent.finish(3.0)
            raise LaunchError(
                f"the agent, which meets the other machines, ended (exit code {code})",
                why="what it printed stands above",
            )

    def _stop_while_waiting(self, number: int) -> None:
        """A signal while no process runs here. The others are told, if the agent can."""
        error = rank_reports.stopped_error(number)
        if self.world:
            self.agent.send({"event": "ended", "result": "stopped", "what": error.what, "code": error.code})
            self.agent.finish(1.0)
        error.what += f", while it waited for the other machines at {self.endpoint}"
        raise error

    # --- an attempt

    def _run_attempt(self) -> None:
        world = self.world
        attempt, self.error = self.attempts.run(
            partial(LocalAttempt, should_cancel=self._should_cancel, wake_fds=(self.agent.output,)),
            self.rank_variables(world),
            size=world["size"],
            first_rank=world["first"],
        )
        self.is_local_error = not attempt.was_cancelled
        if self.is_local_error:
            self.agent.send({"event": "ended", **self._attempt_result(attempt)})
        elif self.verdict is None:
            raise self._lost_contact_error()
        else:
            self.agent.last_contact = time.monotonic()  # after a verdict it says nothing until all have ended
            self.agent.send({"event": "ended", "result": "called off"})

    def _should_cancel(self, attempt: LocalAttempt) -> bool:
        if attempt.has_failed and not self.reported_failure:
            self.reported_failure = True
            self.agent.send({"event": "failing", "age": attempt.seconds_since_failure()})
        for message in self.agent.read_messages():
            self._handle_message(message)
        return self.verdict is not None or self.agent.seconds_silent > self.timeout

    def _attempt_result(self, attempt: LocalAttempt) -> Message:
        """The ends of the processes here, for the other machines."""
        error, outcome = self.error, attempt.outcome
        if error is None:
            return {"result": "ok"}
        failure: dict[str, Any] = {"what": error.what, "why": error.why, "code": error.code}
        if outcome.resumable:
            return {"result": "resumable", **failure}
        if outcome.stopped_by is not None and not outcome.stopped_gracefully:
            return {"result": "stopped", **failure}
        return {
            "result": "failed",
            **failure,
            "told": describe_failure(error),
            "traceback": error.traceback[-MAX_TRACEBACK:],
        }

    # --- what is said

    def _restart_line(self, verdict: Message) -> str:
        if verdict["kind"] == "join":
            return "another machine has come: all processes start again with it"
        if verdict["kind"] == "lost":
            loss = f"machine {verdict['lost']} ({verdict['lost_host']}) is lost"
            return f"{loss}: {verdict['why']}; the others start again"
        number, most = self.world["restarts"] + 1, self.world["max_restarts"]
        return f"{_machine_text(verdict)}: {verdict['told']}; restart {number} of {most}"

    def _lost_contact_error(self) -> RankError:
        """The agent has not reached the others for too long; who it is depends on who holds their store."""
        who = f"the host at {self.endpoint}"
        if self.is_static and self.world.get("machine"):
            who = f"machine 0 ({self.world['hosts'][0]})"
        return RankError(
            f"{who} is lost: it did not answer for {self.agent.seconds_silent:.0f} s",
            why=f"all meet at {self.endpoint}; the limit is {self.timeout:g} s (--machine_timeout)",
        )

    def _final_error(self, verdict: Message) -> RankError | None:
        kind = verdict["kind"]
        if kind == "done":
            return self._resumable_error(verdict["code"]) if verdict["code"] else None
        if kind == "lost":
            number = "" if verdict["lost"] is None else f" {verdict['lost']}"
            return RankError(f"machine{number} ({verdict['lost_host']}) is lost", why=verdict["why"])
        if self.error is not None and self.is_local_error and verdict["machine"] == self.world["machine"]:
            if kind == "failed":
                self.error.what = f"{_machine_text(verdict)}: {self.error.what}"
            return self.error
        error = RankError(f"{_machine_text(verdict)}: {verdict['what']}", why=verdict.get("why", ""))
        error.code, error.traceback = verdict["code"], verdict.get("traceback", "")
        return error

    def _resumable_error(self, code: int) -> RankError:
        if self.error is not None and self.is_local_error:
            return self.error
        error = RankError(
            f"the job stopped on another machine to be resumed (exit code {code}): start it again"
        )
        error.code = code
        return error


def _machine_text(verdict: Message) -> str:
    return f"on {verdict['host']} (machine {verdict['machine']})"
