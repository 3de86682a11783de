"""``gather_for_metrics`` in an evaluation loop on two processes, against gathering by hand.

The base goes over a DataLoader with DistributedSampler, calls ``all_gather`` on predictions and labels and
cuts the padding off the last batch; no model is run. 1,601 samples, 32 per process and batch.
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, report, worker

SAMPLES = 1601
BATCH = 32
PROCESSES = 2
STEPS = -(-SAMPLES // (BATCH * PROCESSES))


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "10" if quick else "40", processes=PROCESSES)


CASES = (Case("`gather_for_metrics`, 2 processes, against `all_gather`", "us", "ratio", None, measure),)


def main(blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {PROCESSES}")
    data = TensorDataset(torch.randn(SAMPLES, 10), torch.arange(SAMPLES))

    def everywhere(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(PROCESSES)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    by_hand = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))

    def raw() -> None:
        seen = 0
        for logits, labels in by_hand:
            predictions, labels = everywhere(logits.argmax(dim=1)), everywhere(labels)
            predictions, labels = predictions[: SAMPLES - seen], labels[: SAMPLES - seen]
            seen += len(labels)
        assert seen == SAMPLES

    loader = accelerator.prepare(DataLoader(data, batch_size=BATCH))

    def prepared() -> None:
        seen = 0
        for logits, labels in loader:
            _, labels = accelerator.gather_for_metrics((logits.argmax(dim=1), labels))
            seen += len(labels)
        assert seen == SAMPLES, f"{seen} of {SAMPLES} samples were counted"

    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=STEPS, before=dist.barrier)
    if accelerator.is_main_process:
        report(sample)
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]))
