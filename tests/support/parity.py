"""A small decoder with everything that strategies stumble over, and its training in one plain loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.long_run import LONG_RUN
from tests.support.numbers import Numbers, plainly
from tests.support.numbers import close as close

WORDS, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 4, 8, 8
STEPS = 20 if LONG_RUN else 8
# DTensor works out how an operation is sharded once for each shape, in each rank: by default all matrices of
# a block have one.
INNER = 4 * WIDTH if LONG_RUN else WIDTH


class Attention(nn.Module):
    """Causal, with rotated positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH), (batch, length) -> (batch, length, WIDTH)."""
        rows, length, _ = x.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)

        q, k, v = (heads(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, positions), rotated(k, positions)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021) of (batch, heads, length, size)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.chunk(2, -1)
    y = torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
    return y.to(x.dtype)


class Block(nn.Module):
    """Attention and a small network, each beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH), (batch, length) -> (batch, length, WIDTH)."""
        x = x + self.attention(self.first(x), positions)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Tied embeddings, four blocks, or fewer, of which a second is frozen, no dropout."""

    _no_split_modules = ("Block",)

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight
        self.layers[1:2].requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, length) -> (batch, length, WORDS)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.head(self.norm(x))


# By names, for tensor parallelism: heads and the inner width are shared.
PLAN = {
    **{f"layers.*.attention.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.attention.o_proj": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


def decoder(seed: int = 0, blocks: int = 4) -> Decoder:
    """The model, for a seed always with the same weights."""
    torch.manual_seed(seed)
    return Decoder(blocks)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Frozen parameters are in it, as in many scripts. ``eps`` keeps rounding from deciding about a step."""
    return torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01, eps=1e-4)


def samples() -> list[dict[str, torch.Tensor]]:
    """Words of an order that can be learned, and the next word of each."""
    chance = torch.Generator().manual_seed(7)
    start = torch.randint(WORDS, (STEPS * ROWS, 1), generator=chance)
    step = torch.randint(1, 4, (STEPS * ROWS, 1), generator=chance)
    words = (start + step * torch.arange(LENGTH + 1)) % WORDS
    return [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in words]


def loader(rows: int = ROWS, workers: int = 0, steps: int = STEPS) -> DataLoader[Any]:
    """The samples of the first ``steps`` batches, in order, ``rows`` at once."""
    return DataLoader(samples()[: steps * ROWS], batch_size=rows, num_workers=workers)  # type: ignore[arg-type]


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross entropy over this process's words."""
    inputs = {name: value for name, value in batch.items() if name in ("input_ids", "position_ids")}
    logits = model(**inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"].flatten())


@cache
def plain(window: int, half: bool = False, steps: int = STEPS, blocks: int = 4) -> Numbers:
    """Losses, norms and weights of the loop without this package, on one process; not to be changed."""
    model = decoder(blocks=blocks)
    losses, norms = plainly(model, adamw(model), loader(steps=steps), loss_of, window, half)
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}
