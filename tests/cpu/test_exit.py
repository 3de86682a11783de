"""How a script ends: nothing of the group is left when the interpreter goes."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.command import launch
from tests.support.long_run import LONG_RUN
from tests.support.ranks import RankServer


def threads() -> list[str]:
    """Return the names of gloo's threads in this process."""
    tasks = os.listdir("/proc/self/task")
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]
    return [name for name in names if "gloo" in name]


def end_training() -> tuple[bool, list[str]]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    seen = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
    seen.append(accelerator.gather(torch.ones(300_000)))
    before = threads()
    accelerator.end_training()
    return bool(before), threads()


def test_no_thread_of_the_group_is_left_after_training(ranks: RankServer) -> None:
    """A thread of gloo that lets go of a tensor while the interpreter ends aborts the process: SIGABRT after
    a training that went well, once in some dozens of runs."""
    assert ranks(2, end_training) == [(True, [])] * 2


STARVED = """
    import os
    import threading
    import torch
    from torch.utils.data import DataLoader
    from accelerate import Accelerator

    accelerator = Accelerator()
    # No optimizer, which would import torch._dynamo: gradients are averaged all the same.
    model, loader = accelerator.prepare(torch.nn.Embedding(10, 4), DataLoader(torch.arange(8), batch_size=2))
    from_python = {thread.native_id for thread in threading.enumerate()}
    for task in set(map(int, os.listdir("/proc/self/task"))) - from_python:
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))  # runs while no other thread can
    for batch in loader:
        accelerator.backward(model(batch).mean())
"""


def test_workers_that_are_late_do_not_abort_the_interpreter() -> None:
    """A worker of gloo that is not scheduled between the end of its collective and that of the process."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # inherited by the ranks
    try:
        for _ in range(3 if LONG_RUN else 1):
            done = launch("--cpu", "-n", "2", script_text=STARVED)
            assert done.returncode == 0, done.stderr
    finally:
        os.sched_setaffinity(0, allowed)
