"""Load a checkpoint into a model that may be larger than the memory, and generate with it.

    python examples/big_model.py
    python examples/big_model.py --cpu-memory 15MB
    python examples/big_model.py --device-memory 20MB --cpu-memory 10MB

The model is built without memory. Each of its layers goes to an accelerator while there is room, then to the
host memory, and the rest stays in the files of the checkpoint; hooks bring in what a forward needs. Without a
checkpoint of your own, one of 40 MB with random weights is written to runs/big_model first.
"""

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch

VOCABULARY, WIDTH, LAYERS = 256, 320, 8


class Block(nn.Module):
    """Attention to what came before, and a two-layer network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.network(self.norms[1](x))


class LanguageModel(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary); the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def write_checkpoint(folder: Path) -> None:
    """A checkpoint in several files, as large models come."""
    torch.manual_seed(0)
    Accelerator(cpu=True).save_model(LanguageModel(), folder, max_shard_size="10MB")


def budgets(args: argparse.Namespace) -> dict | None:
    """The memory that each device may give; None: what it has."""
    asked = {0: args.device_memory, "cpu": args.cpu_memory}
    given = {device: size for device, size in asked.items() if size}
    if args.cpu or not torch.accelerator.is_available():
        return {"cpu": args.cpu_memory or "1TB"}
    return given or None


@torch.no_grad()
def generate(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """``count`` next tokens, drawn at temperature 0.4, always the same ones."""
    tokens, chance = torch.tensor([prompt]), torch.Generator().manual_seed(0)
    for _ in range(count):
        likely = (model(tokens)[:, -1].float().cpu() / 0.4).softmax(dim=-1)
        tokens = torch.cat([tokens, likely.multinomial(1, generator=chance)], dim=1)
    return tokens[0, len(prompt) :].tolist()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate with a model that may be larger than the memory.")
    parser.add_argument("--checkpoint", type=Path, help="a folder or file; default: write one of 40 MB")
    parser.add_argument("--device-memory", help="of the first accelerator, such as 20MB; default: all of it")
    parser.add_argument("--cpu-memory", help="of the host, such as 15MB; default: all of it")
    parser.add_argument("--offload-folder", type=Path, default=Path("runs/big_model/offload"))
    parser.add_argument("--cpu", action="store_true", help="leave an accelerator alone")
    parser.add_argument("--tokens", type=int, default=12, help="how many to generate")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    checkpoint = args.checkpoint or Path("runs/big_model/checkpoint")
    if not checkpoint.exists():
        write_checkpoint(checkpoint)

    with init_empty_weights():
        model = LanguageModel()
    model = load_checkpoint_and_dispatch(
        model,
        checkpoint,
        device_map="auto",
        max_memory=budgets(args),
        no_split_module_classes=["Block"],
        offload_folder=args.offload_folder,
    )
    model.eval()

    device_map: Any = model.hf_device_map
    for device, names in groupby(device_map, key=device_map.get):
        print(f"{device}: {' '.join(names) or 'everything'}")
    print("generated:", *generate(model, [1, 2, 3], args.tokens))


if __name__ == "__main__":
    main()
