"""Jobs on two hosts that share nothing but a cable: network namespaces, where the machine allows them."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.support import hosts as support
from tests.support.command import CONSOLE, Finished, Running
from tests.support.hosts import NAMES, Hosts
from tests.support.long_run import long_run_param

pytestmark = pytest.mark.skipif(bool(support.unable()), reason=support.unable() or "possible here")

# The ranks meet, and tell who they are; then what the test adds.
MEET = """
import datetime, os, socket, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
rank = dist.get_rank()
seen = torch.ones(1) * (rank + 1)
dist.all_reduce(seen)
sys.stdout.write(f"rank {rank} on {socket.gethostname()} sees {seen.item():g}\\n")
sys.stdout.flush()
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts that know each other's names."""
    with Hosts() as both:
        yield both


def start(hosts: Hosts, script: str, *flags: str, **env: str) -> list[Running]:
    """One process on each host; hosta is machine 0."""
    common = ["launch", "--cpu", "--num_machines", "2", "--num_processes", "2", "--stop_timeout", "2"]
    return [
        Running(
            hosts.command(name, [*CONSOLE, *common, "--machine_rank", str(number), *flags]),
            script_text=MEET + script,
            env={"OMP_NUM_THREADS": "1", **env},
        )
        for number, name in enumerate(NAMES)
    ]


def at(hosts: Hosts) -> tuple[str, ...]:
    """Where machines with numbers meet."""
    return ("--main_process_ip", hosts.addresses["hosta"], "--main_process_port", "29500")


def ends(hosts: Hosts, jobs: list[Running], timeout: float = 50) -> list[Finished]:
    """How both ended; nothing is left on either host."""
    __tracebackhide__ = True
    results = [job.wait(timeout) for job in jobs]
    assert hosts.processes() == [], "processes are left"
    return results


@pytest.mark.parametrize("named", [long_run_param(True), False])
def test_two_hosts_are_one_world(named: bool) -> None:
    """Also where no host knows its own name: gloo would then wait for the other on the loopback."""
    with Hosts(named=named) as hosts:
        results = ends(hosts, start(hosts, "dist.destroy_process_group()", *at(hosts)))
    for rank, result in enumerate(results):
        assert result.returncode == 0, result.output
        assert result.stdout == f"rank {rank} on {NAMES[rank]} sees 3\n"
        # On a busy machine the launcher may say that it waits for the other host, and nothing else.
        printed = [line for line in result.stderr.splitlines() if "accelerate launch" in line]
        assert all("waiting for the other machines" in line for line in printed)


# An accelerator's ranks, as srun or mpirun start them: no launcher has told them of an interface.
ALONE = """
import socket, sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
seen = torch.full((100_000,), accelerator.process_index + 1.0)
total = accelerator.reduce(seen, "sum")[0].item()
sys.stdout.write(f"rank {accelerator.process_index} on {socket.gethostname()} sees {total:g}\\n")
accelerator.end_training()
"""


@pytest.mark.parametrize("by_name", [True, long_run_param(False)])
def test_ranks_without_a_launcher_use_the_route_to_rank_0(by_name: bool) -> None:
    """Their own names are loopback addresses, where gloo would wait for the others."""
    with Hosts(own_loopback=True) as hosts:
        main = "hosta" if by_name else hosts.addresses["hosta"]
        common = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
        jobs = [
            Running(
                hosts.command(name, [sys.executable]),
                script_text=ALONE,
                env={key: str(value) for key, value in common.items()}
                | {"RANK": str(rank), "MASTER_ADDR": main, "MASTER_PORT": "29511"},
            )
            for rank, name in enumerate(NAMES)
        ]
        results = ends(hosts, jobs)
    for rank, result in enumerate(results):
        assert result.returncode == 0, result.output
        assert result.stdout == f"rank {rank} on {NAMES[rank]} sees 3\n"


CRASH_ONCE = """
mark = sys.argv[1]
if rank == 1 and not os.path.exists(mark):
    open(mark, "x").close()
    os._exit(7)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", [long_run_param("static"), long_run_param("c10d")])
def test_a_crash_on_one_host_is_recovered_on_both(hosts: Hosts, tmp_path: object, backend: str) -> None:
    """The library alone burns its restarts on what the last attempt left in its store, or hangs."""
    place = at(hosts) if backend == "static" else ("--rdzv_endpoint", f"{hosts.addresses['hosta']}:29400")
    script = CRASH_ONCE.replace("sys.argv[1]", repr(f"{tmp_path}/crashed"))
    flags = ("--rdzv_backend", backend, *place, "--max_restarts", "3")
    results = ends(hosts, start(hosts, script, *flags))
    lines: list[str] = []
    for result in results:
        assert result.returncode == 0, result.output
        assert len(result.stdout.splitlines()) == 2
        lines = [line for line in result.stderr.splitlines() if "restart " in line]
        assert len(lines) == 1
        assert "rank 1 of 2 failed (exit code 7); restart 1 of 3" in lines[0]
    # Who crashed is named on both, by the name of its host.
    (crashed,) = {line.split(" (machine")[0].split()[-1] for line in lines}
    assert crashed in NAMES


@pytest.mark.parametrize("backend", [long_run_param("static"), "c10d"])
def test_a_host_that_is_cut_off_ends_on_both_sides(hosts: Hosts, backend: str) -> None:
    """F8: within --machine_timeout, though ranks and library would wait for much longer, in calls that no
    signal ends."""
    script = """
while True:
    dist.all_reduce(seen)
    time.sleep(0.05)
"""
    static = backend == "static"
    place = at(hosts) if static else ("--rdzv_backend", backend, "--rdzv_endpoint", "hosta:29400")
    jobs = start(hosts, script, *place, "--machine_timeout", "4")
    for name, job in zip(NAMES, jobs, strict=True):
        job.wait_for(f"on {name}", timeout=40)
    hosts.cut("hostb")
    results = ends(hosts, jobs, timeout=30)
    assert [result.returncode for result in results] == [1, 1]
    assert re.search(r"machine \d \(hostb\) is lost", results[0].stderr), results[0].output
    lost = r"machine 0 \(hosta\) is lost" if static else r"hosta(:29400|\)) is lost"
    assert re.search(lost, results[1].stderr), results[1].output
    for result in results:
        assert "--machine_timeout" in result.stderr


# Each attempt tells its world; the job ends when the last machine has come and gone again.
COME_AND_GO = """
import os, socket, sys, time
rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), socket.gethostname()
exchange = lambda: time.sleep(0.05)
if {gloo}:
    import datetime, torch
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    def exchange():
        sum = torch.ones(1)
        dist.all_reduce(sum)
        assert sum.item() == size
        time.sleep(0.05)
exchange()
sys.stdout.write(f"{{host}} is one of {{size}}, its clock says {{time.time():.0f}}\\n")
sys.stdout.flush()
mark = "seen_all_" + host
if size == {count}:
    open(mark, "w").close()
while size == {count} or not os.path.exists(mark):
    exchange()
"""


@pytest.mark.skipif(bool(support.unable_to_switch()), reason=support.unable_to_switch() or "possible here")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler for the library that moves a clock")
@pytest.mark.parametrize(("count", "gloo"), [(3, False), long_run_param(4, False), long_run_param(4, True)])
@pytest.mark.timeout(300)
def test_machines_on_a_slow_lossy_network(tmp_path: Path, count: int, gloo: bool) -> None:
    """The last one joins late and is cut off, and the clocks of two are minutes behind and ahead.

    A frame takes 10 ms to the other machine, and one in a hundred is lost. Torch's rendezvous alone takes the
    machine whose clock is behind for a dead one, and all wait for it.
    """
    place = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "hosta:29400", "--rdzv_conf", "last_call_timeout=2")
    flags = ("--cpu", "--num_machines", f"{count - 1}:{count}", "--nproc_per_node", "1")
    skews, clock = {"hostb": "-300", "hostc": "300"}, str(support.build_clock(tmp_path))
    with Hosts(count, latency=0.01, loss=0.01) as hosts:

        def begin(name: str) -> Running:
            command = hosts.command(name, [*CONSOLE, "launch", *flags, "--machine_timeout", "10", *place])
            skew = {"LD_PRELOAD": clock, "HOST_CLOCK_SKEW": skews[name]} if name in skews else {}
            env = {"OMP_NUM_THREADS": "1", **skew}
            return Running(command, script_text=COME_AND_GO.format(gloo=gloo, count=count), env=env)

        *first, late = hosts.names
        jobs = {name: begin(name) for name in first}
        for name, job in jobs.items():
            job.wait_for(f"{name} is one of {count - 1}", timeout=90)
        jobs[late] = begin(late)
        for name, job in jobs.items():
            job.wait_for(f"{name} is one of {count}", timeout=90)
        hosts.cut(late)
        results = dict(zip(jobs, ends(hosts, list(jobs.values()), timeout=120), strict=True))
        assert hosts.switch is not None
        assert hosts.switch.lost > 0
    clocks: dict[str, float] = {}
    for name, result in results.items():
        said = re.findall(rf"{name} is one of (\d), its clock says (\d+)", result.stdout)
        clocks[name] = float(said[0][1])
        if name == late:
            assert result.returncode == 1, result.output
            continue
        assert result.returncode == 0, result.output
        # The first ones may meet a second time before the last, which has come, is through to them.
        sizes = [int(size) for size, _ in groupby(size for size, _ in said)]
        assert sizes == [count - 1, count, count - 1]
        assert "another machine has come" in result.stderr
        assert re.search(rf"\({late}\) is lost", result.stderr), result.output
    assert clocks["hostb"] + 200 < clocks["hosta"] < clocks["hostc"] - 200
