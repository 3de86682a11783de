"""How a script ends: nothing of the group is left when the interpreter goes."""

from __future__ import annotations

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
