"""Files with weights for tests that load them, and the error of weights that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.checkpoint import save, weight_files
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.checkpoint.weight_loading import WeightsMismatchError

# Tensors whose data are no strided block; which of them a `weights_only` load builds depends on torch.
ODD_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
}


def write_weights(state: Mapping[str, Any], folder: Path, **options: Any) -> list[str]:
    """Write a model's state as the hub has it, in one file or in shards; return the names of the files."""
    return weight_files.save_weights(state, folder, **options)


def write_checkpoint(model: nn.Module, folder: Path, *, safe: bool) -> Path:
    """Write the checkpoint of a training that has only a model; return its folder."""
    return Path(save.save(CheckpointContents([model]), folder, safe_serialization=safe))


def misfit(match: str | None = None) -> Any:
    """The context of a call that is refused because weights do not fit the model."""
    return pytest.raises(WeightsMismatchError, match=match)
