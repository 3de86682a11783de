"""Restarts, and several machines that are launches on one host: what is said, and that nothing is left."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from accelerate.core.errors import LaunchError, RankError
from accelerate.launch.elastic import attempts, rendezvous, rendezvous_agent
from accelerate.launch.supervisor import GuardProcess, SignalAndChildExitWaiter
from accelerate.world.signals import SignalHandler
from tests.support.command import CONSOLE, Finished, Running, launch, start
from tests.support.free_ports import free_port
from tests.support.preemption import ARMED

ONE = {"OMP_NUM_THREADS": "1"}
# What a rank was told, as one line of JSON; no torch, so that it is quick.
TELL = """
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
         "ROLE_RANK", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
         "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")
told = {name: os.environ.get(name) for name in names}
rank, count = int(told["RANK"]), told["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(json.dumps(told) + "\\n")
sys.stdout.flush()
"""
# The same, and then the ranks meet.
MEET = f"""{TELL}
import datetime
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
dist.barrier()
"""


def told(stdout: str) -> list[dict[str, str]]:
    """What the ranks said, in order."""
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]


def machines(script: str, *flags: str, count: int = 2, own: bool = True) -> list[Running]:
    """Several launches as machines; ``own`` gives each its number and a place to meet."""
    port = str(free_port())
    place = ("--main_process_ip", "127.0.0.1", "--main_process_port", port)
    jobs: list[Running] = []
    for number in range(count):
        mine = (*place, "--machine_rank", str(number)) if own else ("--rdzv_endpoint", f"127.0.0.1:{port}")
        common = ("--cpu", "--num_machines", str(count), "--stop_timeout", "2")
        jobs.append(start(*common, *mine, *flags, script_text=script, env=ONE))
    return jobs


def ends(jobs: list[Running], timeout: float = 50) -> list[Finished]:
    """How they ended; nothing is left of any."""
    __tracebackhide__ = True
    results = [job.wait(timeout) for job in jobs]
    assert [result.survivors() for result in results] == [[]] * len(jobs)
    return results


# ---------------------------------------------------------------- one machine


def test_a_rank_that_fails_once_is_started_again_with_the_others(tmp_path: Path) -> None:
    script = f"""{TELL}
if rank == 1 and count == "0":
    os._exit(7)
"""
    result = launch(
        *("--cpu", "-n", "2", "--max_restarts", "2", "--log_dir", str(tmp_path)), script_text=script, env=ONE
    )
    assert result.returncode == 0, result.output
    again = r"accelerate launch: rank 1 of 2 failed \(exit code 7\).*; restart 1 of 2\n"
    assert re.fullmatch(again, result.stderr), result.stderr
    for rank in (0, 1):
        log = told((tmp_path / f"rank_{rank}.log").read_text())
        assert [each["TORCHELASTIC_RESTART_COUNT"] for each in log] == ["0", "1"]
        assert {each["TORCHELASTIC_MAX_RESTARTS"] for each in log} == {"2"}
    assert result.survivors() == []


def test_a_job_whose_folder_was_cleaned_away_starts_again() -> None:
    """After some days in /tmp."""
    script = f"""{TELL}
if rank == 1 and count == "0":
    import pathlib, shutil
    folder = pathlib.Path(os.environ["ACCELERATE_STOP_FOLDER"])
    shutil.rmtree(folder.parent if folder.name.startswith("attempt") else folder, ignore_errors=True)
    os._exit(7)
"""
    result = launch("--cpu", "-n", "2", "--max_restarts", "1", script_text=script, env=ONE)
    assert result.returncode == 0, result.output
    assert result.stderr.endswith("; restart 1 of 1\n")


def test_when_restarts_are_used_up_the_last_traceback_is_the_last_word() -> None:
    script = f"{TELL}\nif rank == 1: raise ValueError(f'no data, {{count}}')\ntime.sleep(60)"
    result = launch(*("--cpu", "-n", "2", "--max_restarts", "1"), script_text=script, env=ONE)
    assert result.returncode == 1
    first, _, last = result.stderr.partition("restart 1 of 1\n")
    assert first.startswith(
        "accelerate launch: the attempt that failed ended in\nTraceback (most recent call last"
    )
    assert "\nValueError: no data, 0\naccelerate launch: rank 1 of 2 failed (exit code 1)" in first
    assert last.rstrip().endswith("ValueError: no data, 1")
    assert "restart" not in last
    assert len(told(result.stdout)) == 4
    quiet = launch(*("--cpu", "-n", "2", "--max_restarts", "1", "--quiet"), script_text=script, env=ONE)
    assert "no data, 0" not in quiet.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_job_that_is_stopped_is_not_started_again(number: int, code: int) -> None:
    """F8."""
    script = f"{TELL}\ntime.sleep(60)"
    job = start(*("--cpu", "-n", "2", "--max_restarts", "3"), script_text=script, env=ONE)
    job.wait_for('"RANK": "1"')
    job.wait_for('"RANK": "0"')
    job.signal(number)
    (result,) = ends([job])
    assert result.returncode == code
    assert len(told(result.stdout)) == 2


def test_restarts_on_one_machine_need_no_torch_in_the_launcher() -> None:
    """Law 8 holds as long as nobody has to meet."""
    command = [sys.executable, "-X", "importtime", "-m", "accelerate", "launch", "--cpu", "-n", "2"]
    result = Running([*command, "--max_restarts", "1"], script_text=TELL, env=ONE).wait()
    assert result.returncode == 0, result.output
    assert "accelerate.launch.supervisor" in result.stderr
    assert "accelerate.launch.elastic" not in result.stderr
    assert "| torch\n" not in result.stderr


# ---------------------------------------------------------------- several machines, with numbers


@pytest.fixture(scope="module")
def static_job() -> list[Finished]:
    """Two machines with two ranks each; rank 3 fails in the first attempt, and again in the second."""
    script = f"""{TELL}
if rank == 3:
    if count == "0":
        os._exit(7)
    raise ValueError("no data")
time.sleep(60)
"""
    flags = ("--num_processes", "4", "--mixed_precision", "bf16", "--tee", "1", "--max_restarts", "1")
    return ends(machines(script, *flags))


def test_ranks_of_several_machines_are_told_torchruns_protocol(static_job: list[Finished]) -> None:
    """--num_processes counts all of them; options reach the scripts on every machine."""
    for number, result in enumerate(static_job):
        marked = [line.split("] ", 1) for line in result.stdout.splitlines()]
        lines = [(mark, json.loads(line)) for mark, line in marked if line.startswith("{")]
        assert {mark for mark, _ in lines} == {f"[rank {2 * number}", f"[rank {2 * number + 1}"}
        attempts = {(each["TORCHELASTIC_RESTART_COUNT"], int(each["LOCAL_RANK"])): each for _, each in lines}
        assert len(lines) == len(attempts) == 4
        for (attempt, local), each in attempts.items():
            assert each == {
                "RANK": str(2 * number + local),
                "ROLE_RANK": str(2 * number + local),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RESTART_COUNT": attempt,
                "TORCHELASTIC_MAX_RESTARTS": "1",
                "TORCHELASTIC_RUN_ID": "none",
                "ACCELERATE_USE_CPU": "true",
                "ACCELERATE_MIXED_PRECISION": "bf16",
            }
        assert {attempt for attempt, _ in attempts} == {"0", "1"}


def test_a_failure_is_told_on_every_machine_with_its_host_and_its_traceback_last(
    static_job: list[Finished],
) -> None:
    on = f"on {socket.gethostname()} (machine 1): rank 3 of 4 failed"
    for result in static_job:
        assert result.returncode == 1
        first, _, last = result.stderr.partition("restart 1 of 1\n")
        assert f"{on} (exit code 7)" in first, result.output
        assert f"{on} (exit code 1)" in last, result.output
        assert "restart" not in last
        assert result.stderr.rstrip().endswith("ValueError: no data")
        assert 'raise ValueError("no data")' in result.stderr


def test_a_crash_is_recovered_when_machines_number_themselves() -> None:
    script = (
        f"{MEET}\nif rank == 1 and count == '0': os._exit(7)\ndist.barrier()\ndist.destroy_process_group()"
    )
    flags = ("--rdzv_backend", "c10d", "--nproc_per_node", "1", "--max_restarts", "3")
    results = ends(machines(script, *flags, own=False))
    assert [result.returncode for result in results] == [0, 0], results[0].output + results[1].output
    for result in results:
        # All count alike, whoever crashed.
        assert [each["TORCHELASTIC_RESTART_COUNT"] for each in told(result.stdout)] == ["0", "1"]
        assert result.stderr.count("restart 1 of 3") == 1


def test_two_machines_with_one_number_are_told() -> None:
    port = str(free_port())
    flags = ("--cpu", "--nnodes", "3", "--nproc_per_node", "1", "--node_rank")
    place = ("--master_addr", "127.0.0.1", "--master_port", port)
    first, *same = [start(*flags, number, *place, script_text=TELL, env=ONE) for number in ("0", "1", "1")]
    ends_of = {os.pidfd_open(job.pid): job for job in same}
    (ended, *_), _, _ = select.select(list(ends_of), [], [], 50)
    result = ends_of[ended].wait()
    for descriptor in ends_of:
        os.close(descriptor)
    assert result.returncode == 2
    assert "two machines say that they are number 1" in result.stderr
    for job in (first, *same):
        job.kill()


def test_a_launch_that_is_started_again_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed while the others waited for one more machine, and nobody goes on with what it left."""
    monkeypatch.setattr(rendezvous, "SIGN_SECONDS", 0.2)
    job = {"host": "127.0.0.1", "port": free_port(), "id": "job", "most": 3, "machine_timeout": 20.0}
    handlers: list[rendezvous.StaticRendezvous] = []  # that of machine 0 holds the store

    def launch_machine(number: int) -> rendezvous.StaticRendezvous:
        handlers.append(rendezvous.StaticRendezvous({**job, "machine_rank": number, "join": 20.0}))
        return handlers[-1]

    def meet(handler: rendezvous.StaticRendezvous, seconds: float = 20.0) -> str:
        handler.join_timeout = seconds
        try:
            return str(handler.next_rendezvous().machine_rank)
        except LaunchError as error:
            return error.what

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, launch_machine(0))
        assert "2 of 3 did not come within 1 s" in meet(launch_machine(1), 1.0)
        time.sleep(0.3)
        assert meet(launch_machine(2), 0.6).startswith("machines 1")
        time.sleep(0.3)  # its last sign is old then, so that the next one counts
        others = [pool.submit(meet, launch_machine(number)) for number in (1, 2)]
        assert [each.result() for each in (first, *others)] == ["0", "1", "2"]
        assert meet(launch_machine(1)) == "two machines say that they are number 1"


def test_a_machine_0_that_does_not_come_is_told_in_a_sentence() -> None:
    """torch itself writes forty lines of C++ frames."""
    place = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "--machine_rank", "1")
    result = launch(
        *("--cpu", "--num_machines", "2", "-n", "2", *place, "--rdzv_conf", "join_timeout=2"),
        script_text=TELL,
        env=ONE,
    )
    first, second, *_ = result.stderr.splitlines()
    assert "waiting for the other machines" in first
    assert "machine 0 does not answer" in second


def test_a_signal_to_one_launcher_ends_the_job_on_all() -> None:
    """F8."""
    jobs = machines(f"{TELL}\ntime.sleep(60)", "--nproc_per_node", "1")
    for job in jobs:
        job.wait_for('"RANK"')
    jobs[1].signal(signal.SIGTERM)
    results = ends(jobs)
    assert [result.returncode for result in results] == [143, 143]
    assert f"on {socket.gethostname()} (machine 1): stopped by SIGTERM" in results[0].stderr


def test_a_launcher_that_is_killed_leaves_nothing_and_is_missed() -> None:
    """F8: its guard ends agent and ranks; the other machine hears nothing more."""
    jobs = machines(f"{TELL}\ntime.sleep(60)", "--nproc_per_node", "1", "--machine_timeout", "3")
    for job in jobs:
        job.wait_for('"RANK"')
    jobs[1].signal(signal.SIGKILL)
    results = ends(jobs)
    assert results[0].returncode == 1
    assert f"machine 1 ({socket.gethostname()}) is lost" in results[0].stderr


# ---------------------------------------------------------------- as they come


def test_a_machine_joins_a_job_that_runs_which_goes_on_when_it_is_lost() -> None:
    """Where fewer machines will do. The one that holds the store must stay."""
    script = f"""{TELL}
if told["WORLD_SIZE"] == "2":
    open("has_been_two", "w").close()
while told["WORLD_SIZE"] == "2" or not os.path.exists("has_been_two"):
    time.sleep(0.05)
"""
    port = str(free_port())
    flags = ("--cpu", "--nnodes", "1:2", "--nproc_per_node", "1", "--rdzv_backend", "c10d")
    place = ("--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_conf", "last_call_timeout=1")
    first = start(*flags, *place, "--machine_timeout", "4", script_text=script, env=ONE)
    first.wait_for('"WORLD_SIZE": "1"')
    second = start(*flags, *place, "--machine_timeout", "4", script_text=script, env=ONE)
    for job in (first, second):
        job.wait_for('"WORLD_SIZE": "2"')
    second.signal(signal.SIGKILL)
    result, lost = ends([first, second])
    assert result.returncode == 0, result.output
    assert [each["WORLD_SIZE"] for each in told(result.stdout)] == ["1", "2", "1"]
    assert [each["WORLD_SIZE"] for each in told(lost.stdout)] == ["2"]
    assert "another machine has come" in result.stderr
    assert "is lost" in result.stderr
    # A machine that comes is no failure.
    assert [each["TORCHELASTIC_RESTART_COUNT"] for each in told(result.stdout)][:2] == ["0", "0"]


# ---------------------------------------------------------------- an agent that hangs


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event": "start"}\\n{"event": "beat"}\\n{"event": "verdict"}\\n', end="", flush=True)
time.sleep(60)
"""


def test_an_agent_that_ignores_everything_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's does in a call to a machine that is gone: it hears no signal but the last one."""
    (tmp_path / "agent.py").write_text(DEAF)
    monkeypatch.setattr(attempts, "AGENT_FILE", str(tmp_path / "agent.py"))
    with GuardProcess(0.5) as guard:
        agent = attempts.ElasticAgentProcess({}, guard)
        select.select([agent.output], [], [], 30)
        # The launcher stops at the first, and starts its processes.
        assert next(agent.read_messages()) == {"event": "start"}
        assert list(agent.read_messages()) == [{"event": "verdict"}]
        assert agent.finish() == -signal.SIGKILL


# Tells of two failures on machine 0, and that the job is over when the processes here have ended.
TELLS_VERDICTS = """
import json, sys
world = {"machine": 1, "hosts": ["other", "own"], "size": 2, "first": 1, "restarts": 0, "max_restarts": 1}
verdict = {"kind": "failed", "machine": 0, "host": "other", "what": "rank 0 of 2 failed", "code": 7,
           "told": "it failed", "traceback": "ValueError: no data"}
for restart in (True, False):
    sys.stdin.readline()
    print(json.dumps({"event": "start", **world}))
    print(json.dumps({"event": "verdict", **verdict, "restart": restart}), flush=True)
sys.stdin.readline()
print(json.dumps({"event": "over", **verdict}), flush=True)
"""


def test_a_failure_is_told_where_processes_take_long_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Longer than a machine may be silent, and than the store of a machine that has ended is there."""
    (tmp_path / "agent.py").write_text(TELLS_VERDICTS)
    monkeypatch.setattr(attempts, "AGENT_FILE", str(tmp_path / "agent.py"))

    def run(create: Any, variables: Any, **options: Any) -> tuple[Any, None]:
        while not create.keywords["should_cancel"](SimpleNamespace(has_failed=False)):
            time.sleep(0.01)
        agent.last_contact -= 100
        return SimpleNamespace(was_cancelled=True), None

    job = {"machine_timeout": 60.0, "join": 60.0, "backend": "static"}
    local: Any = SimpleNamespace(run=run, signals=SimpleNamespace(wait=lambda *at: b""))  # a signal is left
    with GuardProcess(0.5) as guard:
        agent = attempts.ElasticAgentProcess(job, guard)
        runner = attempts.MultiMachineAttemptRunner(
            local, agent, lambda world: [], job, "other:1", lambda line: print(line, file=sys.stderr)
        )
        with pytest.raises(RankError, match=r"on other \(machine 0\): rank 0 of 2 failed"):
            runner.run()
    restart = "on other (machine 0): it failed; restart 1 of 1\n"
    assert capfd.readouterr().err == f"the attempt that failed ended in\nValueError: no data\n{restart}"

    class StoreOfEndedMachine(dist.HashStore):  # pyright: ignore[reportPrivateImportUsage] - documented
        def set(self, key: str, value: str) -> None:
            script.append((1, ENDED_WELL))
            raise dist.DistNetworkError("Broken pipe")

    store, script = StoreOfEndedMachine(), list[tuple[int, dict[str, Any]]]()
    dist.HashStore.set(store, "verdict", json.dumps({"kind": "failed"}))  # pyright: ignore
    info = rendezvous.RendezvousInfo(store, 1, 2, "")
    launcher: Any = ScriptedLauncher(script, 1)
    job |= {"monitor_interval": 0.1}
    coordinator = rendezvous_agent.AttemptCoordinator(launcher, cast("Any", None), info, {}, job)
    assert coordinator.run() == {"kind": "failed"}


# ---------------------------------------------------------------- who failed first

FAILED = {"event": "ended", "result": "failed", "code": 7}
ENDED_WELL = {"event": "ended", "result": "ok"}


@dataclass
class ScriptedLauncher:
    """The pipe to the launcher of one machine; what the launchers say comes in one order for all."""

    script: list[tuple[int, dict[str, Any]]]
    machine: int
    longest_wait: float = 0.0

    def send(self, event: str, **more: Any) -> None:
        """Hear what the agent says."""

    def read_messages(self, seconds: float) -> list[dict[str, Any]]:
        self.longest_wait = max(self.longest_wait, seconds)
        time.sleep(0.001)
        return [self.script.pop(0)[1]] if self.script and self.script[0][0] == self.machine else []


def run_two_agents(run: Callable[[int], None]) -> None:
    """Run the agents of machines 0 and 1 side by side, for 20 s at most each."""
    threads = [threading.Thread(target=run, args=(machine,), daemon=True) for machine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize(
    ("script", "blamed"),
    [
        ([(0, 1.0), (1, 2.0), (1, FAILED), (0, ENDED_WELL)], 1),
        ([(0, 1.0), (1, 2.0), (0, FAILED), (1, ENDED_WELL)], 0),
        ([(0, 1.0), (0, ENDED_WELL), (1, 2.0), (1, FAILED)], 1),
        ([(0, 2.0), (1, 1.0), (1, FAILED), (0, FAILED)], 0),
    ],
)
def test_a_machine_that_ends_well_after_all_is_not_waited_for(
    script: list[tuple[int, Any]], blamed: int
) -> None:
    """A process may leave a traceback and exit with 0, while another machine fails.

    A long pause between looks at the others keeps none from saying that it lives.
    """
    said = [
        (machine, {"event": "failing", "age": word} if isinstance(word, float) else word)
        for machine, word in script
    ]
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented
    job = {"monitor_interval": 100.0, "machine_timeout": 3.0, "least": 2, "most": 2, "hostname": "host"}
    verdicts, waits = dict[int, Any](), dict[int, float]()

    def run(machine: int) -> None:
        launcher, info = ScriptedLauncher(said, machine), rendezvous.RendezvousInfo(store, machine, 2, "")
        agent = rendezvous_agent.AttemptCoordinator(
            cast("Any", launcher), cast("Any", None), info, {"restarts": 0, "max_restarts": 0}, job
        )
        verdicts[machine], waits[machine] = agent.run(), launcher.longest_wait

    run_two_agents(run)
    assert verdicts.keys() == {0, 1}, "an agent waits for ever"
    assert verdicts[0] == verdicts[1]
    assert (verdicts[0]["kind"], verdicts[0]["machine"], verdicts[0]["code"]) == ("failed", blamed, 7)
    assert waits == {0: 0.75, 1: 0.75}


def test_a_machine_that_has_ended_asks_little_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may work for an hour, and every machine asks machine 0."""
    store, now, waits = dist.HashStore(), [0.0], list[float]()  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(rendezvous_agent, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class PassingLauncher(ScriptedLauncher):
        def read_messages(self, seconds: float) -> list[dict[str, Any]]:
            waits.append(seconds)
            now[0] += seconds
            if now[0] > 100:
                store.add("done", 1)
            return super().read_messages(seconds)

    job = {"monitor_interval": 0.1, "machine_timeout": 999.0, "least": 2, "most": 2, "hostname": "host"}
    launcher: Any = PassingLauncher([(0, ENDED_WELL)], 0)
    info = rendezvous.RendezvousInfo(store, 0, 2, "")
    agent = rendezvous_agent.AttemptCoordinator(launcher, cast("Any", None), info, {}, job)
    assert agent.run() == {"kind": "done", "code": 0}
    assert waits[1] == rendezvous_agent.POLL_SECONDS
    assert max(waits) <= rendezvous_agent.HEARTBEAT_SECONDS, "the others wait for its signs of life"
    assert len(waits) < 200


def test_machines_that_are_lost_at_once_are_not_waited_for() -> None:
    """Of four machines two are left, which start again."""

    class StoppingLauncher(ScriptedLauncher):
        def send(self, event: str, **more: Any) -> None:
            if event == "verdict":
                self.script.append((self.machine, {"event": "ended", "result": "called off"}))

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented
    job = {"monitor_interval": 0.1, "machine_timeout": 2.5, "least": 1, "most": 4, "hostname": "host"}
    world = {"restarts": 0, "max_restarts": 0, "hosts": ["a", "b", "c", "d"]}
    verdicts = dict[int, Any]()

    def run(machine: int) -> None:
        info = rendezvous.RendezvousInfo(store, machine, 4, "")
        handler = SimpleNamespace(num_machines_waiting=lambda: 0)
        agent = rendezvous_agent.AttemptCoordinator(
            cast("Any", StoppingLauncher([], machine)), cast("Any", handler), info, world, job
        )
        verdict = agent.run()
        verdicts[machine] = agent.wait_all_stopped(verdict) or verdict

    run_two_agents(run)
    assert verdicts.keys() == {0, 1}, "an agent waits for ever"
    assert [(each["kind"], each["restart"]) for each in verdicts.values()] == [("lost", True)] * 2
    assert verdicts[0]["lost"] == verdicts[1]["lost"] in (2, 3)


def test_a_launcher_without_its_guard_ends_as_it_would() -> None:
    with GuardProcess(0.5) as guard:
        guard.process.kill()
        guard.process.wait()
        guard.write_line("+1")


# ---------------------------------------------------------------- signals


def test_signals_are_heard_where_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def high_pipe(make_pipe: Any = os.pipe) -> tuple[int, int]:
        reader, writer = make_pipe()
        high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1100)
        os.close(reader)
        return high, writer

    monkeypatch.setattr(os, "pipe", high_pipe)
    with SignalAndChildExitWaiter() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.wait(5) == bytes([signal.SIGUSR1])
    handler = SignalHandler()
    handler.catch([signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert handler.wait(5) == [signal.SIGUSR1]
    os.kill(os.getpid(), signal.SIGUSR1)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(select, "poll")
    assert handler.wait(5) == [signal.SIGUSR1]  # as its handler has counted it
    handler.restore_handlers()
    handler.close()


# ---------------------------------------------------------------- clocks


def test_heartbeats_are_judged_by_when_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch alone compares the clocks of two machines. One that writes nothing new is dead here, too."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    clock = SimpleNamespace(now=lambda zone: now)
    monkeypatch.setattr(torchs, "datetime", clock)
    monkeypatch.setattr(rendezvous, "datetime", clock)
    settings = torchs.RendezvousSettings("job", 2, 2, torchs.RendezvousTimeout(), timedelta(seconds=5), 3)
    holder = torchs._BackendRendezvousStateHolder(SimpleNamespace(name="fake"), settings)  # type: ignore[arg-type]
    torch_alone = torchs._BackendRendezvousStateHolder(SimpleNamespace(name="fake"), settings)  # type: ignore[arg-type]
    rendezvous.HeartbeatObserver(holder)
    behind, skew = torchs._NodeDesc("behind", 1, 0), timedelta(minutes=5)
    for each in (holder, torch_alone):
        each.state.participants[behind] = 0
        each.state.last_heartbeats[behind] = now - skew
        each._sanitize()
    assert (behind in holder.state.participants, behind in torch_alone.state.participants) == (True, False)
    assert holder.state.last_heartbeats == {behind: now - skew}
    now += timedelta(seconds=14)
    holder.state.last_heartbeats[behind] = now - skew
    holder._sanitize()
    now += timedelta(seconds=14)
    holder._sanitize()
    assert behind in holder.state.participants
    now += timedelta(seconds=2)
    holder._sanitize()
    assert behind not in holder.state.participants
    assert holder.state.last_heartbeats == {}


# ---------------------------------------------------------------- preemption

# Rank 1 hears of the signal from its launcher, and rank 0 from rank 1, as ``should_stop`` would tell it.
STOPS = f"""{ARMED}
stopped = Path(PLACE)
while not stopped.exists():
    if heard:
        stopped.touch()
    time.sleep(0.01)
sys.exit(75)
"""


def test_a_machine_that_is_taken_back_stops_the_job_in_good_order(tmp_path: Path) -> None:
    """D12: one launcher gets the signal; the ranks of both stop, and both say that it is to be resumed."""
    script = STOPS.replace("PLACE", repr(str(tmp_path / "stopped")))
    jobs = machines(script, "--nproc_per_node", "1", "--max_restarts", "3")
    for rank, job in enumerate(jobs):
        job.wait_for(f"ready {rank}", timeout=40)
    (agent,) = (each for each in jobs[1].members() if attempts.AGENT_FILE in each.cmdline())
    for number in (signal.SIGTERM, signal.SIGUSR1):  # a scheduler may signal each process of a job
        agent.send_signal(number)
    jobs[1].signal(signal.SIGTERM)
    results = ends(jobs)
    assert [result.returncode for result in results] == [75, 75], results[0].output + results[1].output
    assert all("to be resumed" in result.stderr for result in results)


def test_no_place_to_meet() -> None:
    result = Running([*CONSOLE, "launch", "--num_machines", "2"], script_text=TELL).wait()
    assert result.returncode == 2
    assert "2 machines (--num_machines) need a place to meet" in result.stderr
    assert "--main_process_ip" in result.stderr
