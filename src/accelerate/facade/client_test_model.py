"""A model of one line and its data, for the tests of other projects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn


class RegressionDataset:
    """Points of a line, with noise: items are ``{"x": float, "y": a * x + b + noise}``, float32.

    Args:
        a, b: of the line.
        length: the number of points.
        seed: of the points and the noise.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        chance = np.random.default_rng(seed)
        self.length = length
        self.x = chance.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + chance.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """The line ``a * x + b``; the first forward prints the dtypes of the parameters and of the input.

    Args:
        a, b: initial values of the two parameters, scalars.
        double_output: kept for compatibility; without effect.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``a * x + b``, of the shape of ``x``."""
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        return x * self.a + self.b
