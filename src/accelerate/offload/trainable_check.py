"""The check that only adapters on top of offloaded weights are trained, in one process."""

from __future__ import annotations

from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.offload.offloaded_tensor import OffloadedTensor


def check_trainable(model: nn.Module, *, several: bool, trained: bool) -> None:
    """Raise when a model with offloaded weights cannot be trained as asked.

    Args:
        model: the model.
        several: several processes will train it.
        trained: an optimizer is prepared with it.

    Raises:
        PrepareError: weights that are offloaded cannot be trained, or not by several processes.
    """
    offloaded = [(name, p) for name, p in model.named_parameters() if isinstance(p, OffloadedTensor)]
    if not offloaded:
        return
    if several:
        raise PrepareError(
            "a model whose weights are offloaded cannot be trained by several processes",
            why="each process would hold its own copy of the weights in memory, and exchange them all",
            fix="start one process, or load the model without device_map and let the launcher shard it",
        )
    learning = [name for name, p in offloaded if p.requires_grad]
    if trained and learning:
        raise PrepareError(
            f"{learning[0]} is offloaded and cannot be trained"
            + (f", nor can {len(learning) - 1} more" if len(learning) > 1 else ""),
            why="offloaded weights are dropped after each forward: their gradients have nowhere to go",
            fix="freeze them, model.requires_grad_(False), and train adapters on top of them",
        )
