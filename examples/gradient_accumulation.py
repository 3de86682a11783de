"""Train with a batch that is too large for memory: in micro-batches, on one process or many.

    python examples/gradient_accumulation.py --micro-batches 1
    python examples/gradient_accumulation.py --micro-batches 8
    accelerate launch --num_processes 2 examples/gradient_accumulation.py --micro-batches 4

Each optimizer step takes 96 handwritten digits of scikit-learn, however they are cut up, and the last of an
epoch the 48 that are left: the three commands print the same losses. ``accelerator.windows`` gives the
micro-batches of one step, reduces gradients once per window, and divides by the micro-batches it really has.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

STEP, TRAINED = 96, 1392  # images of an optimizer step; 14 steps and a half are an epoch


def read_data() -> tuple[TensorDataset, TensorDataset]:
    """Two datasets of (pixels, label), pixels a float tensor (64,) in 0..1."""
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(images[:TRAINED], digits[:TRAINED]), TensorDataset(
        images[TRAINED:], digits[TRAINED:]
    )


def train(accelerator, model, optimizer, loader, micro_batches: int) -> tuple[int, float]:
    """One epoch; how many optimizer steps it took, and the mean loss over all processes."""
    model.train()
    steps, total = 0, torch.zeros((), device=accelerator.device)
    for window in accelerator.windows(loader, micro_batches):
        for images, labels in window:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps, accelerator.reduce(total / len(loader), reduction="mean").item()


@torch.no_grad()
def test(accelerator, model, loader) -> float:
    """The share of the test images that are recognised."""
    model.eval()
    right = []
    for images, labels in loader:
        right.append(accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels))
    return torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits in micro-batches.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=4, help="per optimizer step and process")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train_set, test_set = read_data()
    size = STEP // (accelerator.num_processes * args.micro_batches)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        DataLoader(train_set, batch_size=size, shuffle=True),
        DataLoader(test_set, batch_size=64),
    )
    accelerator.print(f"{accelerator.num_processes} x {args.micro_batches} micro-batches of {size} images")
    for epoch in range(1, args.epochs + 1):
        steps, loss = train(accelerator, model, optimizer, train_loader, args.micro_batches)
        accuracy = test(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {steps} steps, loss {loss:.4f}, test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
