"""Compiling the blocks of a transformer one by one, against compiling it as a whole, by inductor.

One process on the CPU: an embedding and 24 blocks of attention and a feed-forward network, width 256, four
sequences of 64. The compile time is that of the first training step, without code kept from before.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from benchmarks.case import Case, Sample, Subject, alternate, report, worker

BLOCKS, WIDTH, HEADS, LENGTH, ROWS, WORDS = 24, 256, 4, 64, 4, 128


def measure(what: str):
    def run(subject: Subject, quick: bool) -> Sample:
        return worker(subject, __name__, what, "4" if quick else "12")

    return run


CASES = (
    Case(
        "first step of 24 blocks, compiled block by block, against as a whole",
        "us",
        "ratio",
        0.2,
        measure("first"),
        rounds=1,
        peer_rounds=1,
    ),
    Case(
        "later steps of 24 blocks, compiled block by block, against as a whole",
        "us",
        "ratio",
        1.05,
        measure("later"),
        rounds=1,
        peer_rounds=1,
    ),
)


def main(what: str, count: int) -> None:
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="accelerate-benchmarks-")
    import torch
    from torch import nn

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            rows, length, _ = x.shape
            parts = self.qkv(self.first(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, length, -1))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS
    inductor: Any = torch._inductor
    inductor.config.force_disable_caches = True

    def prepared(regional: bool):
        AcceleratorState._reset_state(True)
        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
        torch.manual_seed(0)
        model = Transformer()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

        def step() -> None:
            accelerator.backward(model(ids))
            optimizer.step()
            optimizer.zero_grad()

        return step

    # What torch loads once, at the first compilation of a process, is neither's.
    torch.compile(nn.Linear(8, 8))(torch.randn(2, 8)).sum().backward()
    steps, seconds = [], []
    for regional in (False, True):
        torch._dynamo.reset()
        steps.append(prepared(regional))
        start = time.perf_counter()
        steps[-1]()
        seconds.append((time.perf_counter() - start) * 1e6)
    if what == "first":
        report(Sample(*seconds, figure=seconds[1] / seconds[0], noise=0.0))
    else:
        report(alternate(steps[0], steps[1], "ratio", blocks=count, steps=1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
