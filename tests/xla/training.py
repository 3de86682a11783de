"""The training of the small decoder on XLA, and how often XLA compiles in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from tests.support import parity
from tests.support.numbers import Numbers


class Training(NamedTuple):
    """The objects of a training."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any


def prepared(loader: DataLoader[Any] | None = None, seed: int = 0, **options: Any) -> Training:
    """The decoder, its optimizer and its data, prepared."""
    accelerator = Accelerator(**options)
    model = parity.decoder(seed)
    objects = accelerator.prepare(model, parity.adamw(model), loader or parity.loader())
    return Training(accelerator, *objects)


def compilations() -> int:
    """How many graphs XLA has compiled in this process."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def epoch(training: Training, begin: int = 0, end: int | None = None) -> tuple[Numbers, list[int]]:
    """(losses, norms, weights) of micro-batches ``begin`` to ``end``, and compilations after each."""
    accelerator, model, optimizer, loader = training
    losses, norms, compiled = [], [], []
    for number, batch in enumerate(loader):
        if not begin <= number < (parity.STEPS if end is None else end):
            continue
        with accelerator.accumulate(model):
            loss = parity.loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        compiled.append(compilations())
    return (
        ([each.item() for each in losses], [each.item() for each in norms], weights(training)),
        compiled,
    )


def weights(training: Training) -> dict[str, torch.Tensor]:
    """The state of the model, on the host."""
    state = training.accelerator.unwrap_model(training.model).state_dict()
    return {name: value.cpu() for name, value in state.items()}
