"""The dtypes that a sharded model really uses, read from torch's FSDP state after a forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accelerate.strategy.sharding.grads import fsdp_param_groups, unsharded_param


@dataclass(frozen=True)
class ShardedDtypes:
    """The dtypes of sharded models; several where FSDP units differ.

    Attributes:
        parameters: of the sharded parameters, which optimizers step.
        compute: of the unsharded parameters in the forward.
        reduction: in which gradients are reduced.
        gradients: of the current gradients; empty before a backward.
        buffers: of the models' buffers, which are not cast.
        outputs: to which outputs are cast; None leaves them as they are computed.
    """

    parameters: frozenset[torch.dtype]
    compute: frozenset[torch.dtype]
    reduction: frozenset[torch.dtype]
    gradients: frozenset[torch.dtype]
    buffers: frozenset[torch.dtype]
    outputs: frozenset[torch.dtype | None]

    def __str__(self) -> str:
        parts = [
            f"parameters {_dtype_names(self.parameters)}",
            f"computed in {_dtype_names(self.compute)}",
            f"gradients reduced in {_dtype_names(self.reduction)}",
        ]
        if self.buffers:
            parts.append(f"buffers {_dtype_names(self.buffers)}")
        parts.append(f"outputs {_dtype_names(self.outputs) or 'as computed'}")
        return ", ".join(parts)

    def differences(self, policy: MixedPrecisionPolicy) -> str:
        """Describe how the dtypes differ from ``policy``; empty when they do not."""
        reduced = policy.reduce_dtype or policy.param_dtype
        expected = (
            ("computed", self.compute, policy.param_dtype),
            ("reduced", self.reduction, reduced),
            ("output cast", self.outputs, policy.output_dtype),
        )
        wrong = [
            f"{label} in {_dtype_names(used)}, not {_dtype_name(target)}"
            for label, used, target in expected
            if target is not None and used - {target}
        ]
        return "; ".join(wrong)


def used_dtypes(models: Sequence[nn.Module]) -> ShardedDtypes | None:
    """Return the dtypes of sharded models; None before a forward.

    Args:
        models: the sharded models.
    """
    groups = [group for model in models for group in fsdp_param_groups(model)]
    trained = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
    whole = [unsharded_param(p) for p in trained]
    if not trained or any(each is None for each in whole):
        return None
    floating: list[Any] = [each for each in whole if each is not None and each.is_floating_point()]
    grads = [p.sharded_param.grad for p in trained if p.sharded_param.grad is not None]
    buffers = [b for model in models for b in model.buffers() if b.is_floating_point()]
    outputs = {model._get_fsdp_state()._mp_policy.output_dtype for model in models}  # type: ignore[operator]
    return ShardedDtypes(
        parameters=_dtypes_of(p.sharded_param for p in trained),
        compute=_dtypes_of(floating),
        # Torch keeps a reduce dtype only where it differs from the compute dtype.
        reduction=frozenset(p.reduce_dtype or each.dtype for p, each in zip(trained, floating, strict=True)),
        gradients=_dtypes_of(grads),
        buffers=_dtypes_of(buffers),
        outputs=frozenset(outputs),
    )


def _dtypes_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.dtype]:
    return frozenset(tensor.dtype for tensor in tensors)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: Iterable[torch.dtype | None]) -> str:
    return "/".join(sorted(_dtype_name(dtype) for dtype in dtypes if dtype is not None))
