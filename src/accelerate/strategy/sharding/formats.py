"""The number formats that a sharded model really uses, seen on torch's records after a forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accelerate.strategy.sharding.grads import groups, leaf


@dataclass(frozen=True)
class Formats:
    """Types of numbers; several where parts differ.

    Attributes:
        parameters: in which trained parameters are kept, and stepped by optimizers.
        compute: of the whole parameters that the forward saw.
        reduction: in which their gradients are reduced.
        gradients: of the gradients that are there now; none before a backward.
        buffers: of the models' buffers, which stay as they are.
        outputs: to which outputs are brought; None leaves them as they are computed.
    """

    parameters: frozenset[torch.dtype]
    compute: frozenset[torch.dtype]
    reduction: frozenset[torch.dtype]
    gradients: frozenset[torch.dtype]
    buffers: frozenset[torch.dtype]
    outputs: frozenset[torch.dtype | None]

    def __str__(self) -> str:
        said = [
            f"parameters {_names(self.parameters)}",
            f"computed in {_names(self.compute)}",
            f"gradients reduced in {_names(self.reduction)}",
        ]
        if self.buffers:
            said.append(f"buffers {_names(self.buffers)}")
        said.append(f"outputs {_names(self.outputs) or 'as computed'}")
        return ", ".join(said)

    def other_than(self, policy: MixedPrecisionPolicy) -> str:
        """What is not as ``policy`` says; empty when all is."""
        reduced = policy.reduce_dtype or policy.param_dtype
        asked = (
            ("computed", self.compute, policy.param_dtype),
            ("reduced", self.reduction, reduced),
            ("brought to the output", self.outputs, policy.output_dtype),
        )
        wrong = [
            f"{what} in {_names(found)}, not {_name(wanted)}"
            for what, found, wanted in asked
            if wanted is not None and found - {wanted}
        ]
        return "; ".join(wrong)


def formats(models: Sequence[nn.Module]) -> Formats | None:
    """Those of sharded models; None before a forward.

    Args:
        models: sharded.
    """
    found = [group for model in models for group in groups(model)]
    trained = [p for group in found for p in group.fsdp_params if p.sharded_param.requires_grad]
    whole = [leaf(p) for p in trained]
    if not trained or any(each is None for each in whole):
        return None
    floating: list[Any] = [each for each in whole if each is not None and each.is_floating_point()]
    grads = [p.sharded_param.grad for p in trained if p.sharded_param.grad is not None]
    buffers = [b for model in models for b in model.buffers() if b.is_floating_point()]
    outputs = {model._get_fsdp_state()._mp_policy.output_dtype for model in models}  # type: ignore[operator]
    return Formats(
        parameters=_types(p.sharded_param for p in trained),
        compute=_types(floating),
        # Torch keeps only what differs from the type that gradients are computed in.
        reduction=frozenset(p.reduce_dtype or each.dtype for p, each in zip(trained, floating, strict=True)),
        gradients=_types(grads),
        buffers=_types(buffers),
        outputs=frozenset(outputs),
    )


def _types(tensors: Iterable[torch.Tensor]) -> frozenset[torch.dtype]:
    return frozenset(tensor.dtype for tensor in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype | None]) -> str:
    return "/".join(sorted(_name(dtype) for dtype in dtypes if dtype is not None))
