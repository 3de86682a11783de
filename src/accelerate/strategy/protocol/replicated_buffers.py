"""Buffers that change in training (BatchNorm's running statistics), where parameters are sharded.

Gradients are reduced, but each rank updates its buffers from its own samples. The
rule is that of ``torch.nn.parallel.DistributedDataParallel``: before a forward after one in training, the
buffers of the first rank are broadcast, so every rank evaluates with what a checkpoint holds, and a resumed
run is the run itself.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.world import collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_SYNCED: weakref.WeakKeyDictionary[nn.Module, ReplicatedBuffers] = weakref.WeakKeyDictionary()


def sync_buffers(model: nn.Module, groups: Iterable[ProcessGroup]) -> None:
    """Keep the buffers of a model equal on all ranks of ``groups``, see ``ReplicatedBuffers``.

    Does nothing for the second time.
    """
    several = [group for group in groups if dist.get_world_size(group) > 1]
    if several and model not in _SYNCED and any(map(_persistent_buffers, model.modules())):
        _SYNCED[model] = ReplicatedBuffers(model, several)


def settle_buffers(model: nn.Module) -> None:
    """Let the ranks agree which buffers of a model change, before those of rank 0 are saved; collective."""
    for part in model.modules() if _SYNCED else ():
        if part in _SYNCED:
            _SYNCED[part].agree()


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], groups: Iterable[ProcessGroup]) -> None:
    """Broadcast tensors of any dtypes in place, in one piece, from the first rank along each group."""
    # Larger elements first, so that each lies at a multiple of its size.
    ordered = sorted((tensor.data for tensor in tensors), key=lambda tensor: -tensor.itemsize)
    if not ordered:
        return
    packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in ordered])
    for group in groups:
        dist.broadcast(packed, dist.get_global_rank(group, 0), group=group)
    parts = packed.split([tensor.nbytes for tensor in ordered])
    for tensor, part in zip(ordered, parts, strict=True):
        # Through ``data``, as DDP does it: a graph that waits for its backward holds no old version.
        tensor.copy_(part.view(tensor.dtype).view_as(tensor))


class ReplicatedBuffers:
    """Broadcasts the buffers of a model that change in training, in one piece, before the next forward.

    A module that changes one of its persistent buffers in a forward has buffers that change: all of them are
    broadcast from then on. Each rank observes its forwards in training. The ranks agree on what they have
    observed after 1, 2, 4, ..., 64, 128, 192, ... of these forwards, anew once other modules are in training
    mode, and when a checkpoint is saved. Constants (masks, quantized weights) are never sent. Buffers that
    are not persistent are no state: each rank keeps what it has computed.

    Like DDP, it broadcasts before the first forward after one in training, also before one in evaluation.
    Before an evaluation the ranks do not agree: one of them may evaluate alone, on weights that all have
    gathered.

    Args:
        model: the prepared model.
        groups: the process groups along which the model is replicated, in the order of the broadcasts.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ProcessGroup]) -> None:
        self._groups = groups
        # Not the model: a copy of it has the same hooks, and must not meet the ranks.
        self._model = weakref.ref(model)
        self._modules = [module for module in model.modules() if _persistent_buffers(module)]
        self._is_changing = [False] * len(self._modules)
        self._observed = [False] * len(self._modules)
        self._constants = self._find_constants()
        self._versions: list[tuple[int, int | None]] | None = None
        self._may_differ, self._is_due, self._forwards = False, False, 0
        self._in_training: list[bool] = []
        before: Any = torch.compiler.disable(self._before_forward)
        after: Any = torch.compiler.disable(self._after_forward)
        agree_if_due: Any = torch.compiler.disable(self._agree_if_due)
        model.register_forward_pre_hook(before)
        model.register_forward_hook(after, always_call=True)
        # Not after a forward that failed: the other ranks may not be in one.
        model.register_forward_hook(agree_if_due)

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if model is not self._model():
            return
        in_training = [module.training for module in self._modules]
        if self._may_differ:
            modules = [m for m, changes in zip(self._modules, self._is_changing, strict=True) if changes]
            broadcast_tensors((b for module in modules for b in _persistent_buffers(module)), self._groups)
        self._may_differ, self._is_due = any(in_training), False
        if self._may_differ:
            if in_training != self._in_training:
                self._in_training, self._forwards = in_training, 0
            self._forwards += 1
            self._is_due = self._forwards % 64 == 0 or self._forwards & (self._forwards - 1) == 0
            self._versions = self._read_versions()

    def _after_forward(self, model: nn.Module, *_: Any) -> None:
        if self._versions is not None and model is self._model():
            before, self._versions = self._versions, None
            after = self._read_versions()
            if before != after:
                for constant, old, new in zip(self._constants, before, after, strict=True):
                    self._observed[constant[0]] = self._observed[constant[0]] or old != new

    def _agree_if_due(self, model: nn.Module, *_: Any) -> None:
        if self._is_due and model is self._model():
            self.agree()

    def _find_constants(self) -> list[tuple[int, dict[str, torch.Tensor | None], str]]:
        """Return the buffers that are not known to change: number of the module, its buffers, the name."""
        modules = [pair for pair in enumerate(self._modules) if not self._is_changing[pair[0]]]
        return [(i, module._buffers, name) for i, module in modules for name in _persistent_names(module)]

    def _read_versions(self) -> list[tuple[int, int | None]]:
        """Return the identity and the version of each constant: a change of its value changes one of them."""
        # BatchNorm's kernel writes statistics past the version; its counter of batches has one.
        constants = [buffers.get(name) for _, buffers, name in self._constants]
        return [(id(buffer), getattr(buffer, "_version", None)) for buffer in constants]

    def agree(self) -> None:
        """Add the modules that changed a buffer on any rank, unless all of them are known; collective."""
        model, self._is_due = self._model(), False
        if model is not None and not all(self._is_changing):
            self._agree(model, self._observed)
            self._constants = self._find_constants()

    def _agree(self, model: nn.Module, observed: list[bool]) -> None:
        """Add the modules that changed a buffer on any rank, and say once that there are some."""
        first = not any(self._is_changing)
        device = next(buffer.device for module in self._modules for buffer in _persistent_buffers(module))
        flags = torch.tensor([*map(max, observed, self._is_changing)], dtype=torch.uint8, device=device)
        for group in self._groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        self._is_changing = [bool(flag) for flag in flags.tolist()]
        if first and any(self._is_changing) and collective.rank() == 0:
            changing = {m for m, changes in zip(self._modules, self._is_changing, strict=True) if changes}
            names = [
                name or type(model).__name__ for name, module in model.named_modules() if module in changing
            ]
            more = f" and {len(names) - 3} more modules" if len(names) > 3 else ""
            logger.warning(
                "the buffers of %s%s change in training: those of rank 0 are broadcast before each forward, "
                "as under DDP; torch.nn.SyncBatchNorm takes its statistics over all ranks",
                ", ".join(names[:3]),
                more,
            )


def _persistent_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of one module that are part of its state."""
    buffers = [module._buffers[name] for name in _persistent_names(module)]
    return [buffer for buffer in buffers if buffer is not None]


def _persistent_names(module: nn.Module) -> list[str]:
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name not in module._non_persistent_buffers_set
        and not buffer.is_meta
        and not isinstance(buffer, DTensor)
    ]
