"""The agent: meets the other machines for the launcher, and tells it when to start and stop its processes.

Started by path. What goes to its stdin, and what it writes to the launcher, is a JSON object per line:

    to the agent      the job; then {"event": "failing", "age": ...} at the first sign that a process here
                      fails, and {"event": "ended", "result": ..., ...} when all processes here have ended
    to the launcher   {"event": "start", ...}: start the processes of an attempt
                      {"event": "beat"}: the others were reached
                      {"event": "verdict", ...}: the attempt is over; stop what still runs, and say so
                      {"event": "error", ...}: it cannot go on

An attempt ends with one verdict, the same for all machines: the first that is written into the store is heard
by all. So all count restarts alike. When processes fail on several machines, the first of them is told: each
machine says how long ago its own failed, and the one that spoke first decides, without a clock in common.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path: this folder is no place for modules, and the package may not be on the path.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from accelerate.core.errors import AccelerateError, LaunchError
from accelerate.launch import preflight
from accelerate.launch.elastic import meeting
from accelerate.launch.elastic.meeting import Dynamic, Fixed, Place

BEAT = 1.0  # seconds between signs of life
LEAVE = 5.0  # seconds that machines stay for others to hear the last verdict
NAMES = 60.0  # seconds that the name of machine 0 may take to exist
QUICK = 0.02  # seconds between looks when this machine has nothing left to do

Message = dict[str, Any]


class Launcher:
    """The other end of the pipes."""

    def __init__(self) -> None:
        # Whatever libraries print goes to stderr; the pipe is ours.
        self.pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.rest = b""

    def tell(self, event: str, **more: Any) -> None:
        """Says something."""
        self.pipe.write(json.dumps({"event": event, **more}) + "\n")
        self.pipe.flush()

    def listen(self, seconds: float) -> list[Message]:
        """What it said within some seconds, or at once when it says something. Leaves when it is gone."""
        ready, _, _ = select.select([0], [], [], seconds)
        if not ready:
            return []
        chunk = os.read(0, 65536)
        if not chunk:
            os._exit(1)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


class Attempt:
    """One attempt of all machines, as this one sees it.

    Args:
        launcher: of this machine.
        meet: how the machines met.
        place: where they exchange words.
        world: what all agreed on.
        job: what the launcher said.

    Attributes:
        ended: how the processes here ended, None before.
    """

    def __init__(
        self, launcher: Launcher, meet: Fixed | Dynamic, place: Place, world: Message, job: Message
    ) -> None:
        self.launcher, self.meet, self.place, self.world, self.job = launcher, meet, place, world, job
        self.store, self.ended = place.store, None
        self.beats, self.beaten = 0, 0.0
        self.claim = 0  # which machine this one is, of those where a process failed, by when they said so
        self.failures: dict[int, tuple[float, int]] = {}  # by claim: when, in s of this clock, and where
        self.heard: dict[int, tuple[bytes, float]] = {}

    def run(self) -> Message:
        """Until there is a verdict; then the processes here have ended."""
        verdict = self._watch()
        self.launcher.tell("verdict", **verdict)
        while self.ended is None:
            self._hear(QUICK, judge=False)
            if verdict["kind"] != "lost" and self._is_time():
                self._sign()
        return verdict

    def _watch(self) -> Message:
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        try:
            while True:
                self._hear(QUICK if self.ended or self.claim else self.job["monitor_interval"])
                self._weigh()
                verdict = self._verdict() or self._beat()
                if verdict is not None:
                    return verdict
        except (DistError, RendezvousConnectionError) as error:
            return self._torn(str(error.__cause__ or error).splitlines()[0])

    def _hear(self, seconds: float, *, judge: bool = True) -> None:
        for message in self.launcher.listen(seconds):
            if message["event"] == "ended":
                self.ended = message
            if judge:
                self._judge(message)

    def _judge(self, message: Message) -> None:
        """Tells the others what happened here; of a failure, first of all that there is one."""
        if message["event"] == "failing":
            self.claim = self.store.add("claims", 1)
            said = {"machine": self.place.number, "age": message["age"]}
            self.store.set(f"claim/{self.claim}", json.dumps(said))
        elif message["result"] == "stopped":
            self.post({**message, "kind": "stopped"})
        elif message["result"] != "failed":
            if message["result"] == "resumable":
                self.store.set("resumable", str(message["code"]))
            self.store.add("done", 1)

    def _weigh(self) -> None:
        """Where a process failed: finds out which machine's was the first, and that machine tells of it."""
        if not self.claim:
            return
        if self.claim == 1:
            for claim in range(1, self.store.add("claims", 0) + 1):
                if claim not in self.failures and self.store.check([f"claim/{claim}"]):
                    said = json.loads(self.store.get(f"claim/{claim}"))
                    self.failures[claim] = (time.monotonic() - said["age"], said["machine"])
        if self.ended is None or self.ended["result"] != "failed":
            return
        if self.claim == 1 and not self.store.check(["first"]):
            self.store.set("first", str(min(self.failures.values())[1]))
        if self.store.check(["first"]) and int(self.store.get("first")) == self.place.number:
            restart = self.world["restarts"] < self.world["max_restarts"]
            self.post({**self.ended, "kind": "failed", "restart": restart})

    def post(self, verdict: Message) -> None:
        """Writes the verdict, unless there is one."""
        if self.store.check(["verdict"]):
            return
        who = {"machine": self.place.number, "host": self.job["hostname"]}
        if self.store.add("verdicts", 1) == 1:
            said = {name: value for name, value in verdict.items() if name != "event"}
            self.store.set("verdict", json.dumps({**who, **said}))

    def _verdict(self) -> Message | None:
        if self.store.check(["verdict"]):
            found: Message = json.loads(self.store.get("verdict"))
            return found
        if self.ended is not None and self.store.add("done", 0) >= self.place.count:
            code = int(self.store.get("resumable")) if self.store.check(["resumable"]) else 0
            return {"kind": "done", "code": code}
        return None

    def _beat(self) -> Message | None:
        """A sign of life, and a look for those of others. Machine 0 looks after all, the others after it."""
        if not self._is_time():
            return None
        self._sign()
        now, number, count = time.monotonic(), self.place.number, self.place.count
        for other in range(1, count) if number == 0 else (0,):
            sign = self.store.get(f"beat/{other}") if self.store.check([f"beat/{other}"]) else b""
            before, since = self.heard.setdefault(other, (sign, now))
            if sign != before:
                self.heard[other] = (sign, now)
            elif now - since > self.job["machine_timeout"]:
                return self._lost(other)
        if number == 0 and self._is_open() and self.meet.waiting() > 0:
            self.post({"kind": "join", "restart": True})
        self.launcher.tell("beat")
        return None

    def _is_open(self) -> bool:
        """Whether more machines may join: nobody has finished, who would have to work again."""
        return self.job["least"] < self.job["most"] and self.store.add("done", 0) == 0

    def _is_time(self) -> bool:
        return time.monotonic() > self.beaten + min(BEAT, self.job["machine_timeout"] / 4)

    def _sign(self) -> None:
        self.beats += 1
        self.store.set(f"beat/{self.place.number}", str(self.beats))
        self.beaten = time.monotonic()

    def _lost(self, other: int) -> Message:
        host = self.world["hosts"][other]
        verdict = {
            "kind": "lost",
            "lost": other,
            "lost_host": host,
            "why": f"there was no word from it for {self.job['machine_timeout']:g} s (--machine_timeout)",
            "restart": self.job["least"] < self.place.count,  # the store still answers
        }
        self.post(verdict)
        return {"machine": self.place.number, "host": self.job["hostname"], **verdict}

    def _torn(self, why: str) -> Message:
        """The store does not answer: it went with the machine that holds it."""
        host = self.world["hosts"][0] if self.job["backend"] == "static" else self.job["host"]
        number = 0 if self.job["backend"] == "static" else None
        return {"kind": "lost", "lost": number, "lost_host": host, "why": why, "restart": False, "torn": True}

    def settle(self, verdict: Message) -> Message | None:
        """Waits until no process of the attempt is left anywhere; a machine lost meanwhile is a verdict."""
        self.store.add("stopped", 1)
        expected = self.place.count - (verdict["kind"] == "lost")
        while self.store.add("stopped", 0) < expected:
            if verdict["kind"] != "lost" and (found := self._beat()) is not None:
                return found
            time.sleep(QUICK)
        return None

    def leave(self, verdict: Message) -> None:
        """Stays until all have heard the verdict, for the store goes with the machine that holds it."""
        from torch.distributed import DistError

        if verdict.get("torn"):
            return
        deadline = time.monotonic() + LEAVE
        expected = self.place.count - (verdict["kind"] == "lost")
        try:
            self.store.add("left", 1)
            while self.store.add("left", 0) < expected and time.monotonic() < deadline:
                time.sleep(QUICK)
        except DistError:  # it has gone: all had heard
            return


def run(launcher: Launcher, job: Message) -> None:
    """Meets, watches, and meets again until the job is over.

    Raises:
        LaunchError: the machines do not find each other.
    """
    number = job["machine_rank"] if job["backend"] == "static" else 1 - meeting.is_here(job["host"])
    names = min(NAMES, job["join"])
    preflight.meet(job["host"], job["port"], number, seconds=names, say=_say, reach=False)
    meet = Fixed(job) if job["backend"] == "static" else Dynamic(job)
    restarts = 0
    held: list[Any] = []  # the ranks' store, as long as they need it
    while True:
        place = meet.next()
        if place.number == 0:
            held[:] = [meeting.open_store(place, job["join"])]
        world = agree(place, job, restarts)
        launcher.tell("start", **world)
        attempt = Attempt(launcher, meet, place, world, job)
        verdict = attempt.run()
        if verdict.get("restart"):
            verdict = attempt.settle(verdict) or verdict
            launcher.tell("meeting")
        if not verdict.get("restart"):
            launcher.tell("over", **verdict)
            if place.number == 0 and not verdict.get("torn"):
                meet.close()
            attempt.leave(verdict)
            return
        restarts = world["restarts"] + (verdict["kind"] == "failed")


def agree(place: Place, job: Message, restarts: int) -> Message:
    """What the machines of an attempt know of each other: who is there, whose ranks are which."""
    address = meeting.local_address(job["host"], job["port"])
    mine = {"host": job["hostname"], "processes": job["processes"], "restarts": restarts}
    mine["facts"] = job["facts"]
    place.store.set(f"machine/{place.number}", json.dumps(mine))
    if place.number == 0:
        those = [json.loads(place.store.get(f"machine/{number}")) for number in range(place.count)]
        different = preflight.compare([each["facts"] for each in those], [each["host"] for each in those])
        common = {
            "different": different and [different.what, different.why, different.fix],
            "hosts": [each["host"] for each in those],
            "processes": [each["processes"] for each in those],
            "restarts": max(each["restarts"] for each in those),
            "max_restarts": job["max_restarts"],
            "address": place.address,
            "port": place.port,
        }
        place.store.set("world", json.dumps(common))
    world: Message = json.loads(place.store.get("world"))
    if different := world.pop("different"):
        _refuse(place, *different)
    first, size = sum(world["processes"][: place.number]), sum(world["processes"])
    own = {"machine": place.number, "machines": place.count, "first": first, "size": size}
    return {**world, **own, "interface": meeting.interface(address)}


def _refuse(place: Place, what: str, why: str, fix: str) -> None:
    """Raises what all machines raise; the one with the store stays until all have read it."""
    deadline = time.monotonic() + LEAVE
    place.store.add("refused", 1)
    while place.number == 0 and place.store.add("refused", 0) < place.count and time.monotonic() < deadline:
        time.sleep(QUICK)
    raise LaunchError(what, why=why, fix=fix)


def _say(line: str) -> None:
    print(f"accelerate launch: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs until the job is over. It leaves at once then: threads of a library may hang."""
    launcher = Launcher()
    (job,) = launcher.listen(60.0)
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    job["hostname"] = socket.gethostname()
    try:
        run(launcher, job)
    except AccelerateError as error:
        launcher.tell("error", what=error.what, why=error.why, fix=error.fix)
    except (RendezvousError, DistError) as error:
        why = str(error.__cause__ or error).splitlines()
        launcher.tell(
            "error",
            what=f"the machines did not find each other at {job['host']}:{job['port']}",
            why=f"{type(error).__name__}: {why[0] if why else ''}",
            fix="",
        )
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
