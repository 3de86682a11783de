"""Greedy generation by a decoder whose blocks lie on the device, in host memory and on the disk.

raw is the same model on the device as a whole. Each token is one forward over a window of the last tokens, at
batch 1: the weights that are not on the device cross to it once per token.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from benchmarks.case import BenchError, Sample, alternate, report
from benchmarks.cases.offload_gpu import accelerator

WORDS, WINDOW = 1024, 64


def decoder(width: int, layers: int) -> Any:
    """Embedding, blocks with causal attention, and a head."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            parts = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(x)))

    torch.manual_seed(0)
    blocks = nn.ModuleDict({str(number): Block() for number in range(layers)})

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks, self.head = (
                nn.Embedding(WORDS, width),
                blocks,
                nn.Linear(width, WORDS),
            )

        def forward(self, words: Any) -> Any:
            x = self.embedding(words)
            for block in self.blocks.values():
                x = block(x)
            return self.head(x[:, -1])

    return Decoder().eval().requires_grad_(False)


def main(width: int, layers: int, tokens: int, blocks: int, half: bool) -> Sample:
    import copy

    import torch

    from accelerate import dispatch_model

    where, module = accelerator()
    model = decoder(width, layers).to(torch.float16 if half else torch.float32)
    whole = copy.deepcopy(model).to(where)
    places: dict[str, Any] = {"embedding": 0, "head": 0}
    for number in range(layers):
        place = 0 if number < layers // 2 else "cpu" if number < layers * 3 // 4 else "disk"
        places[f"blocks.{number}"] = place
    folder = tempfile.TemporaryDirectory(prefix="accelerate-generation-")
    spread = dispatch_model(model, places, offload_dir=folder.name)

    def generate(net: Any) -> Any:
        words = torch.zeros(1, 1, dtype=torch.long, device=where)
        with torch.no_grad():
            for _ in range(tokens):
                word = net(words[:, -WINDOW:]).argmax(-1, keepdim=True)
                words = torch.cat([words, word.to(words.device)], 1)
        module.synchronize()
        return words

    if not torch.equal(generate(whole), generate(spread)):
        raise BenchError("the model that is spread says other words")
    sample = alternate(
        lambda: generate(whole), lambda: generate(spread), "ratio", blocks=blocks, steps=tokens
    )
    folder.cleanup()
    facts = {"tokens/s, spread and whole:": f"{1e6 / sample.value:.1f}, {1e6 / sample.base:.1f}"}
    return Sample(sample.base, sample.value, sample.figure, sample.noise, facts)


if __name__ == "__main__":
    width, layers, tokens, blocks = map(int, sys.argv[1:5])
    report(main(width, layers, tokens, blocks, sys.argv[5] == "fp16"))
