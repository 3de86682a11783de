"""How a model will be divided into parts that are gathered by themselves, by either version of sharding."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.core.errors import PrepareError
from accelerate.strategy.sharding.blocks import blocks_of, check_parameters, ignored_of, parameters_of
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin


@dataclass(frozen=True)
class Layout:
    """How one model will be sharded.

    Attributes:
        blocks: the modules that are gathered by themselves, inner ones first.
        ignored: parameters that stay whole.
        precision: number formats of compute and reduction, a policy of torch's; None to compute in that of
            the weights.
        upcast: whether weights in half precision that train become float32.
    """

    blocks: list[nn.Module]
    ignored: set[nn.Parameter]
    precision: Any
    upcast: bool

    def says(self) -> str:
        """It, as a clause."""
        kinds = sorted({type(block).__name__.removeprefix("FSDP") for block in self.blocks})
        parts = f"{len(self.blocks)} x {'/'.join(kinds)} and the rest" if self.blocks else "the whole model"
        compute = self.precision.param_dtype if self.precision else None
        reduce = self.precision.reduce_dtype if self.precision else None
        formats = f", computed in {compute}, gradients reduced in {reduce or compute}" if compute else ""
        return f"gathered as {parts}{formats}"

    def widens(self, parameter: Any) -> bool:
        """Whether a parameter in half precision becomes float32."""
        return self.upcast and parameter.requires_grad and parameter.dtype.itemsize == 2

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The type in which a parameter rests, or a buffer."""
        return torch.float32 if self.widens(tensor) else tensor.dtype

    @torch.no_grad()
    def brought(self, old: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A parameter or buffer on ``device``, in the type in which it rests: itself, where that can be.

        What is on the meta device gets memory. Some devices cannot swap a tensor's data: a new one takes the
        place there.
        """
        dtype = self.dtype_of(old)
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
            self.instead(old, nn.Parameter(data, old.requires_grad))
            if isinstance(old, nn.Parameter)
            else data
        )

    def instead(self, old: Any, new: Any) -> Any:
        """``new``, which takes the place of ``old``: it is ignored as that was."""
        if old in self.ignored:
            self.ignored.add(new)
        return new

    def share(self, model: nn.Module, size: int, *, offloaded: bool) -> int:
        """Bytes of ``model`` on a process's device once it is sharded, between two steps.

        Args:
            size: processes that share its parameters.
            offloaded: what is cut rests on the host.
        """
        total = sum(b.numel() * b.element_size() for b in model.buffers())
        for parameter in model.parameters():
            if parameter in self.ignored:
                total += parameter.numel() * parameter.element_size()
            elif not offloaded:
                width = 4 if self.widens(parameter) else parameter.element_size()
                total += self.piece(parameter, size) * width
        return total

    def piece(self, parameter: nn.Parameter, size: int) -> int:
        """Elements of a parameter that each of ``size`` processes holds: whole rows."""
        rows = parameter.shape[0]
        return -(-rows // size) * (parameter.numel() // max(1, rows))


def divide(model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: Any) -> Layout:
    """How ``model`` will be sharded; changes nothing.

    Args:
        precision: number formats where the plugin names none; may be None.

    Raises:
        SettingError, PrepareError: the model cannot be sharded so.
    """
    ignored = ignored_of(model, plugin.ignored_modules)
    blocks = blocks_of(model, plugin.policy_for(model), ignored)
    policy = plugin.mixed_precision_policy or precision
    compute = policy.param_dtype if policy else None
    layout = Layout(blocks, parameters_of(ignored), policy, compute is not None and compute.itemsize == 2)
    check_parameters(model, blocks, layout.ignored, layout.upcast)
    return layout


def digest(model: nn.Module) -> str:
    """What is equal on processes that share parameters: names, shapes, types, and which of them train."""
    rows = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    rows += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def unequal(model: nn.Module, rank: int, first: int) -> PrepareError:
    """What is said where ``digest`` is another on ``rank`` than on ``first``."""
    return PrepareError(
        f"the {type(model).__name__} of rank {rank} has other parameters than that of rank {first}",
        why="names, shapes, types and which of them train must be equal: every process holds a part",
        fix="build the model in the same way on all processes",
    )
