"""Log a training with trackers: numbers, a table, a picture and the hyperparameters, once for all processes.

    python examples/tracking.py
    accelerate launch --num_processes 2 examples/tracking.py --trackers jsonl tensorboard --folder logs

``jsonl`` needs no package: a file of one line per entry. Other names are those of ``log_with=``: ``wandb``,
``mlflow``, ``comet_ml``, ``aim``, ...; docs/trackers.md says how each is used offline.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

CONFIG = {"lr": 0.05, "batch_size": 16, "epochs": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description="Log a small training.")
    parser.add_argument("--trackers", nargs="+", default=["jsonl"])
    parser.add_argument("--folder", type=Path, default=Path("runs/tracking"))
    args = parser.parse_args()
    accelerator = Accelerator(log_with=args.trackers, project_dir=args.folder)
    accelerator.init_trackers("tracking", config=CONFIG)

    torch.manual_seed(0)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=int(CONFIG["batch_size"]))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    rows = []
    for epoch in range(int(CONFIG["epochs"])):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
        mean = accelerator.mean_loss(total / len(loader)).item()  # over all processes; every process calls it
        accelerator.log({"loss": mean, "epoch": epoch}, step=step)
        rows.append([epoch, mean])

    for tracker in accelerator.trackers:  # none on other processes than the main one
        tracker.log_table("losses", columns=["epoch", "loss"], data=rows, step=step)
        if tracker.name != "jsonl":  # a file of lines has no pictures
            weights = accelerator.unwrap_model(model).weight.detach().abs().clamp(0, 1).cpu()
            tracker.log_images({"weights": [weights.repeat_interleave(16, 0).numpy()]}, step=step)
    accelerator.end_training()  # ends the runs
    accelerator.print(f"the loss went from {rows[0][1]:.4f} to {rows[-1][1]:.4f}; logged to {args.folder}")


if __name__ == "__main__":
    main()
