"""Compare two number formats by cross-validation: every sample is predicted by a model that never saw it.

    python examples/cross_validation.py
    accelerate launch --num_processes 2 examples/cross_validation.py

The data are the 178 wines that come with scikit-learn. Each format has an Accelerator of its own; each fold
trains a fresh model on all processes together, whose predictions for the held-out wines are gathered. Then
the memory of the fold is given back.
"""

import argparse

import torch
from sklearn.datasets import load_wine
from sklearn.metrics import accuracy_score
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

Rows = Subset[tuple[torch.Tensor, ...]]


def read_data() -> TensorDataset:
    """(13 measurements, standardised; one of 3 growers) for each wine."""
    measured, grower = load_wine(return_X_y=True)
    measured = (measured - measured.mean(axis=0)) / measured.std(axis=0)
    return TensorDataset(torch.tensor(measured, dtype=torch.float32), torch.tensor(grower))


def run_fold(accelerator: Accelerator, train_set: Rows, test_set: Rows, epochs: int) -> list[int]:
    """Trains on one part and predicts the other; the predictions, in the order of ``test_set``."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    share = 32 // accelerator.num_processes
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, share, shuffle=True), DataLoader(test_set, batch_size=8)
    )
    for _ in range(epochs):
        for measured, grower in train_loader:
            accelerator.backward(F.cross_entropy(model(measured), grower))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    predictions: list[int] = []
    with torch.no_grad():
        for measured, _ in test_loader:
            predictions += accelerator.gather_for_metrics(model(measured).argmax(1)).tolist()
    # The objects of this fold are forgotten, so that the next one does not keep them alive.
    accelerator.free_memory()
    return predictions


def main() -> None:
    parser = argparse.ArgumentParser(description="Cross-validation on wines, in two number formats.")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    dataset = read_data()
    growers = dataset.tensors[1]
    folds = list(StratifiedKFold(args.folds, shuffle=True, random_state=0).split(growers, growers))
    for precision in ("no", "bf16"):
        accelerator = Accelerator(mixed_precision=precision)
        predicted = torch.full_like(growers, -1)
        scores = []
        for train_part, test_part in folds:
            train_set, test_set = Subset(dataset, train_part.tolist()), Subset(dataset, test_part.tolist())
            found = run_fold(accelerator, train_set, test_set, args.epochs)
            predicted[test_part] = torch.tensor(found)
            scores.append(accuracy_score(growers[test_part], found))
        right = int((predicted == growers).sum())
        shown = " ".join(f"{score:.3f}" for score in scores)
        accelerator.print(
            f"mixed_precision={precision}: folds {shown}, {right} of {len(growers)} wines right"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
