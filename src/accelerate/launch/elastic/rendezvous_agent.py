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
Torch's own ``LocalElasticAgent`` has no such verdict: ``elastic/__init__.py`` says what it does instead.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path: this folder is no place for modules, and the package may not be on the path.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from accelerate.core.errors import AccelerateError, LaunchError
from accelerate.launch.elastic import rendezvous
from accelerate.launch.elastic.rendezvous import DynamicRendezvous, RendezvousInfo, StaticRendezvous
from accelerate.world.network import find_rank_interface

HEARTBEAT_SECONDS = 1.0  # seconds between signs of life
LEAVE_SECONDS = 5.0  # seconds that machines stay for others to hear the last verdict
RESOLVE_SECONDS = 60.0  # seconds that the name of machine 0 may take to exist
POLL_SECONDS = 0.02  # seconds between looks when this machine has nothing left to do; they become fewer

Message = dict[str, Any]


class AgentLauncherPipe:
    """The pipes between the agent and its launcher."""

    def __init__(self) -> None:
        # Whatever libraries print goes to stderr; the pipe is ours.
        self.pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.unread = b""

    def send(self, event: str, **more: Any) -> None:
        """Send a message to the launcher."""
        self.pipe.write(json.dumps({"event": event, **more}) + "\n")
        self.pipe.flush()

    def read_messages(self, seconds: float) -> list[Message]:
        """Return the launcher's messages within some seconds; exit if the launcher is gone."""
        ready, _, _ = select.select([0], [], [], seconds)
        if not ready:
            return []
        chunk = os.read(0, 65536)
        if not chunk:
            os._exit(1)
        *lines, self.unread = (self.unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


class AttemptCoordinator:
    """One attempt of all machines, as this one sees it.

    Args:
        launcher: of this machine.
        rendezvous_handler: how the machines met.
        info: where they exchange words.
        world: what all agreed on.
        job: what the launcher said.

    Attributes:
        local_result: how the processes here ended, None before.
        ended_at: when that was, in s of this clock.
    """

    def __init__(
        self,
        launcher: AgentLauncherPipe,
        rendezvous_handler: StaticRendezvous | DynamicRendezvous,
        info: RendezvousInfo,
        world: Message,
        job: Message,
    ) -> None:
        self.launcher, self.rendezvous_handler = launcher, rendezvous_handler
        self.info, self.world, self.job = info, world, job
        self.store, self.local_result, self.ended_at = info.store, None, 0.0
        self.heartbeat_count, self.last_heartbeat = 0, 0.0
        self.heartbeat_interval = min(HEARTBEAT_SECONDS, job["machine_timeout"] / 4)
        self.claim = 0  # which machine this one is, of those where a process failed, by when they said so
        # By claim: when, in s of this clock, and where.
        self.failure_claims: dict[int, tuple[float, int]] = {}
        self.first_claim = 0  # of those that stand, as the machine with claim 1 has decided
        self.last_seen: dict[int, tuple[bytes, float]] = {}
        self.lost_machines: set[int] = set()  # that this one has found

    def run(self) -> Message:
        """Run until there is a verdict and the processes of this machine have ended."""
        from torch.distributed import DistError

        verdict = self._monitor()
        self.launcher.send("verdict", **verdict)
        while self.local_result is None:
            self._read_launcher(POLL_SECONDS, judge=False)
            if not verdict.get("torn") and self._is_heartbeat_due():
                with suppress(DistError):  # the machine with the store has left: the processes here end later
                    self._send_heartbeat()
        return verdict

    def _monitor(self) -> Message:
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        try:
            while True:
                # The signs of life of all machines, and how long a verdict can be read, do not wait for more.
                interval = min(self.job["monitor_interval"], self.heartbeat_interval)
                if self.local_result is not None:
                    interval = self._growing_pause(self.ended_at)
                self._read_launcher(POLL_SECONDS if self.claim else interval)
                self._decide_first_failure()
                verdict = self._read_verdict() or self._check_heartbeats()
                if verdict is not None:
                    return verdict
        except (DistError, RendezvousConnectionError) as error:
            return self._lost_store_verdict(str(error.__cause__ or error).splitlines()[0])

    def _growing_pause(self, since: float) -> float:
        """Return the seconds until the next look at the store: a tenth of the wait so far.

        All machines that have ended wait so for the last one, and the store is one thread on machine 0.
        """
        return min(self.heartbeat_interval, max(POLL_SECONDS, (time.monotonic() - since) / 10))

    def _read_launcher(self, seconds: float, *, judge: bool = True) -> None:
        for message in self.launcher.read_messages(seconds):
            if message["event"] == "ended":
                self.local_result, self.ended_at = message, time.monotonic()
            if judge:
                self._report_local_event(message)

    def _report_local_event(self, message: Message) -> None:
        """Tell the others what happened here; of a failure, first of all that there is one."""
        if message["event"] == "failing":
            self.claim = self.store.add("claims", 1)
            failure_claim = {"machine": self.info.machine_rank, "age": message["age"]}
            self.store.set(f"claim/{self.claim}", json.dumps(failure_claim))
        elif message["result"] == "stopped":
            self.post_verdict({**message, "kind": "stopped"})
        elif message["result"] != "failed":
            if self.claim:  # a process has left a traceback, and has ended well
                self.store.set(f"withdrawn/{self.claim}", "")
            if message["result"] == "resumable":
                self.store.set("resumable", str(message["code"]))
            self.store.add("done", 1)

    def _decide_first_failure(self) -> None:
        """Decide which machine failed first; that machine posts the verdict.

        The one that spoke first decides, also where its own processes have ended well after all.
        """
        if not self.claim:
            return
        if self.claim == 1:
            for claim in range(1, self.store.add("claims", 0) + 1):
                if claim not in self.failure_claims and self.store.check([f"claim/{claim}"]):
                    failure_claim = json.loads(self.store.get(f"claim/{claim}"))
                    when = time.monotonic() - failure_claim["age"]
                    self.failure_claims[claim] = when, failure_claim["machine"]
        if self.local_result is None:
            return
        if self.claim == 1:
            standing = [c for c in self.failure_claims if not self.store.check([f"withdrawn/{c}"])]
            if standing and self.first_claim not in standing:
                self.first_claim = min(standing, key=self.failure_claims.__getitem__)
                self.store.set("first", str(self.failure_claims[self.first_claim][1]))
        if self.local_result["result"] != "failed":
            return
        if self.store.check(["first"]) and int(self.store.get("first")) == self.info.machine_rank:
            restart = self.world["restarts"] < self.world["max_restarts"]
            self.post_verdict({**self.local_result, "kind": "failed", "restart": restart})

    def post_verdict(self, verdict: Message) -> None:
        """Write the verdict, unless there is one."""
        if self.store.check(["verdict"]):
            return
        who = {"machine": self.info.machine_rank, "host": self.job["hostname"]}
        if self.store.add("verdicts", 1) == 1:
            fields = {name: value for name, value in verdict.items() if name != "event"}
            self.store.set("verdict", json.dumps({**who, **fields}))

    def _read_verdict(self) -> Message | None:
        if self.store.check(["verdict"]):
            verdict: Message = json.loads(self.store.get("verdict"))
            return verdict
        if self.local_result is not None and self.store.add("done", 0) >= self.info.machine_count:
            code = int(self.store.get("resumable")) if self.store.check(["resumable"]) else 0
            return {"kind": "done", "code": code}
        return None

    def _check_heartbeats(self) -> Message | None:
        """A sign of life, and a look for those of others. Machine 0 looks after all, the others after it."""
        if not self._is_heartbeat_due():
            return None
        self._send_heartbeat()
        now, number, count = time.monotonic(), self.info.machine_rank, self.info.machine_count
        for other in set(range(1, count) if number == 0 else (0,)) - self.lost_machines:
            sign = self.store.get(f"beat/{other}") if self.store.check([f"beat/{other}"]) else b""
            before, since = self.last_seen.setdefault(other, (sign, now))
            if sign != before:
                self.last_seen[other] = (sign, now)
            elif now - since > self.job["machine_timeout"]:
                return self._post_lost_machine(other)
        # More machines may join only while no machine has finished.
        accepts = number == 0 and self.job["least"] < self.job["most"] and self.store.add("done", 0) == 0
        if accepts and self.rendezvous_handler.num_machines_waiting() > 0:
            self.post_verdict({"kind": "join", "restart": True})
        self.launcher.send("beat")
        return None

    def _is_heartbeat_due(self) -> bool:
        return time.monotonic() > self.last_heartbeat + self.heartbeat_interval

    def _send_heartbeat(self) -> None:
        self.heartbeat_count, self.last_heartbeat = self.heartbeat_count + 1, time.monotonic()
        self.store.set(f"beat/{self.info.machine_rank}", str(self.heartbeat_count))

    def _post_lost_machine(self, other: int) -> Message:
        self.lost_machines.add(other)
        host = self.world["hosts"][other]
        verdict = {
            "kind": "lost",
            "lost": other,
            "lost_host": host,
            "why": f"there was no word from it for {self.job['machine_timeout']:g} s (--machine_timeout)",
            "restart": self.job["least"] < self.info.machine_count,  # the store still answers
        }
        self.post_verdict(verdict)
        return {"machine": self.info.machine_rank, "host": self.job["hostname"], **verdict}

    def _lost_store_verdict(self, why: str) -> Message:
        """The store does not answer: it went with the machine that holds it."""
        host = self.world["hosts"][0] if self.job["backend"] == "static" else self.job["host"]
        number = 0 if self.job["backend"] == "static" else None
        return {"kind": "lost", "lost": number, "lost_host": host, "why": why, "restart": False, "torn": True}

    def wait_all_stopped(self, verdict: Message) -> Message | None:
        """Wait until no process of the attempt is left on any machine that is not lost.

        Returns:
            The verdict on a machine that was lost meanwhile, if there was none on another one before.
        """
        began = time.monotonic()
        self._count_stopped(self.info.machine_rank)
        expected = self.info.machine_count - (verdict["kind"] == "lost")
        while self.store.add("stopped", 0) < expected:
            lost_verdict = self._check_heartbeats()
            if lost_verdict is not None and verdict["kind"] != "lost":
                return lost_verdict
            if lost_verdict is not None and lost_verdict["lost"] != verdict["lost"]:
                self._count_stopped(lost_verdict["lost"])  # several were lost at once
            time.sleep(self._growing_pause(began))
        return None

    def _count_stopped(self, machine: int) -> None:
        """Count a machine once, also where it is lost after it has counted itself."""
        if self.store.add(f"stopped/{machine}", 1) == 1:
            self.store.add("stopped", 1)

    def wait_verdict_read(self, verdict: Message) -> None:
        """Stay until all have heard the verdict, for the store goes with the machine that holds it."""
        from torch.distributed import DistError

        if verdict.get("torn"):
            return
        deadline = time.monotonic() + LEAVE_SECONDS
        expected = self.info.machine_count - (verdict["kind"] == "lost")
        try:
            self.store.add("left", 1)
            while self.store.add("left", 0) < expected and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except DistError:  # it has gone: all had heard
            return


def run_job(launcher: AgentLauncherPipe, job: Message) -> None:
    """Meet, watch, and meet again until the job is over.

    Raises:
        LaunchError: the machines do not find each other.
    """
    is_static = job["backend"] == "static"
    number = job["machine_rank"] if is_static else 1 - rendezvous.is_this_machine(job["host"])
    names = min(RESOLVE_SECONDS, job["join"])
    rendezvous.check_meeting_point(job["host"], number, seconds=names, say=_print_line)
    rendezvous_handler = StaticRendezvous(job) if is_static else DynamicRendezvous(job)
    restarts = 0
    stores: list[Any] = []  # the ranks' store, as long as they need it
    while True:
        info = rendezvous_handler.next_rendezvous()
        if info.machine_rank == 0:
            stores[:] = [rendezvous.open_store(info, job["join"])]
        world = exchange_machine_info(info, job, restarts)
        launcher.send("start", **world)
        attempt = AttemptCoordinator(launcher, rendezvous_handler, info, world, job)
        verdict = attempt.run()
        if verdict.get("restart"):
            verdict = attempt.wait_all_stopped(verdict) or verdict
            launcher.send("meeting")
        if not verdict.get("restart"):
            launcher.send("over", **verdict)
            if info.machine_rank == 0 and not verdict.get("torn"):
                rendezvous_handler.shutdown()
            attempt.wait_verdict_read(verdict)
            return
        restarts = world["restarts"] + (verdict["kind"] == "failed")


def exchange_machine_info(info: RendezvousInfo, job: Message, restarts: int) -> Message:
    """Exchange hosts, process counts and first ranks between the machines of an attempt."""
    local_info = {"host": job["hostname"], "processes": job["processes"], "restarts": restarts}
    local_info["facts"] = job["facts"]
    info.store.set(f"machine/{info.machine_rank}", json.dumps(local_info))
    if info.machine_rank == 0:
        those = [json.loads(info.store.get(f"machine/{number}")) for number in range(info.machine_count)]
        different = rendezvous.compare_machines(
            [each["facts"] for each in those], [each["host"] for each in those]
        )
        common = {
            "different": different and [different.what, different.why, different.fix],
            "hosts": [each["host"] for each in those],
            "processes": [each["processes"] for each in those],
            "restarts": max(each["restarts"] for each in those),
            "max_restarts": job["max_restarts"],
            "address": info.address,
            "port": info.port,
        }
        info.store.set("world", json.dumps(common))
    world: Message = json.loads(info.store.get("world"))
    if different := world.pop("different"):
        _raise_on_all_machines(info, *different)
    first, size = sum(world["processes"][: info.machine_rank]), sum(world["processes"])
    position = {"machine": info.machine_rank, "machines": info.machine_count, "first": first, "size": size}
    return {**world, **position, "interface": find_rank_interface(job["host"])}


def _raise_on_all_machines(info: RendezvousInfo, what: str, why: str, fix: str) -> None:
    """Raise what all machines raise; the one with the store stays until all have read it."""
    deadline = time.monotonic() + LEAVE_SECONDS
    info.store.add("refused", 1)
    while info.machine_rank == 0 and time.monotonic() < deadline:
        if info.store.add("refused", 0) >= info.machine_count:
            break
        time.sleep(POLL_SECONDS)
    raise LaunchError(what, why=why, fix=fix)


def _print_line(line: str) -> None:
    print(f"accelerate launch: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Run until the job is over. It leaves at once then: threads of a library may hang."""
    # Schedulers signal every process of a job. This one stays as long as its launcher has something to say.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    launcher = AgentLauncherPipe()
    (job,) = launcher.read_messages(60.0)
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    job["hostname"] = socket.gethostname()
    try:
        run_job(launcher, job)
    except AccelerateError as error:
        launcher.send("error", what=error.what, why=error.why, fix=error.fix)
    except (RendezvousError, DistError) as error:
        lines = str(error.__cause__ or error).splitlines()
        launcher.send(
            "error",
            what=f"the machines did not find each other at {job['host']}:{job['port']}",
            why=f"{type(error).__name__}: {lines[0] if lines else ''}",
            fix="",
        )
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
