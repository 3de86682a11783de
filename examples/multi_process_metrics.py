"""Exact metrics on several processes: every test sample counts once, whatever does not divide evenly.

    python examples/multi_process_metrics.py
    accelerate launch --num_processes 2 examples/multi_process_metrics.py

351 test images on batches of 16 do not divide by the processes: the last step is filled up with samples that
were seen already. ``gather`` shows them, ``gather_for_metrics`` leaves them out, and keeps the order of the
data set, so that any metric of any library is exact. Objects are gathered the same way.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

TRAINED = 1446


def train(accelerator, model, optimizer, loader, epochs: int) -> None:
    for _ in range(epochs):
        for images, labels, _ in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Predictions and labels of all test images, mistakes in words, and the rows that plain gather gives."""
    model.eval()
    predictions, answers, mistakes, rows = [], [], [], 0
    for images, labels, numbers in loader:
        guesses = model(images).argmax(1)
        rows += len(accelerator.gather(guesses))
        guesses_of_all, labels_of_all = accelerator.gather_for_metrics((guesses, labels))
        predictions.append(guesses_of_all.cpu())
        answers.append(labels_of_all.cpu())
        words = [
            f"image {number}: {label} taken for {guess}" if label != guess else ""
            for number, label, guess in zip(numbers.tolist(), labels.tolist(), guesses.tolist(), strict=True)
        ]
        mistakes += [text for text in accelerator.gather_for_metrics(words, use_gather_object=True) if text]
    return torch.cat(predictions), torch.cat(answers), mistakes, rows


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, numbers = torch.tensor(pixels, dtype=torch.float32) / 16, torch.arange(len(labels))
    columns = images, torch.tensor(labels), numbers
    train_set = TensorDataset(*(column[:TRAINED] for column in columns))
    test_set = TensorDataset(*(column[TRAINED:] for column in columns))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, 32, shuffle=True), DataLoader(test_set, batch_size=16)
    )
    train(accelerator, model, optimizer, train_loader, epochs=4)
    predictions, answers, mistakes, rows = evaluate(accelerator, model, test_loader)

    in_order = torch.equal(answers, test_set.tensors[1])
    accelerator.print(
        f"{len(test_set)} test images: gather gave {rows} rows, gather_for_metrics {len(answers)}"
    )
    accelerator.print(f"in the order of the data set: {in_order}")
    score = accuracy_score(answers, predictions), f1_score(answers, predictions, average="macro")
    accelerator.print(
        f"accuracy {score[0]:.4f}, macro F1 {score[1]:.4f}, {len(mistakes)} mistakes; the first:"
    )
    for text in mistakes[:3]:
        accelerator.print(f"  {text}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
