"""Profile a few training steps: a Chrome trace and a picture of the memory for every process.

    python examples/profiler.py
    accelerate launch --num_processes 2 examples/profiler.py

Open the trace at https://ui.perfetto.dev or chrome://tracing. The picture shows what fills the memory over
time: parameters, the optimizer's state, gradients, activations.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ProfileKwargs
from accelerate.utils import set_seed


def build_model() -> nn.Module:
    """Two convolutions and a linear layer: images (batch, 1, 8, 8) to logits (batch, 10)."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a training on handwritten digits.")
    parser.add_argument("--folder", default="runs/profiler", help="where traces and pictures go")
    args = parser.parse_args()

    # The first step is left out and the second warms up: both are slower than the rest.
    profile = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 3, "repeat": 1},
        output_trace_dir=args.folder,
        memory_timeline=True,
    )
    accelerator = Accelerator(kwargs_handlers=[profile])
    set_seed(0)
    pixels, labels = (column[:768] for column in load_digits(return_X_y=True))  # six batches
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(labels)), batch_size=128, shuffle=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with accelerator.profile() as profiler:
        for images, labels in loader:
            with torch.profiler.record_function("forward"):
                loss = F.cross_entropy(model(images), labels)
            with torch.profiler.record_function("backward"):
                accelerator.backward(loss)
            with torch.profiler.record_function("step"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()

    if accelerator.is_main_process:
        averages = {event.key: event for event in profiler.key_averages()}
        for name in ("forward", "backward", "step"):
            print(f"{name:9}{averages[name].cpu_time / 1e3:8.2f} ms on average over 3 steps")
        for path in sorted(Path(args.folder).resolve().iterdir()):
            print(f"{path} ({path.stat().st_size // 1024} KB)")
    accelerator.end_training()


if __name__ == "__main__":
    main()
