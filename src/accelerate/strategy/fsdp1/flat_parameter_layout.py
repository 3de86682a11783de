"""The layout of the user's parameters in FSDP1's flat parameters.

torch's class joins the parameters of an FSDP unit into one flat tensor, and gives every rank an equal piece
of it, split at any element. It has no public name for the offsets, so this file reads its handles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from accelerate.core.torch_internals import require

require("FSDP1")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper  # noqa: E402
from torch.distributed.fsdp._runtime_utils import _reshard  # noqa: E402


@dataclass(frozen=True, eq=False)
class FlatSlot:
    """The place of a user's parameter in a flat parameter.

    Attributes:
        names: its names in the model; more than one if it is tied.
        start: its first element in the flat parameter.
        shape: its shape.
        stand_in: a tensor without memory that represents it, with the placements of its shards.
    """

    names: tuple[str, ...]
    start: int
    shape: torch.Size
    stand_in: torch.Tensor

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class FlatParam:
    """A flat parameter of FSDP1.

    Attributes:
        owner: torch's wrapper module of the FSDP unit.
        handle: torch's ``FlatParamHandle``.
        slots: the user's parameters in it, in order.
        is_sharded: whether every rank holds a piece; otherwise each has all of it.
        size: elements of a piece, with padding.
        first: the first element on this rank.
    """

    def __init__(self, owner: FullyShardedDataParallel, handle: Any) -> None:
        self.owner, self.handle = owner, handle
        self.slots: list[FlatSlot] = []
        self.is_sharded: bool = handle.uses_sharded_strategy
        self.size: int = handle.flat_param._sharded_size.numel()
        self.first: int = handle.rank * self.size if self.is_sharded else 0

    @property
    def flat(self) -> Any:
        """The flat parameter of torch."""
        return self.handle.flat_param

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that optimizers hold: the user's in order, or the flat one alone."""
        return list(self.flat._params) if self.handle._use_orig_params else [self.flat]

    @property
    def uses_orig_params(self) -> bool:
        """True if the user's parameters stay (``use_orig_params``)."""
        return self.handle._use_orig_params

    def kept_params(self) -> Iterator[tuple[torch.Tensor, FlatSlot]]:
        """Yield the user's parameters that stay, with their places."""
        if self.uses_orig_params:
            yield from zip(self.parameters, self.slots, strict=True)

    def local_range(self, slot: FlatSlot) -> tuple[int, int]:
        """Return (first, last + 1) of the elements of a parameter on this rank, counted in the parameter."""
        low = max(slot.start, self.first) - slot.start
        high = min(slot.start + slot.numel, self.first + self.size) - slot.start
        return (low, high) if low < high else (0, 0)

    def local_piece(self, slot: FlatSlot, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of a parameter in this rank's piece ``local``, a view of one dimension."""
        low, high = self.local_range(slot)
        place = slot.start + low - self.first
        return local[place : place + high - low] if low < high else local[:0]

    def local_values(self) -> torch.Tensor:
        """Return the values of this rank's piece, of one dimension."""
        flat = self.flat
        return (flat._local_shard if self.is_sharded and hasattr(flat, "_local_shard") else flat).detach()

    def gather_flat(self, local: torch.Tensor) -> torch.Tensor:
        """All-gather the flat tensor from the pieces of all ranks; a collective where it is sharded."""
        if not self.is_sharded:
            return local
        shard = local.to(self.handle.device).contiguous()
        out = shard.new_empty(self.size * self.handle.world_size)
        # Newer versions of torch call it otherwise, and warn of the old name.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, shard, group=self.handle.process_group)
        return out

    def view_param(self, slot: FlatSlot, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a parameter in an unsharded flat tensor."""
        return whole[slot.start : slot.start + slot.numel].view(slot.shape)

    @property
    def is_gathered(self) -> bool:
        """True while the user's modules compute with unsharded values."""
        # Before the first forward there are none.
        return not self.is_sharded or (
            hasattr(self.flat, "_full_param_padded") and not self.handle.needs_unshard()
        )

    @property
    def is_idle(self) -> bool:
        """False in a forward, a backward and torch's ``summon_full_params``."""
        return self.owner.training_state.name == "IDLE"

    def reshard(self) -> None:
        """Free unsharded values that torch kept after a forward: it would take them for the newest."""
        if self.is_sharded and self.is_gathered:
            _reshard(self.owner, self.handle, True)

    def gradients(self) -> list[torch.Tensor]:
        """Return the accumulated gradients: this rank's piece, the unsharded and unreduced one, or both."""
        # Gradients of the user's parameters may have been dropped; torch takes that over when it computes.
        self.handle._reset_flat_param_grad_info_if_needed()
        # Torch puts the piece aside while a window accumulates.
        gradients = (self.flat.grad, getattr(self.flat, "_saved_grad_shard", None))
        return [gradient for gradient in gradients if gradient is not None]

    def clear_gradients(self) -> None:
        """Clear the accumulated gradients."""
        vars(self.flat).pop("_saved_grad_shard", None)
        for parameter in (self.flat, *self.parameters):
            parameter.grad = None


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the user's module inside torch's wrappers."""
    while isinstance(module, FullyShardedDataParallel | CheckpointWrapper):
        # Not by their own names: both pass on what they do not have.
        name = "_fsdp_wrapped_module" if isinstance(module, FullyShardedDataParallel) else _CHECKPOINTED
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


_CHECKPOINTED = "_checkpoint_wrapped_module"


def walk_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix of names, module) of the user's modules, once for each of their names."""
    module = unwrap_module(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk_modules(child, f"{prefix}{name}.")


def flat_params(root: nn.Module) -> Iterator[FlatParam]:
    """Yield the flat parameters of a wrapped model, without slots."""
    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield FlatParam(module, module._handle)


def param_locations(unit: FlatParam) -> Iterator[tuple[list[tuple[nn.Module, str]], int, torch.Size]]:
    """Yield ((module, name) pairs, first element, shape) of each parameter in a flat one."""
    flat = unit.flat
    others: dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]] = {}
    for shared in flat._shared_param_infos:
        key = (shared.prim_module, shared.prim_param_name)
        others.setdefault(key, []).append((shared.module, shared.param_name))
    starts, total = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            starts.append(total)
        total += numel
    for info, start, shape in zip(flat._param_infos, starts, flat._shapes, strict=True):
        location = (info.module, info.param_name)
        # A module that is registered twice is among its own others.
        yield list(dict.fromkeys([location, *others.get(location, [])])), start, shape
