"""Saving and loading a sharded training of two processes, as a ratio to torch.distributed.checkpoint.

67 million parameters in float32 and both moments of AdamW, 0.8 GB in all, over gloo. Both sharded models live
in the same two processes and are saved in turn on the same disk, each into its own folder again; ours writes
digests, and checks them when it loads. By hand: `get_state_dict`, `dcp.save`, `dcp.load`, `set_state_dict`.
The weights are changed before each load, and compared after it. Ours writes past the page cache, so both
folders are read once before they are loaded. Rank 0's clock, after a barrier.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.case import BenchError, Case, Sample, Subject, compare, leave
from benchmarks.cases.fsdp_step import PROCESSES, by_hand, check_sharded, network, sharding
from benchmarks.checkpoints import Queue, room

WIDTH, LAYERS, WORDS = 1024, 5, 2048


def take(subject: Subject, quick: bool) -> dict[str, Sample | str]:
    """One round of both rows."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    with room() as folder:
        command = [str(subject.python), *torchrun, "-m", __name__, str(folder), "2" if quick else "5"]
        _, text = subject.run(command, timeout=600)
    lines = [line for line in text.splitlines() if line.startswith('{"save"')]
    if not lines:
        raise BenchError("the worker ended without a result")
    found = json.loads(lines[-1])
    return {row: compare(found[row][0], found[row][1], "ratio") for row in ("save", "load")}


QUEUE = Queue(take, ("save", "load"))
CASES = (
    Case("save 0.8 GB sharded, against `dcp.save`", "s", "ratio", 1.0, QUEUE.measure("save"), 2, 1),
    Case("load 0.8 GB sharded, against `dcp.load`", "s", "ratio", 1.0, QUEUE.measure("load"), 2, 1),
)


# --- in the environment of every subject ------------------------------------------------------------------


def trained(model: Any, optimizer: Any) -> None:
    """Gives every parameter a gradient and takes one step, without a forward."""
    import torch

    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1e-3 * number)
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Callable[[], object]) -> float:
    """Seconds until all processes have done it."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def checked(model: Any, load: Callable[[], object]) -> float:
    """Seconds of a load that brings back what has been changed.

    Raises:
        SystemExit: it does not.
    """
    import torch

    parameters = [parameter.to_local() for parameter in model.parameters()]
    before = [float(p.double().sum()) for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.zero_()
    seconds = timed(load)
    if before != [float(p.to_local().double().sum()) for p in model.parameters()]:
        raise SystemExit("the weights after the load are not those that were saved")
    return seconds


def main(folder: Path, turns: int) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    accelerator = sharding()
    torch.manual_seed(0)
    model = by_hand(network(WIDTH, LAYERS, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    p_model = network(WIDTH, LAYERS, WORDS)
    p_model, p_optimizer = accelerator.prepare(p_model, torch.optim.AdamW(p_model.parameters(), lr=1e-3))
    check_sharded(p_model)
    trained(p_model, p_optimizer)
    raw, ours = str(folder / "raw"), str(folder / "ours")

    def save_by_hand() -> None:
        weights, moments = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": moments}, checkpoint_id=raw)

    def load_by_hand() -> None:
        weights, moments = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": moments}, checkpoint_id=raw)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    times: dict[str, tuple[list[float], list[float]]] = {"save": ([], []), "load": ([], [])}
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds = timed((save_by_hand, lambda: accelerator.save_state(ours))[which])
            if turn:
                times["save"][which].append(seconds)
        for file in (*Path(raw).iterdir(), *Path(ours).rglob("*")):
            if file.is_file():
                file.read_bytes()
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds = checked(
                *((model, load_by_hand), (p_model, lambda: accelerator.load_state(ours)))[which]
            )
            if turn:
                times["load"][which].append(seconds)
    if accelerator.is_main_process:
        print(json.dumps(times), flush=True)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
