"""How a script ends: nothing of the group is left when the interpreter goes."""

from __future__ import annotations

import os

from tests.support.command import launch

SCRIPT = """
    import os
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from accelerate import Accelerator, DataLoaderConfiguration

    def threads():
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
        return sorted(name for name in names if "gloo" in name)

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    seen = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
    seen.append(accelerator.gather(torch.ones(300_000)))
    before = threads()
    accelerator.end_training()
    print(f"rank {accelerator.process_index}: {bool(before)} {threads()}\\n", end="", flush=True)
"""


def test_no_thread_of_the_group_is_left_after_training() -> None:
    """A thread of gloo that lets go of a tensor while the interpreter ends aborts the process: SIGABRT after
    a training that went well, once in some dozens of runs."""
    done = launch("--cpu", "-n", "2", script_text=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: True []", "rank 1: True []"]


STARVED = """
    import os
    import threading
    import torch
    from torch.utils.data import DataLoader
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Embedding(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    from_python = {thread.native_id for thread in threading.enumerate()}
    for task in set(map(int, os.listdir("/proc/self/task"))) - from_python:
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))  # runs while no other thread can
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
"""


def test_workers_that_are_late_do_not_abort_the_interpreter() -> None:
    """A worker of gloo that is not scheduled between the end of its collective and that of the process."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # inherited by the ranks
    try:
        for _ in range(2):
            done = launch("--cpu", "-n", "2", script_text=STARVED)
            assert done.returncode == 0, done.stderr
    finally:
        os.sched_setaffinity(0, allowed)
