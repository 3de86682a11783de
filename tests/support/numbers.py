"""What a training gives, and the plain loop on one process that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

# Losses, global norms of the gradients, weights by their names.
Numbers = tuple[list[float], list[float], dict[str, torch.Tensor]]


def plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[[Any, Any], torch.Tensor],
    window: int,
    half: bool = False,
) -> tuple[list[float], list[float]]:
    """(losses, norms) of the loop without this package, clipped at 0.5, on whole batches."""
    losses, norms = [], []
    for step, batch in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_of(model, batch)
        (loss / window).backward()
        losses.append(loss.item())
        if step % window == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def close(ours: Numbers, theirs: Numbers, within: float) -> None:
    """Losses, norms and weights are equal within an absolute distance."""
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=within)
    same(ours[2], theirs[2], within)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], within: float) -> None:
    """The same names, with values that are equal within an absolute distance."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=within, msg=lambda text, n=name: f"{n}: {text}"
        )


def can_be_copied(dtype: torch.dtype) -> bool:
    """Return whether this torch copies a dtype that it has: 2.8 has 4-bit floats, and cannot."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        return False
    return True
