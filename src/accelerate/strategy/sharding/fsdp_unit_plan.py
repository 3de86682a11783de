"""The layout of a model: its FSDP units, unsharded parameters and dtypes, for FSDP1 and FSDP2."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.core.errors import PrepareError
from accelerate.strategy.sharding.fsdp_unit_selection import (
    check_unit_params,
    direct_parameters,
    find_ignored,
    find_units,
)
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin


@dataclass(frozen=True)
class FSDPShardingPlan:
    """The layout in which one model will be sharded.

    Attributes:
        blocks: the modules that are FSDP units, inner ones first, without the root.
        ignored: parameters that are not sharded.
        precision: torch's mixed precision policy; None to compute in the dtype of the weights.
        upcast: whether trained weights in half precision become float32.
    """

    blocks: list[nn.Module]
    ignored: set[nn.Parameter]
    precision: Any
    upcast: bool

    def describe(self) -> str:
        """Describe the layout, as a clause."""
        kinds = sorted({type(block).__name__.removeprefix("FSDP") for block in self.blocks})
        parts = f"{len(self.blocks)} x {'/'.join(kinds)} and the rest" if self.blocks else "the whole model"
        compute = self.precision.param_dtype if self.precision else None
        reduce = self.precision.reduce_dtype if self.precision else None
        formats = f", computed in {compute}, gradients reduced in {reduce or compute}" if compute else ""
        return f"all-gathered as {parts}{formats}"

    def upcasts(self, parameter: Any) -> bool:
        """Return whether a parameter in half precision becomes float32."""
        return self.upcast and parameter.requires_grad and parameter.dtype.itemsize == 2

    def storage_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter or buffer is stored."""
        return torch.float32 if self.upcasts(tensor) else tensor.dtype

    @torch.no_grad()
    def materialize(self, old: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a parameter or buffer on ``device`` in its stored dtype: the same object, where possible.

        A meta tensor gets memory. Some devices cannot swap a tensor's data: a new tensor replaces it there.
        """
        dtype = self.storage_dtype(old)
        if old.is_meta:
            data = torch.empty_like(old.data, dtype=dtype, device=device)
        elif (old.device, old.dtype) == (device, dtype):
            return old
        else:
            data = old.data.to(device, dtype)
        if data.device == old.device and not isinstance(old, DTensor):
            old.data = data
            return old
        return (
            self.replace_ignored(old, nn.Parameter(data, old.requires_grad))
            if isinstance(old, nn.Parameter)
            else data
        )

    def replace_ignored(self, old: Any, new: Any) -> Any:
        """Return ``new``, which replaces ``old``, after marking it ignored if ``old`` was."""
        if old in self.ignored:
            self.ignored.add(new)
        return new

    def bytes_per_process(self, model: nn.Module, size: int, *, offloaded: bool) -> int:
        """Return the bytes of ``model`` on each rank's device once it is sharded, between two steps.

        Args:
            model: the model.
            size: ranks that shard its parameters.
            offloaded: whether shards rest on the host.
        """
        total = sum(b.numel() * b.element_size() for b in model.buffers())
        for parameter in model.parameters():
            if parameter in self.ignored:
                total += parameter.numel() * parameter.element_size()
            elif not offloaded:
                width = 4 if self.upcasts(parameter) else parameter.element_size()
                total += self.shard_numel(parameter, size) * width
        return total

    def shard_numel(self, parameter: nn.Parameter, size: int) -> int:
        """Return the elements of a parameter that each of ``size`` ranks holds: whole rows."""
        rows = parameter.shape[0]
        return -(-rows // size) * (parameter.numel() // max(1, rows))


def plan_layout(model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: Any) -> FSDPShardingPlan:
    """Return how ``model`` will be sharded; changes nothing.

    Args:
        model: the model.
        plugin: the options.
        precision: the mixed precision policy where the plugin has none; may be None.

    Raises:
        SettingError, PrepareError: the model cannot be sharded so.
    """
    ignored = find_ignored(model, plugin.ignored_modules)
    blocks = find_units(model, plugin.policy_for(model), ignored)
    policy = plugin.mixed_precision_policy or precision
    compute = policy.param_dtype if policy else None
    layout = FSDPShardingPlan(
        blocks, direct_parameters(ignored), policy, compute is not None and compute.itemsize == 2
    )
    check_unit_params(model, blocks, layout.ignored, layout.upcast)
    return layout


def model_digest(model: nn.Module) -> str:
    """Return a digest of the names, shapes, dtypes and ``requires_grad`` that must be equal on all ranks."""
    rows = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    rows += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def unequal_models_error(model: nn.Module, rank: int, first: int) -> PrepareError:
    """Return the error for a model on ``rank`` that differs from that of rank ``first``."""
    return PrepareError(
        f"the {type(model).__name__} of rank {rank} has other parameters than that of rank {first}",
        why="names, shapes, dtypes and which of them train must be equal: every rank holds a shard",
        fix="build the model in the same way on all processes",
    )
