"""Dispatch mode: process 0 reads the data and sends the others their batches, against each reading its own.

Two processes train in both loops; the base reads by hand, each process its half: a DistributedSampler for
map-style data, every second batch of a stream. Epochs are timed as a whole, rank 0's clock, after a barrier.

- images: 3 x 64 x 64 in float32, map-style, 32 per process, trained by two convolutions
- token ids: a stream of samples with 128 ids, mask and labels, 32 per process, trained by a small embedding
  model
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker
from benchmarks.cases import sharded_loader

STEPS = 20
BATCH = 32
PROCESSES = 2
LENGTH = 128
VOCABULARY = 256


def measure(data: str):
    def run(subject: Subject, quick: bool) -> Sample:
        return worker(subject, __name__, data, "4" if quick else "12", processes=PROCESSES)

    return run


def case(title: str, data: str) -> Case:
    return Case(title, "us", "ratio", 1.3, measure(data), rounds=3, peer_rounds=2)


CASES = (
    case("epoch of images in DDP, dispatched by process 0, against raw DDP", "images"),
    case("epoch of a stream of token ids, dispatched by process 0, against raw DDP", "tokens"),
)


def tokens():
    """A stream of samples with token ids, their mask and their labels."""
    import torch

    class Tokens(torch.utils.data.IterableDataset):
        def __init__(self, part: slice = slice(None)) -> None:
            self.part = part
            self.ids = torch.randint(0, VOCABULARY, (64, LENGTH))
            self.mask = torch.ones(LENGTH, dtype=torch.long)

        def __iter__(self):
            for index in range(STEPS * BATCH * PROCESSES)[self.part]:
                ids = self.ids[index % 64]
                yield {"input_ids": ids, "attention_mask": self.mask, "labels": ids}

    return Tokens


def language_model():
    """Ids of shape (batch, length) to logits over the vocabulary, and its optimizer."""
    import torch

    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def main(kind: str, blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, DistributedSampler

    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {PROCESSES}")

    if kind == "images":
        parts, data = sharded_loader.parts, sharded_loader.dataset()
        by_hand = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=True))
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)

        def loss_of(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])
    else:
        parts, stream = language_model, tokens()
        by_hand = DataLoader(stream(slice(accelerator.process_index, None, PROCESSES)), batch_size=BATCH)
        loader = DataLoader(stream(), batch_size=BATCH)

        def loss_of(model, batch):
            return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    plain, optimizer = parts()
    model = torch.nn.parallel.DistributedDataParallel(plain)

    def raw() -> None:
        for batch in by_hand:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    p_model, p_optimizer, p_loader = accelerator.prepare(*parts(), loader)

    def prepared() -> None:
        steps = 0
        for batch in p_loader:
            accelerator.backward(loss_of(p_model, batch))
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
    main(sys.argv[1], int(sys.argv[2]))
