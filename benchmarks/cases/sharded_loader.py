"""Epochs of images in data-parallel training: a sharded loader, against DistributedSampler in raw DDP.

Each epoch is timed as a whole, its start included: every process reads its half of 1,280 images (3 x 64 x 64
in float32, 32 per batch), one ``__getitem__`` each, and trains two convolutions. Rank 0's clock, after a
barrier.
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker

STEPS = 20
BATCH = 32
PROCESSES = 2
SAMPLES = STEPS * BATCH * PROCESSES


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "4" if quick else "32", processes=PROCESSES)


CASES = (Case("epoch of images in DDP, sharded loader, against raw DDP", "us", "ratio", 1.03, measure, 5, 2),)


def dataset():
    """Images that are there already, so that reading one costs as little as it can."""
    import torch

    class Images(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.pixels = torch.randn(64, 3, 64, 64)

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int):
            return self.pixels[index % 64], index % 10

    return Images()


def parts():
    """A small convolutional network and its optimizer."""
    import torch

    layers = [torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2)]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 15**2, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def main(blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {PROCESSES}")
    data = dataset()
    plain, optimizer = parts()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    sampler = DistributedSampler(data, shuffle=True)
    by_hand = DataLoader(data, batch_size=BATCH, sampler=sampler)
    epoch = 0

    def raw() -> None:
        nonlocal epoch
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in by_hand:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    p_model, p_optimizer, p_loader = accelerator.prepare(*parts(), loader)

    def prepared() -> None:
        steps = 0
        for images, labels in p_loader:
            accelerator.backward(torch.nn.functional.cross_entropy(p_model(images), labels))
            p_optimizer.step()
            p_optimizer.zero_grad()
            steps += 1
        assert steps == STEPS, f"{steps} steps instead of {STEPS}"

    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=STEPS, before=dist.barrier)
    if accelerator.is_main_process:
        report(sample)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
