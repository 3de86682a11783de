"""What either version of sharding has to do alike: jobs for ranks, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RanksError, RankServer
from tests.support.sharded_models import adamw, batches, loss_of, share, tiny

IGNORED = -100
# Words of each row that count: the traps' lengths, then two rows without any.
LENGTHS = [1, 6, 2, 5, 6, 1, 3, 4]


# --- items: gradients of one step


def labelled(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, labels), (rows, 7) each; only the first ``lengths`` labels of a row count."""
    chance = torch.Generator().manual_seed(3)
    words = torch.randint(11, (len(lengths), 7), generator=chance)
    labels = words.roll(-1, 1)
    for row, length in enumerate(lengths):
        labels[row, length:] = IGNORED
    return words, labels


def mean_loss(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over the words that count; NaN where none does."""
    return nn.functional.cross_entropy(model(words).flatten(0, 1), labels.flatten())


def weigh(accelerator: Any, model: nn.Module, lengths: list[int], window: int) -> None:
    """The backwards of one step; rows are dealt to micro-batches and ranks in order."""
    words, labels = labelled(lengths)
    for micro in range(window):
        with accelerator.accumulate(model):
            rank = accelerator.process_index
            mine = [part.chunk(window)[micro].chunk(2)[rank] for part in (words, labels)]
            tokens = (mine[1] != IGNORED).sum()
            accelerator.backward(mean_loss(model, *mine), num_items=tokens)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole ones, of the parameters that have any."""
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def weighed(lengths: list[int]) -> dict[str, torch.Tensor]:
    """The gradients of one process and one batch."""
    model = tiny()
    mean_loss(model, *labelled(lengths)).backward()
    return gradients(model)


# --- windows, of which the last is shorter


def in_windows(pieces: list[torch.Tensor]) -> tuple[list[float], nn.Module]:
    """(norms, model) of one process, in windows of two."""
    model = tiny()
    optimizer = adamw(model)
    norms = []
    for piece in (pieces[:2], pieces[2:4], pieces[4:]):
        for words in piece:
            (loss_of(model, words) / len(piece)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model


# --- two models, of which one trains in the second half no more


def train_two(accelerator: Any, *, evaluate: bool = False) -> tuple[nn.Module, nn.Module]:
    """In windows of two; with ``evaluate`` there is a forward between each backward and its step."""
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (tiny(1), tiny(2))]
    (one, two), optimizers = zip(*(accelerator.prepare(*pair) for pair in pairs), strict=True)
    for step, words in enumerate(batches(8)):
        mine = share(words, accelerator.process_index, 2)
        with accelerator.accumulate(one, two):
            accelerator.backward(loss_of(one, mine))
            if step < 4:
                accelerator.backward(loss_of(two, mine))
            if evaluate:
                with torch.no_grad():
                    one(mine)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return one, two


def trained_two() -> list[nn.Module]:
    """Both, of one process."""
    found: list[nn.Module] = []
    for seed, count in ((1, 8), (2, 4)):
        model = tiny(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step, words in enumerate(list(batches(8))[:count]):
            (loss_of(model, words) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(model)
    return found


# --- states that do not fit


LEFT_OUT = ["frozen.weight", "layers.0.up.bias", "scale"]


def load_wrong(accelerator: Any, model: nn.Module, optimizer: Any, case: str) -> str:
    """Loads one; what is missing, where that is allowed."""
    state = tiny(1).state_dict()
    if case == "missing":
        del state["layers.0.up.bias"]
    elif case == "buffer":
        del state["scale"]
    elif case == "more":
        state["other"] = torch.ones(1)
    elif case == "shape":
        state["layers.0.up.bias"] = torch.ones(3)
    elif case == "loose":
        for name in LEFT_OUT:
            del state[name]
        return str(sorted(accelerator.strategy.load_model(model, state, strict=False).missing_keys))
    else:
        small = torch.optim.AdamW(nn.Linear(1, 1).parameters()).state_dict()
        accelerator.strategy.load_optimizer(optimizer.optimizer, [model], small)
    accelerator.strategy.load_model(model, state)
    return ""


def refuses_wrong_states(ranks: RankServer, job: Any) -> None:
    """``job(case)`` prepares, and calls ``load_wrong``."""
    assert ranks(2, job, "loose") == [str(LEFT_OUT)] * 2
    for case, words in {
        "missing": "Missing key",
        "buffer": "Missing key.*scale",
        "more": "Unexpected key",
        "shape": r"size mismatch for layers\.0\.up\.bias",
        "groups": "of an optimizer of 2 parameters",
    }.items():
        with pytest.raises(RanksError, match=words):
            ranks(2, job, case)
