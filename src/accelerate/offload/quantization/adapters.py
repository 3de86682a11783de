"""Refuse to train a quantized model that has no adapters: its linear layers would stay as they are.

Source: QLoRA (arXiv:2305.14314), section 3: gradients pass through the quantized weights to the adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from accelerate.core.errors import PrepareError

# Each quantized model, with the names of the parameters that require gradients as it is loaded.
quantized_models: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def record_trainable(model: nn.Module) -> None:
    """Note which parameters of a model that was just quantized require gradients."""
    quantized_models[model] = frozenset(name for name, p in model.named_parameters() if p.requires_grad)


def check_adapters(models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers over a quantized model that was given no adapters, and of which nothing is frozen.

    One that trains some of the unquantized parameters alone, such as the head, is meant so.

    Args:
        models: the models; those that ``load_and_quantize_model`` has not made are not looked at.
        optimizers: the optimizers that are prepared with them.

    Raises:
        PrepareError: they train none of the model's parameters, or just all that are not quantized.
    """
    bases = [part for model in models for part in model.modules() if part in quantized_models]
    if not bases or not optimizers:
        return
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    trained = {id(p) for p in params if p.requires_grad}
    for base in bases:
        names = quantized_models[base]
        unquantized = {id(p) for name, p in base.named_parameters() if name in names}
        if trained and (trained != unquantized or len(unquantized) != len(names)):
            continue
        rest = "all but its quantized linear layers" if trained else "nothing"
        raise PrepareError(
            f"the {type(base).__name__} is quantized and has no adapters: its optimizer would train {rest}",
            why="weights in 8 or 4 bits get no gradients",
            fix="add adapters (peft.get_peft_model(model, LoraConfig(...))), load the model unquantized, or "
            "give the optimizer only those parameters that you mean to train",
        )
