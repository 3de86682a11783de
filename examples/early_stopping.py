"""Stop all processes together when one of them has seen enough.

    python examples/early_stopping.py
    accelerate launch --num_processes 2 examples/early_stopping.py

A network learns handwritten digits of scikit-learn. Each process looks at its own share of the validation
images, and pulls the trigger when their loss has not fallen for some epochs. No process may leave the loop
alone: the others would wait for its gradients. ``check_trigger`` tells all of them in the same epoch.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import set_seed


def read_data() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Two datasets of (pixels, label), pixels a float tensor (64,) in 0..1; the split never changes."""
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [1397, 400], generator=torch.Generator().manual_seed(0))


class Patience:
    """Whether a loss has not fallen below its lowest value for ``epochs`` times in a row."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.lowest, self.waited = epochs, float("inf"), 0

    def lost(self, loss: float) -> bool:
        self.waited = 0 if loss < self.lowest else self.waited + 1
        self.lowest = min(loss, self.lowest)
        return self.waited >= self.epochs


def train(accelerator, model, optimizer, loader) -> None:
    """One pass over the training images."""
    model.train()
    for images, labels in loader:
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def validate(model, loader) -> float:
    """The mean loss over this process's share of the validation images."""
    model.eval()
    losses = [F.cross_entropy(model(images), labels) for images, labels in loader]
    return torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits until it does not get better.")
    parser.add_argument("--epochs", type=int, default=100, help="at most so many")
    parser.add_argument("--patience", type=int, default=2, help="epochs without a lower loss")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train_set, validation_set = read_data()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer, train_loader, validation_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(train_set, batch_size=64 // accelerator.num_processes, shuffle=True),
        DataLoader(validation_set, batch_size=50),
    )
    patience, epoch = Patience(args.patience), 0
    for epoch in range(1, args.epochs + 1):
        train(accelerator, model, optimizer, train_loader)
        loss = validate(model, validation_loader)
        if patience.lost(loss):
            print(
                f"process {accelerator.process_index}: no lower loss for {args.patience} epochs", flush=True
            )
            accelerator.set_trigger()
        mean = accelerator.reduce(torch.tensor(loss, device=accelerator.device), reduction="mean").item()
        accelerator.print(f"epoch {epoch}: validation loss {mean:.4f}")
        if accelerator.check_trigger():
            break
    print(f"process {accelerator.process_index} stopped after epoch {epoch}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
