"""A small transformer with tied embeddings and a frozen layer, for tests of sharded training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.support.numbers import Numbers, plainly

WORDS, WIDTH = 11, 8
STEPS = 8


class Block(nn.Module):
    """Attention-free: mixes positions by their mean, then by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH) -> the same."""
        return x + self.down(torch.tanh(self.up(self.norm(x + x.mean(1, keepdim=True)))))


class Tiny(nn.Module):
    """Embeddings, two blocks, a frozen layer, and an output layer that shares the embeddings' weights."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> (batch, length, WORDS)."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x) * self.get_buffer("scale")[0])


def tiny(seed: int = 0) -> Tiny:
    """The model, always with the same weights."""
    torch.manual_seed(seed)
    return Tiny()


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    """Two groups: matrices decay, the others do not. Frozen parameters are in it, as in many scripts."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, **more)


def batches(steps: int, rows: int = 8, length: int = 5) -> Iterator[torch.Tensor]:
    """Batches of words, (rows, length) each."""
    chance = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield torch.randint(WORDS, (rows, length), generator=chance)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next word."""
    logits = model(words[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())


def fill_all(module: nn.Module) -> None:
    """A ``param_init_fn``: every parameter and buffer."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.25)


def fill_parameters(module: nn.Module) -> None:
    """One that leaves the buffers."""
    for tensor in module.parameters(recurse=False):
        nn.init.constant_(tensor, 0.25)


def fill_matrices(module: nn.Module) -> None:
    """One that knows some types of modules only."""
    if isinstance(module, nn.Linear | nn.Embedding):
        fill_parameters(module)


def to_empty(module: nn.Module) -> None:
    """The usual one of FSDP: memory, and no values."""
    module.to_empty(device="cpu", recurse=False)


INITIALIZERS = {
    "filled": fill_all,
    "buffers left": fill_parameters,
    "norms left": fill_matrices,
    "emptied": to_empty,
}
# The first tensor that one of them leaves without values.
UNFILLED = {"buffers left": "scale", "norms left": "layers.0.norm.weight", "emptied": "embed.weight"}


def share(words: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rows of one process."""
    return words.chunk(size)[rank]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter as one process would have it, by name."""
    return {
        name: getattr(p.detach(), "full_tensor", p.detach)().clone() for name, p in model.named_parameters()
    }


def plain(window: int, half: bool = False) -> Numbers:
    """Losses, norms and weights of one process without this package."""
    model = tiny()
    losses, norms = plainly(model, adamw(model), batches(STEPS), loss_of, window, half)
    return losses, norms, whole(model)


def gathered_groups(model: nn.Module) -> list[Any]:
    """Return torch's groups of parameters that a model sharded by FSDP2 gathers together."""
    from accelerate.strategy.sharding.grads import fsdp_param_groups

    return list(fsdp_param_groups(model))
