"""What the package estimates of the memory of a training, for tests that measure the same training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.facade.estimate.activation_trace import SavedActivationBytes, trace_saved
from accelerate.facade.estimate.memory_estimate import (
    MemoryEstimateConfig,
    RankMemoryEstimate,
    estimate_training,
    measure_model,
)


def estimate_memory(
    model: nn.Module, *, batch: int, length: int, attention: str, traced: bool = True, **options: Any
) -> RankMemoryEstimate:
    """Return the estimated bytes of one rank that trains ``model`` on batches of shape (batch, length).

    Args:
        model: on the meta device.
        batch: samples in a batch.
        length: words in a sample.
        attention: ``"eager"`` or ``"fused"``.
        traced: whether the activations come from a trace of the model; else from the formula.
        options: the ways of the training, ``mixed_precision`` among them.
    """
    config = MemoryEstimateConfig(batch=batch, length=length, attention=attention, **options)
    sizes = measure_model(model, "a model")
    narrow = torch.bfloat16 if config.mixed_precision == "bf16" else None
    found = trace_saved(model, batch, length, autocast=narrow, attention=attention) if traced else None
    assert isinstance(found, SavedActivationBytes) is traced
    return estimate_training(sizes, config, found)
