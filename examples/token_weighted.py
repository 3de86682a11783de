"""Give every letter of a text the same weight, however lines of different lengths are cut into batches.

    python examples/token_weighted.py
    accelerate launch --num_processes 2 examples/token_weighted.py

A small network learns to guess the next letter in the help texts of Python. Each optimizer step takes 64
lines: at once in plain torch, and in 4 micro-batches per process by two loops of this library. A loss is a
mean over the letters of its micro-batch. The usual loop takes the mean of these means, in which the letters
of short lines weigh more; with ``num_items`` the step is that of the big batch, on any number of processes.
"""

import copy
import pydoc_data.topics
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import set_seed

STEP, STEPS, MICRO_BATCHES = 64, 20, 4  # lines of an optimizer step, how many steps, and parts per process
LETTERS = 128
IGNORED = -100


def read_lines() -> Dataset[str]:
    """Lines of Python's help, from 2 to 60 letters, the short ones together: that is where means differ."""
    text = " ".join(pydoc_data.topics.topics[name] for name in ("for", "class", "with", "lambda", "function"))
    lines = [line.strip()[:60] for line in text.splitlines() if len(line.strip()) > 1 and line.isascii()]
    lines = (lines * 10)[: STEP * STEPS]
    steps = [sorted(lines[i : i + STEP], key=len) for i in range(0, len(lines), STEP)]
    # A list has what a map-style dataset needs.
    return cast("Dataset[str]", [line for step in steps for line in step])


def collate(lines: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters and the letters after them, both (lines, longest); what only fills is ignored."""
    longest = max(map(len, lines))
    ids = torch.tensor([list(line.encode().ljust(longest)) for line in lines])
    labels = ids.roll(-1, dims=1)
    for row, line in enumerate(lines):
        labels[row, len(line) - 1 :] = IGNORED
    return ids, labels


class Guesser(nn.Module):
    """Letters (lines, length) to logits (lines, length, letters)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(LETTERS, 32), nn.Linear(64, LETTERS)
        self.read = nn.GRU(32, 64, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.embed(ids))[0])


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss over the letters that count, and their number."""
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return loss, (labels != IGNORED).sum()


def big_batches(model: nn.Module, lines: Dataset[str]) -> list[float]:
    """The loss of every step of a plain loop on one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for ids, labels in DataLoader(lines, batch_size=STEP, collate_fn=collate):
        loss, _ = loss_of(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def micro_batches(
    accelerator: Accelerator, model: nn.Module, lines: Dataset[str], weighted: bool
) -> list[float]:
    """The same by windows of micro-batches, on all processes together."""
    size = STEP // (accelerator.num_processes * MICRO_BATCHES)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        DataLoader(lines, batch_size=size, collate_fn=collate),
    )
    losses = []
    for window in accelerator.windows(loader, MICRO_BATCHES):
        seen = torch.zeros(2, device=accelerator.device)
        for ids, labels in window:
            loss, letters = loss_of(model, ids, labels)
            accelerator.backward(loss, num_items=letters if weighted else None)
            seen += torch.stack((loss.detach() * letters, letters))
        optimizer.step()
        optimizer.zero_grad()
        total, letters = accelerator.reduce(seen, reduction="sum").tolist()
        losses.append(total / letters)
    return losses


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    model, lines = Guesser().to(accelerator.device), read_lines()
    wanted = big_batches(copy.deepcopy(model).cpu(), lines)
    weighted = micro_batches(accelerator, copy.deepcopy(model), lines, weighted=True)
    plain = micro_batches(accelerator, copy.deepcopy(model), lines, weighted=False)

    accelerator.print(f"{accelerator.num_processes} x {MICRO_BATCHES} micro-batches; loss before each step")
    accelerator.print("step  big batch   num_items   mean of means")
    for step in range(0, STEPS, 3):
        accelerator.print(f"{step:4}  {wanted[step]:9.5f}   {weighted[step]:9.5f}   {plain[step]:13.5f}")
    for name, losses in (("num_items", weighted), ("mean of means", plain)):
        apart = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        accelerator.print(f"{name} against the big batch: at most {apart:.1e} apart")
    accelerator.end_training()


if __name__ == "__main__":
    main()
