"""``gather_for_metrics`` of one tensor on two processes, against ``all_gather_into_tensor`` to a new tensor.

Nothing else is in the loop: no loader, no model. So the figure is what agreeing about operation, dtype and
shape costs, at three sizes: scores of a batch, logits of a batch, features of a data set.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker

PROCESSES = 2
# name -> (rows, columns, steps of one block)
SIZES = {"1 KB": (32, 10, 100), "100 KB": (256, 100, 100), "8 MB": (2048, 1024, 4)}


def measure(size: str, subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, size, "10" if quick else "40", processes=PROCESSES)


CASES = tuple(
    Case(
        f"`gather_for_metrics` of {size} per process, against `all_gather_into_tensor`",
        "us",
        "ratio",
        1.05,
        partial(measure, size),
    )
    for size in SIZES
)


def main(size: str, blocks: int) -> None:
    import torch
    import torch.distributed as dist

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {PROCESSES}")
    rows, columns, steps = SIZES[size]
    mine = torch.rand(rows, columns) + accelerator.process_index
    # Renamed in torch 2.13, where the old name warns.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def by_hand() -> torch.Tensor:
        out = torch.empty(rows * PROCESSES, columns)
        gather(out, mine)
        return out

    def raw() -> None:
        for _ in range(steps):
            by_hand()

    def prepared() -> None:
        for _ in range(steps):
            accelerator.gather_for_metrics(mine)

    assert torch.equal(by_hand(), accelerator.gather_for_metrics(mine)), "they gather different values"
    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=steps, before=dist.barrier)
    if accelerator.is_main_process:
        report(sample)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
