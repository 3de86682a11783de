"""``gather_for_metrics`` of objects on two processes, against ``all_gather_object`` and flattening by hand.

That is also what the public package does, so the ratio to it is the figure. The objects are the 16 answers of
a batch: an id, a text of 40 characters and a score each.
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker

PROCESSES = 2
STEPS = 50


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "10" if quick else "40", processes=PROCESSES)


CASES = (Case("`gather_for_metrics` of objects, against `all_gather_object`", "us", "ratio", 0.5, measure),)


def main(blocks: int) -> None:
    import torch.distributed as dist

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {PROCESSES}")
    rank = accelerator.process_index
    mine = [{"id": 16 * rank + i, "text": f"{i:04d} words" * 4, "score": i / 16} for i in range(16)]

    def by_hand() -> list[object]:
        every: list[list[object]] = [[] for _ in range(PROCESSES)]
        dist.all_gather_object(every, mine)
        return [item for part in every for item in part]

    def raw() -> None:
        for _ in range(STEPS):
            by_hand()

    def prepared() -> None:
        for _ in range(STEPS):
            accelerator.gather_for_metrics(mine, use_gather_object=True)

    same = by_hand() == accelerator.gather_for_metrics(mine, use_gather_object=True)
    assert same, "they gather different objects"
    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=STEPS, before=dist.barrier)
    if accelerator.is_main_process:
        report(sample)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
