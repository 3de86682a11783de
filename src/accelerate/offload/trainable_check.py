"""Checks before a model with offloaded weights is trained: which weights learn, and by how many processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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


def check_quantized(model: nn.Module, *, can_train_on_cpu: Callable[[], bool]) -> None:
    """Raise when a model in 8 or 4 bits is to be trained while its device map offloads parts of it.

    Args:
        model: the model; one that transformers has quantized says so by ``is_loaded_in_8bit`` or
            ``is_loaded_in_4bit``, and where its parts are by ``hf_device_map``.
        can_train_on_cpu: whether bitsandbytes computes on the CPU too; called for such a model only.

    Raises:
        PrepareError: a part is on the disk, or on the CPU where bitsandbytes does not compute there.
    """
    bits = next((bits for bits in (8, 4) if getattr(model, f"is_loaded_in_{bits}bit", False)), None)
    if bits is None:
        return
    places: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    refused = {name: place for name, place in places.items() if place in ("cpu", "disk")}
    if not refused or ("disk" not in refused.values() and can_train_on_cpu()):
        return
    name, place = next(iter(refused.items()))
    raise PrepareError(
        f"a model in {bits} bits cannot be trained with {name or 'all of it'} on the {place}",
        why="bitsandbytes keeps what the backward of a layer needs on the accelerator that computes it",
        fix='load it with device_map={"": accelerator.device}; to evaluate it, '
        "accelerator.prepare_model(model, evaluation_mode=True)",
    )
