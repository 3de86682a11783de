"""Jobs on a real Ray: two raylets, each a machine of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate.ray
from tests.support.command import Running

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytestmark = pytest.mark.timeout(240)


def train(steps: int, mark: str = "") -> dict[str, Any]:
    """Train a layer on a share of each batch; with ``mark``, rank 2 crashes in the first attempt."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    data = torch.randn(6 * steps, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
    losses: list[float] = []
    for step in range(steps):
        batch = data[6 * step : 6 * (step + 1)].chunk(size)[rank]
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if mark and rank == size - 1 and not os.path.exists(mark):
            open(mark, "x").close()
            os._exit(7)
    place = {name: os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    accelerator.end_training()
    return {"rank": rank, "losses": losses, **place, "restarts": restarts}


@pytest.fixture(scope="module")
def single_process_losses() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    data = torch.randn(24, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    losses: list[float] = []
    for batch in data.split(6):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_function_trains_on_two_machines(
    cluster: Any, tmp_path: Path, single_process_losses: list[float]
) -> None:
    """Three processes where Ray has room: two on one raylet, one on the other. A crash starts all again."""
    results = accelerate.ray.launch(train, (4, str(tmp_path / "crashed")), num_workers=3, max_restarts=1)
    assert [each["rank"] for each in results] == [0, 1, 2]
    machines = [(each["GROUP_RANK"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in results]
    two, one = [("{}", "0", "2"), ("{}", "1", "2")], [("{}", "0", "1")]
    order = [*two, *one] if machines[0][2] == "2" else [*one, *two]
    assert [place[1:] for place in machines] == [place[1:] for place in order]
    assert {place[0] for place in machines} == {"0", "1"}
    assert {each["restarts"] for each in results} == {"1"}
    for each in results:
        assert each["losses"] == pytest.approx(single_process_losses, rel=1e-5)


def fail(rank: str) -> None:
    """Fail on one rank, while the others wait for it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if os.environ["RANK"] == rank:
        raise KeyError("no data")
    accelerator.wait_for_everyone()


def test_a_failing_rank_ends_all_and_is_named(cluster: Any) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed") as caught:
        accelerate.ray.launch(fail, ("1",), num_workers=2, placement_strategy="STRICT_SPREAD")
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(caught.value).rstrip().endswith("KeyError: 'no data'")
    assert caught.value.rank == 1  # type: ignore[attr-defined]


SCRIPT = """
import sys
from accelerate import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(__import__("torch").ones(1) * (accelerator.process_index + 1)).item()
print(f"rank {accelerator.process_index} sees {total:g} {sys.argv[1:]} {accelerator.mixed_precision}")
if "fail" in sys.argv and accelerator.process_index == 1:
    raise KeyError("no data")
accelerator.end_training()
"""


RAY_VARIABLES = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
COMMAND = (sys.executable, "-m", "accelerate", "launch", "--ray")
STOP = """
import sys, time
from accelerate import Accelerator
accelerator = Accelerator()
accelerator.should_stop
sys.stdout.write(f"trains {accelerator.process_index}\\n")
sys.stdout.flush()
while not accelerator.should_stop:
    time.sleep(0.01)
accelerator.exit_to_resume()
"""


def launch(cluster: Any, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [*COMMAND, "--ray_address", cluster.address, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_a_script_is_launched_on_two_machines(cluster: Any, tmp_path: Path) -> None:
    """It has its flags and arguments, finds its file by the working folder, and an error comes once."""
    flags = ("-n", "2", "--ray_placement", "STRICT_SPREAD", "--mixed_precision", "bf16")
    done = launch(cluster, tmp_path, *flags, "train.py", "a b", "fail")
    lines = sorted(line for line in done.stdout.splitlines() if "sees" in line)
    assert lines == [f"[rank {rank}] rank {rank} sees 3 ['a b', 'fail'] bf16" for rank in (0, 1)]
    assert done.returncode == 1
    assert done.stderr.count("rank 1 of 2 failed") == 1, done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'no data'")


def test_a_signal_stops_the_ranks_of_all_machines(cluster: Any, tmp_path: Path) -> None:
    """D12: they stop in good order, and the launcher says that the job is to be resumed."""
    (tmp_path / "train.py").write_text(STOP)
    flags = ("-n", "2", "--ray_placement", "STRICT_SPREAD", "--cpu", "train.py")
    job = Running([*COMMAND, "--ray_address", cluster.address, *flags], cwd=tmp_path, env=RAY_VARIABLES)
    for rank in (0, 1):
        job.wait_for(f"trains {rank}", timeout=100)
    job.signal(signal.SIGTERM)
    done = job.wait(60)
    assert done.returncode == 75, done.output
    assert "to be resumed" in done.stderr


def where() -> tuple[str, str, str | None]:
    """Return this rank, and the devices that it may see."""
    return os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ.get("CUDA_VISIBLE_DEVICES")


def test_processes_of_one_machine_see_the_devices_of_all(cluster: Any) -> None:
    """One process for each device of the cluster; it finds its own by its local rank."""
    node = cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=80 * 2**20)
    try:
        places = accelerate.ray.launch(where)
    finally:
        cluster.remove_node(node)
    assert places == [("0", "2", "0,1"), ("1", "2", "0,1")] or places == [
        ("0", "2", "1,0"),
        ("1", "2", "1,0"),
    ]


def test_what_ray_cannot_place_ends_in_a_line(cluster: Any, tmp_path: Path) -> None:
    done = launch(cluster, tmp_path, "-n", "5", "--rdzv_conf", "join_timeout=1", "train.py")
    assert done.returncode == 2
    assert "Ray has not placed 5 processes of 1 CPU (PACK) within 1 s" in done.stderr
    assert "the cluster has 3 CPU" in done.stderr
    assert "Traceback" not in done.stderr


def train_for_long(mark: str) -> int:
    """Wait in the first attempt until the machine is taken away; return how many machines there are."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    begun = Path(mark)
    first = not begun.exists()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        begun.touch()
    while first:
        accelerator.wait_for_everyone()
        time.sleep(0.05)
    accelerator.end_training()
    return accelerator.num_processes


def test_a_machine_that_is_lost_is_replaced(cluster: Any, tmp_path: Path) -> None:
    """Ray places all again, on the machines that are left; without restarts it is an error."""
    mark = tmp_path / "begun"
    spare = cluster.add_node(num_cpus=4, object_store_memory=80 * 2**20)

    def take_away() -> None:
        while not mark.exists():
            time.sleep(0.1)
        cluster.remove_node(spare, allow_graceful=False)

    taker = threading.Thread(target=take_away)
    taker.start()
    # Three in a machine with room for all: the spare one. Afterwards the two others have room for them.
    results = accelerate.ray.launch(train_for_long, (str(mark),), num_workers=3, max_restarts=1)
    taker.join()
    assert results == [3, 3, 3]
