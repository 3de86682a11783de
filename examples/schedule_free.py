"""Train without a learning rate schedule, by a schedule-free optimizer, and compare with a plain loop.

    pip install schedulefree
    python examples/schedule_free.py
    accelerate launch --num_processes 2 examples/schedule_free.py

Schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682) train at one point and evaluate at a mean:
``optimizer.train()`` before training, ``optimizer.eval()`` before evaluating and before saving.
"""

import copy

import schedulefree
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

BATCH, EPOCHS, TEST = 64, 4, 297


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    return TensorDataset(images[TEST:], labels[TEST:]), TensorDataset(images[:TEST], labels[:TEST])


def train_plainly(model: nn.Module, data: TensorDataset) -> list[float]:
    """The losses of a loop without this package."""
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=5e-3)
    optimizer.train()
    losses = []
    for _ in range(EPOCHS):
        for images, labels in DataLoader(data, batch_size=BATCH, drop_last=True):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    learn, test = read_digits()
    expected = train_plainly(copy.deepcopy(model), learn)

    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=5e-3)
    loader = DataLoader(learn, batch_size=BATCH, drop_last=True)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, DataLoader(test, batch_size=BATCH)
    )
    losses = []
    optimizer.train()
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.mean_loss(loss.detach()).item())

    optimizer.eval()
    right = counted = 0
    with torch.inference_mode():
        for images, labels in test_loader:
            found = accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels)
            right, counted = right + int(found.sum()), counted + len(found)
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {right} of {counted} test images right")
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    accelerator.print(f"largest difference {difference:.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
