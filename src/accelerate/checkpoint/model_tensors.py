"""The tensors of a model as weights are loaded into them: parameters and buffers, tied ones once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import CheckpointError


class WeightsMismatchError(CheckpointError, ValueError):
    """The weights of a file do not fit a model (a ValueError too, as in the public package)."""


@dataclass(eq=False)
class ModelTensor:
    """One tensor of the model.

    Attributes:
        names: by which it goes; several if it is tied.
        owners: module and attribute of each.
        tensor: the parameter or buffer as it is now.
        is_persistent: the model's state dict holds it, unlike buffers with ``persistent=False``.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    tensor: torch.Tensor
    is_persistent: bool = True

    @property
    def is_parameter(self) -> bool:
        """True for a parameter; False for a buffer, which keeps its initial value if it is not saved."""
        return isinstance(self.tensor, nn.Parameter)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensor.shape


def list_model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return the parameters and buffers of a model, tied ones once."""
    by_id: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                continue
            target = by_id.setdefault(id(tensor), ModelTensor([], [], tensor, is_persistent=False))
            target.names.append(f"{prefix}.{name}" if prefix else name)
            target.owners.append((module, name))
            target.is_persistent = target.is_persistent or name not in left_out
    return list(by_id.values())


@torch.no_grad()
def assign_tensor(target: ModelTensor, value: torch.Tensor) -> None:
    """Set a tensor of the model: in the same parameter where that has memory, else as a new one."""
    current = target.tensor
    if value is current:
        return
    plain = type(value) in (torch.Tensor, nn.Parameter) and current.device.type != "meta"
    requires_grad = current.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
    plain = plain and requires_grad == current.requires_grad
    if target.is_parameter and plain and torch._has_compatible_shallow_copy_type(current, value):  # pyright: ignore
        current.data = value
        vars(current).update(vars(value))
        return
    new: Any = value
    if isinstance(current, nn.Parameter) and not isinstance(value, nn.Parameter):
        new = nn.Parameter(value, requires_grad=requires_grad)
        new.__dict__.update(current.__dict__)
    for module, name in target.owners:
        table = module._parameters if isinstance(current, nn.Parameter) else module._buffers
        table[name] = new
