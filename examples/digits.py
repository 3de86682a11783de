"""Train a small convolutional network on handwritten digits: on one process or many, CPU or GPU, unchanged.

    accelerate launch --num_processes 2 examples/digits.py
    python examples/digits.py
    torchrun --nproc_per_node=2 examples/digits.py

The data are the 1,797 images of 8x8 pixels that come with scikit-learn (1,437 to train on, 360 to test on).
Every epoch ends with the test accuracy and a checkpoint in runs/digits/checkpoints; after a crash, or to go
on for longer, ``--resume`` takes up the newest one. The last line names a picture of the curves.
"""

import argparse
import math
import shutil
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed, tqdm


def read_data() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Two datasets of (image, label), image a float tensor (1, 8, 8) in 0..1; the split never changes."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(labels))
    return random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))


def build_model() -> nn.Module:
    """Three convolutions and a linear layer: images (batch, 1, 8, 8) to logits (batch, 10)."""

    def conv(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU())

    features = nn.Sequential(conv(1, 32), conv(32, 64), nn.MaxPool2d(2), conv(64, 64), nn.Flatten())
    return nn.Sequential(features, nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10))


class History:
    """The curves, one value per finished epoch. It goes into the checkpoints and says where to go on."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.accuracy: list[float] = []

    def state_dict(self) -> dict:
        return {"loss": self.loss, "accuracy": self.accuracy}

    def load_state_dict(self, state: dict) -> None:
        self.loss, self.accuracy = state["loss"], state["accuracy"]


def train(accelerator, model, optimizer, scheduler, loader, title: str) -> float:
    """One pass over the training images; the mean loss over all processes."""
    model.train()
    total = torch.zeros((), device=accelerator.device)
    bar = tqdm(loader, desc=title, unit=" samples", unit_scale=loader.total_batch_size)
    for images, labels in bar:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return accelerator.reduce(total / len(loader), reduction="mean").item()


@torch.no_grad()
def test(accelerator, model, loader) -> tuple[int, int]:
    """How many test images are recognised, and how many were looked at, over all processes."""
    model.eval()
    correct = seen = 0
    for images, labels in loader:
        predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        seen += len(labels)
    return correct, seen


def draw(history: History, path: Path) -> None:
    """Loss and accuracy per epoch, side by side, as a PNG."""
    from matplotlib.figure import Figure  # a figure without a window: needs no display

    epochs = range(1, len(history.loss) + 1)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(epochs, history.loss, marker="o", color="tab:blue")
    left.set(title="Training loss", xlabel="epoch", ylabel="cross-entropy")
    right.plot(epochs, history.accuracy, marker="o", color="tab:green")
    right.set(title="Test accuracy", xlabel="epoch", ylabel="share of the test images")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15, help="how many in total, also after --resume")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all processes")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order and the dropout")
    parser.add_argument("--project-dir", default="runs/digits", help="where checkpoints and curves go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], help="default: the launcher's")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU even if there is a GPU")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, project_config=project)
    set_seed(args.seed)

    train_set, test_set = read_data()
    # --batch-size is shared out, so a step sees as many images on any number of processes.
    share = args.batch_size // accelerator.num_processes
    train_loader = DataLoader(train_set, share, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # Counted before prepare: a prepared scheduler advances by the steps of all processes together.
    steps = args.epochs * len(train_loader)
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / steps))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, cosine
    )
    history = History()
    accelerator.register_for_checkpointing(history)

    if args.resume:
        accelerator.load_state()
        accelerator.print(f"resumed after epoch {len(history.loss)}")
    elif accelerator.is_main_process:
        shutil.rmtree(Path(args.project_dir, "checkpoints"), ignore_errors=True)  # a new run starts over
    accelerator.wait_for_everyone()

    for epoch in range(len(history.loss) + 1, args.epochs + 1):
        title = f"epoch {epoch}/{args.epochs}"
        loss = train(accelerator, model, optimizer, scheduler, train_loader, title)
        correct, seen = test(accelerator, model, test_loader)
        accuracy = correct / seen
        accelerator.print(f"{title}: loss {loss:.4f}, test accuracy {accuracy:.4f} ({correct} of {seen})")
        history.loss.append(loss)
        history.accuracy.append(accuracy)
        accelerator.log({"loss": loss, "test accuracy": accuracy}, step=epoch)
        accelerator.save_state()

    if accelerator.is_main_process:
        picture = Path(args.project_dir, "curves.png").resolve()
        draw(history, picture)
        print(f"curves: {picture}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
