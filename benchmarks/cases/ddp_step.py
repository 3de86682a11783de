"""A data-parallel training step on two processes, as a ratio to raw DistributedDataParallel.

Both loops live in the same two processes and are timed in turn: the same step (forward, backward, step,
scheduler, zero_grad) of the same perceptron (256-512-512-10, 16 samples per process) with gloo; the raw one
over a DataLoader with DistributedSampler. Rank 0's clock, after a barrier.
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker

STEPS = 50
BATCH = 16
PROCESSES = 2


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "4" if quick else "16", processes=PROCESSES)


CASES = (Case("DDP step, 2 processes, against raw DDP", "us", "ratio", 1.03, measure, peer_rounds=2),)


def main(blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {PROCESSES}")
    count = STEPS * BATCH * PROCESSES
    data = TensorDataset(torch.randn(count, 256), torch.randint(0, 10, (count,)))

    def parts():
        layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    plain, optimizer, scheduler = parts()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    epoch = 0

    def raw() -> None:
        nonlocal epoch
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    whole = DataLoader(data, batch_size=BATCH, shuffle=True)
    p_model, p_optimizer, p_scheduler, p_loader = accelerator.prepare(*parts(), whole)

    def prepared() -> None:
        for x, y in p_loader:
            with accelerator.accumulate(p_model):
                accelerator.backward(torch.nn.functional.cross_entropy(p_model(x), y))
                p_optimizer.step()
                p_scheduler.step()
                p_optimizer.zero_grad()

    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=STEPS, before=dist.barrier)
    if accelerator.is_main_process:
        report(sample)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
