"""Where the user's parameters lie in torch's flat ones.

torch's class joins the parameters of a part into one flat tensor, and gives every process an equal piece of
it, wherever that cuts. It has no public name for the places, so this file looks at its records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of the user's inside a flat one.

    Attributes:
        names: its names in the model; more than one if it is tied.
        start: its first element in the flat one.
        shape: its own.
        stand_in: takes its place where parameters are compared, and says how its values are cut; no memory.
    """

    names: tuple[str, ...]
    start: int
    shape: torch.Size
    stand_in: torch.Tensor

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Unit:
    """A flat parameter of torch's.

    Attributes:
        owner: torch's module around the part.
        handle: torch's record.
        slots: what lies in it, in order.
        cut: whether every process holds a piece; otherwise each has all of it.
        size: elements of a piece, with what fills it up.
        first: the first element that is here.
    """

    def __init__(self, owner: FullyShardedDataParallel, handle: Any) -> None:
        self.owner, self.handle = owner, handle
        self.slots: list[Slot] = []
        self.cut: bool = handle.uses_sharded_strategy
        self.size: int = handle.flat_param._sharded_size.numel()
        self.first: int = handle.rank * self.size if self.cut else 0

    @property
    def flat(self) -> Any:
        """Torch's flat parameter."""
        return self.handle.flat_param

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What optimizers hold: the user's parameters in order, or the flat one alone."""
        return list(self.flat._params) if self.handle._use_orig_params else [self.flat]

    @property
    def keeps_originals(self) -> bool:
        """Whether the user's parameters stay."""
        return self.handle._use_orig_params

    def here(self, slot: Slot) -> tuple[int, int]:
        """(first, last + 1) of the elements of a parameter that are here, counted in the parameter."""
        low = max(slot.start, self.first) - slot.start
        high = min(slot.start + slot.numel, self.first + self.size) - slot.start
        return (low, high) if low < high else (0, 0)

    def piece(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """The part of a parameter in a piece like ours, a view of one dimension."""
        low, high = self.here(slot)
        place = slot.start + low - self.first
        return local[place : place + high - low] if low < high else local[:0]

    def local(self) -> torch.Tensor:
        """The values here, one dimension."""
        flat = self.flat
        return (flat._local_shard if self.cut and hasattr(flat, "_local_shard") else flat).detach()

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The flat tensor of which every process gives its piece; a collective where it is cut."""
        if not self.cut:
            return local
        mine = local.to(self.handle.device).contiguous()
        out = mine.new_empty(self.size * self.handle.world_size)
        # Newer versions of torch call it otherwise, and warn of the old name.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, mine, group=self.handle.process_group)
        return out

    def view(self, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
        """A parameter inside a whole flat tensor."""
        return whole[slot.start : slot.start + slot.numel].view(slot.shape)

    def settle(self) -> None:
        """Frees whole values that torch kept after a forward: it would take them for the newest."""
        # Before the first forward there is no room for whole values.
        if self.cut and hasattr(self.flat, "_full_param_padded") and not self.handle.needs_unshard():
            _reshard(self.owner, self.handle, True)

    def gradient(self) -> torch.Tensor | None:
        """What has accumulated: a piece, or all of it while nothing is reduced."""
        # Gradients of the user's parameters may have been dropped; torch takes that over when it computes.
        self.handle._reset_flat_param_grad_info_if_needed()
        return self.flat.grad


def inside(module: nn.Module) -> nn.Module:
    """The user's module in what torch put around it."""
    while isinstance(module, FullyShardedDataParallel | CheckpointWrapper):
        # Not by their own names: both pass on what they do not have.
        name = "_fsdp_wrapped_module" if isinstance(module, FullyShardedDataParallel) else _CHECKPOINTED
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


_CHECKPOINTED = "_checkpoint_wrapped_module"


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(prefix of names, module) of the user's modules, as many times as they have names."""
    module = inside(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}.")


def units(root: nn.Module) -> Iterator[Unit]:
    """The flat parameters of a wrapped model, without what is in them."""
    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield Unit(module, module._handle)


def places(unit: Unit) -> Iterator[tuple[list[tuple[nn.Module, str]], int, torch.Size]]:
    """((module, name) pairs, first element, shape) of each parameter in a flat one."""
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
        own = (info.module, info.param_name)
        yield [own, *others.get(own, [])], start, shape
