"""A job on several machines, as the launcher of one of them runs it. Nothing here waits for the network.

The agent says when an attempt starts and that it is over; this process starts, watches and stops its own
processes. When the agent has not reached the others for ``machine_timeout``, everything here is ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.core.errors import LaunchError
from accelerate.launch.elastic.attempt import Attempt, Attempts
from accelerate.launch.elastic.link import FAREWELL, Link, Message
from accelerate.launch.elastic.restarts import told
from accelerate.launch.errors import RankError
from accelerate.launch.plan import Variables
from accelerate.launch.ranks import STOPS

PATIENT = 10.0  # seconds of waiting for other machines before it is said
MARGIN = 60.0  # seconds that a rendezvous may take longer than the machines wait for each other
LONGEST = 16_000  # characters of a traceback that go to the other machines: its last ones


class Machines:
    """The attempts of a job on several machines.

    Args:
        attempts: of this machine.
        link: to the agent.
        owns: the environment of each process here, by what the agent says of an attempt.
        timeout: seconds without a word from the others after which they are lost.
        join: seconds that the machines wait for each other.
        place: where they meet.
        static: they meet at machine 0.
        say: prints a line.
    """

    def __init__(
        self,
        attempts: Attempts,
        link: Link,
        owns: Callable[[Message], Sequence[Variables]],
        *,
        timeout: float,
        join: float,
        place: str,
        static: bool,
        say: Callable[[str], None],
    ) -> None:
        self.attempts, self.link, self.owns, self.say = attempts, link, owns, say
        self.timeout, self.join, self.place, self.static = timeout, join, place, static
        self.world: Message = {}
        self.verdict: Message | None = None
        self.claimed = False
        self.error: RankError | None = None
        self.own = False  # the error is of this machine's processes

    def run(self) -> None:
        """Returns when the job has ended well on all machines.

        Raises:
            RankError: a rank failed on some machine, a machine is lost, or the job was stopped.
            LaunchError: the machines do not find each other.
        """
        patience = 0.0
        try:
            while self._next():
                self._attempt()
            patience = FAREWELL
        finally:
            self.link.finish(patience)
        error = self._end(self.verdict or {})
        if error is not None:
            raise error

    # --- between attempts

    def _next(self) -> bool:
        """Waits for the next attempt; False when there is none."""
        began, said = time.monotonic(), False
        watched = bool(self.world)  # before the first attempt nobody is there to be lost
        while True:
            for number in self.attempts.signals.wait(0.5, self.link.output):
                if number in STOPS:
                    self._stop(number)
            for message in self.link.read():
                event = message["event"]
                if event == "start":
                    self.world, self.verdict, self.claimed, self.error = message, None, False, None
                    return True
                if event == "over":
                    self.verdict = message
                    return False
                if event == "meeting":
                    began, watched = time.monotonic(), False
                self._heard(message)
            if watched and self.link.silence > self.timeout:
                raise self._silent()
            waits = time.monotonic() - began
            if not watched and waits > self.join + MARGIN:
                raise self._silent()
            if not watched and not said and waits > PATIENT:
                said = True
                self.say(f"waiting for the other machines at {self.place}, for {self.join:g} s at most")

    def _heard(self, message: Message) -> None:
        if message["event"] == "verdict":
            self.verdict = message
            if message.get("restart"):
                self.say(self._again(message))
        elif message["event"] == "error":
            raise LaunchError(message["what"], why=message["why"], fix=message["fix"])
        elif message["event"] == "ended":
            code = self.link.finish(3.0)
            raise LaunchError(
                f"the agent, which meets the other machines, ended (exit code {code})",
                why="what it printed stands above",
            )

    def _stop(self, number: int) -> None:
        """A signal while no process runs here. The others are told, if the agent can."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.world:
            what = f"stopped by {name}"
            self.link.tell({"event": "ended", "result": "stopped", "what": what, "code": 128 + number})
            self.link.finish(1.0)
        error = RankError(f"stopped by {name}, while it waited for the other machines at {self.place}")
        error.code = 128 + number
        raise error

    # --- an attempt

    def _attempt(self) -> None:
        world = self.world
        attempt, self.error = self.attempts.run(
            self.owns(world),
            size=world["size"],
            first=world["first"],
            called_off=self._called_off,
            listen=(self.link.output,),
        )
        self.own = not attempt.was_called_off
        if self.own:
            self.link.tell({"event": "ended", **self._result(attempt)})
        elif self.verdict is None:
            raise self._silent()
        else:
            self.link.tell({"event": "ended", "result": "called off"})

    def _called_off(self, attempt: Attempt) -> bool:
        if attempt.failing and not self.claimed:
            self.claimed = True
            self.link.tell({"event": "failing", "age": attempt.age()})
        for message in self.link.read():
            self._heard(message)
        return self.verdict is not None or self.link.silence > self.timeout

    def _result(self, attempt: Attempt) -> Message:
        """How the processes here ended, for the other machines."""
        error, outcome = self.error, attempt.outcome
        if error is None:
            return {"result": "ok"}
        said: dict[str, Any] = {"what": error.what, "why": error.why, "code": error.code}
        if outcome.resumable:
            return {"result": "resumable", **said}
        if outcome.stopped_by is not None and not outcome.heeded:
            return {"result": "stopped", **said}
        return {"result": "failed", **said, "told": told(error), "traceback": error.traceback[-LONGEST:]}

    # --- what is said

    def _again(self, verdict: Message) -> str:
        if verdict["kind"] == "join":
            return "another machine has come: all processes start again with it"
        if verdict["kind"] == "lost":
            lost = f"machine {verdict['lost']} ({verdict['lost_host']}) is lost"
            return f"{lost}: {verdict['why']}; the others start again"
        number, most = self.world["restarts"] + 1, self.world["max_restarts"]
        return f"{_where(verdict)}: {verdict['told']}; restart {number} of {most}"

    def _silent(self) -> RankError:
        """The agent has not reached the others for too long; who it is depends on who holds their store."""
        who = f"the host at {self.place}"
        if self.static and self.world.get("machine"):
            who = f"machine 0 ({self.world['hosts'][0]})"
        return RankError(
            f"{who} is lost: it did not answer for {self.link.silence:.0f} s",
            why=f"all meet at {self.place}; the limit is {self.timeout:g} s (--machine_timeout)",
        )

    def _end(self, verdict: Message) -> RankError | None:
        kind = verdict["kind"]
        if kind == "done":
            return self._resumable(verdict["code"]) if verdict["code"] else None
        if kind == "lost":
            number = "" if verdict["lost"] is None else f" {verdict['lost']}"
            return RankError(f"machine{number} ({verdict['lost_host']}) is lost", why=verdict["why"])
        if self.error is not None and self.own and verdict["machine"] == self.world["machine"]:
            if kind == "failed":
                self.error.what = f"{_where(verdict)}: {self.error.what}"
            return self.error
        error = RankError(f"{_where(verdict)}: {verdict['what']}", why=verdict.get("why", ""))
        error.code, error.traceback = verdict["code"], verdict.get("traceback", "")
        return error

    def _resumable(self, code: int) -> RankError:
        if self.error is not None and self.own:
            return self.error
        error = RankError(
            f"the job stopped on another machine to be resumed (exit code {code}): start it again"
        )
        error.code = code
        return error


def _where(verdict: Message) -> str:
    return f"on {verdict['host']} (machine {verdict['machine']})"
