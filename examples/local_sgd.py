"""Three ways to train on several processes: accuracy, and how much they send for it.

    accelerate launch --num_processes 2 examples/local_sgd.py
    python examples/local_sgd.py

DDP averages gradients in every step. With LocalSGD each process trains by itself, and parameters are averaged
every few steps. DiLoCo also trains by itself, and an outer optimizer follows the mean of what was learned.
Megabytes are what one process wrote to the others by gloo, as Linux counts it; a lone process sends none.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.local_sgd import DiLoCo, LocalSGD
from accelerate.utils import set_seed


def read_data() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """1,437 images of digits to train on and 360 to test on: (pixels (64,) in 0..1, label)."""
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))


def megabytes_sent() -> float:
    """By this process so far, to the others; not a number where the system does not tell."""
    process = psutil.Process()
    return process.io_counters().write_chars / 2**20 if hasattr(process, "io_counters") else math.nan


@torch.no_grad()
def accuracy(accelerator, model, loader) -> float:
    model.eval()
    right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in loader]
    return torch.cat(right).float().mean().item()


def train(method: str, epochs: int, every: int) -> tuple[float, float]:
    """Trains a fresh model by one of the methods; its test accuracy, and the megabytes sent."""
    set_seed(0)
    accelerator = Accelerator()
    train_set, test_set = read_data()
    share = 32 // accelerator.num_processes
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_set, share, shuffle=True, drop_last=True),
        DataLoader(test_set, batch_size=64),
    )
    contexts: dict[str, Callable[[], Any]] = {
        "DDP": nullcontext,
        "LocalSGD": lambda: LocalSGD(accelerator, model, local_sgd_steps=every),
        "DiLoCo": lambda: DiLoCo(accelerator, model, inner_steps=every),
    }

    accelerator.wait_for_everyone()
    before = megabytes_sent()
    with contexts[method]() as local_steps:
        for _ in range(epochs):
            for images, labels in train_loader:
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                if local_steps is not None:
                    local_steps.step()
    accelerator.wait_for_everyone()
    sent = megabytes_sent() - before
    reached = accuracy(accelerator, model, test_loader)
    accelerator.free_memory()
    return reached, sent


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP, LocalSGD and DiLoCo on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--every", type=int, default=20, help="steps between two rounds of LocalSGD and DiLoCo"
    )
    args = parser.parse_args()

    accelerator = Accelerator()
    accelerator.print(f"{'method':10}{'test accuracy':>15}{'megabytes sent':>16}")
    for method in ("DDP", "LocalSGD", "DiLoCo"):
        reached, sent = train(method, args.epochs, args.every)
        accelerator.print(f"{method:10}{reached:15.3f}{sent:16.1f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
