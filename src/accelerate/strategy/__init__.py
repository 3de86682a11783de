"""Strategies: how one training is distributed over processes. A file or folder here is a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.core.registry import Registry

if TYPE_CHECKING:  # the launcher asks for the settings of strategies, and must not import torch
    from accelerate.strategy.base import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry("strategy", "accelerate.strategy", "accelerate.strategies")
