"""Run a model that is spread over processes: each holds some layers, and chunks of a batch pass through.

    accelerate launch --num_processes 2 examples/pipeline.py
    accelerate launch --num_processes 4 examples/pipeline.py --chunks 16

A transformer with random weights scores some sequences. The last process has the result; the main process
prints what each process holds, and draws when it was at work.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate import PartialState, prepare_pippy
from accelerate.utils import gather_object


class Scorer(nn.Module):
    """Tokens (batch, length) to one score per sequence."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def draw(intervals, path: Path) -> None:
    """One row per process, one bar per chunk, in milliseconds since the first."""
    from matplotlib.figure import Figure  # a figure without a window: needs no display

    stages = max(interval.stage for interval in intervals) + 1
    start = min(interval.begin for interval in intervals)
    figure = Figure(figsize=(9, 1.2 + 0.5 * stages), layout="constrained")
    axes = figure.subplots()
    for interval in intervals:
        left, width = (interval.begin - start) * 1e3, (interval.end - interval.begin) * 1e3
        axes.barh(interval.stage, width, left=left, color=f"C{interval.chunk % 10}", edgecolor="white")
        axes.text(
            left + width / 2, interval.stage, str(interval.chunk), ha="center", va="center", color="white"
        )
    axes.set(xlabel="milliseconds", yticks=range(stages), yticklabels=[f"process {s}" for s in range(stages)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score sequences by a model spread over processes.")
    parser.add_argument("--sequences", type=int, default=32, help="in the batch")
    parser.add_argument("--chunks", type=int, default=8, help="that the batch is cut into")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--picture", type=Path, help="where to draw the timeline, a .png")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU even if there is a GPU")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    state = PartialState(cpu=args.cpu)
    torch.manual_seed(0)  # the same weights on every process
    model: Any = Scorer(args.width, args.layers).eval()
    tokens = torch.randint(0, 1000, (args.sequences, 64))

    whole = sum(weight.nbytes for weight in model.parameters())
    model = prepare_pippy(model, example_args=(tokens,), num_chunks=args.chunks)
    here = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    for rank, size in enumerate(gather_object([here])):
        state.print(f"process {rank} holds {size / 1e6:.1f} of {whole / 1e6:.1f} MB")
    state.print(f"cut before {', '.join(model.hf_split_points) or 'nothing'}")

    scores = model(tokens)
    if state.is_last_process:
        print(f"scored {len(scores)} sequences, the mean score is {scores.mean():.4f}", flush=True)

    if args.picture and state.num_processes > 1:
        model.pipeline_timeline(tokens)  # the first run with it warms up
        intervals = model.pipeline_timeline(tokens)
        if state.is_main_process:
            draw(intervals, args.picture)
            print(f"timeline: {args.picture}")
    state.wait_for_everyone()


if __name__ == "__main__":
    main()
