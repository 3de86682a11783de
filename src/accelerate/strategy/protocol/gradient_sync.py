"""The part of the strategy protocol about gradients: backward, accumulation, reduction, clipping.

``OpenGradients`` is the capability of strategies whose open gradients are saved: those of a window that is
not complete.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core.errors import PrepareError, SettingError
from accelerate.world.shard_boxes import ShardBox

if TYPE_CHECKING:
    from accelerate.world.world import World

# Entered in every step, so it is made once.
NO_CONTEXT: AbstractContextManager[None] = nullcontext()

# What torch says when an operation does not know sharded tensors.
_DTENSOR_ERROR = re.compile(
    "Sharding propagation failed|mixed torch.Tensor and DTensor|sharding strategy registered"
    "|require placement changes|unevenly sharded"  # torch 2.10 and 2.8
)


def graph_leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """Return the parameters and other leaf tensors in the autograd graph of ``loss``."""
    leaves: set[torch.Tensor] = set()
    seen: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        pending += [following for following, _ in node.next_functions]
    return leaves


@dataclass(frozen=True)
class ZeroBackward:
    """A backward that adds zero to every gradient, so that collectives of other ranks find this one.

    Attributes:
        loss: a mean of nothing, which may be NaN.
        models: those concerned.
        parameters: their trained parameters.
        graph_params: the parameters in the graph of the loss (``reached_params``).
        sync_gradients: as in ``GradientSync.backward``.
    """

    loss: torch.Tensor
    models: Sequence[nn.Module]
    parameters: Sequence[torch.Tensor]
    graph_params: set[torch.Tensor]
    sync_gradients: bool = True


def run_with_zero_gradients(leaves: Iterable[torch.Tensor], backward: Callable[[], None]) -> None:
    """Run a whole backward with the gradient of each leaf replaced by zeros before it is used.

    Every all-gather and reduce-scatter takes place, in the order of the other ranks, and the loss may be NaN.

    Args:
        leaves: the tensors in the graph of the loss in which gradients are accumulated or reduced.
        backward: runs it.
    """
    hooks = [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()


class GradientSync:
    """The gradient methods of a strategy; by default they train as one process does."""

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass of a loss that is scaled already.

        Args:
            loss: a scalar.
            sync_gradients: this is the last micro-batch of a window. Whether gradients are reduced is said by
                ``accumulation_context``, per model.
            kwargs: arguments of ``loss.backward``.
        """
        loss.backward(**kwargs)

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether a backward through ``model`` now reduces gradients over the ranks.

        A rank without items (``num_items=0``) runs ``backward_zero`` where they are reduced.
        """
        return True

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run a backward with zero gradients; parameters that the graph does not use are left alone."""
        used = [parameter for parameter in zero.parameters if parameter in zero.graph_params]
        used = used or list(zero.parameters)
        modules = (module for model in zero.models for module in model.modules())
        # DDP and some optimizers take no dense gradients of these.
        sparse = {m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
        zeros = (torch.zeros_like(p).to_sparse(1) if p in sparse else torch.zeros_like(p) for p in used)
        torch.autograd.backward(tuple(used), tuple(zeros))

    def reached_params(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Return the parameters and other leaf tensors in the autograd graph of ``loss``."""
        return graph_leaves(loss)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the parameters of ``model`` that optimizers hold, also between forward and backward."""
        return list(model.parameters())

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients accumulated for ``parameters`` on this rank; in-place changes take effect."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Return a context for one micro-batch; ``sync`` False keeps gradients local (``no_sync``)."""
        return NO_CONTEXT

    def accumulation_bytes(self, models: Iterable[nn.Module]) -> int:
        """Return the extra bytes that unreduced gradients take on this rank during accumulation."""
        return 0

    def local_steps(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for local steps, in which nothing of ``model`` is exchanged.

        Only where the strategy ``replicates_model``.
        """
        return self.accumulation_context((model,), sync=False)

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Make the next backward reduce gradients although its forward ran under ``no_sync``.

        ``Accelerator.trigger_sync_in_backward`` is static, so every strategy class is called: what it needs
        must be found from the model.
        """

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return the norm before.

        Infinity asks for the norm alone. All ranks that share a gradient call it.
        """
        parameters = list(parameters)
        groups = _group_by_mesh(parameters)
        if len(groups) > 1:
            return _clip_norm_of_groups(groups, max_norm, norm_type)
        if max_norm == float("inf"):
            return nn.utils.get_total_norm(self.gradients(parameters), norm_type)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clamp each gradient element to ``[-limit, limit]``."""
        for group in _group_by_mesh(parameters):  # none where other ranks hold all gradients
            nn.utils.clip_grad_value_(group, limit)

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear gradients; ``zero`` clears those of the user's optimizer."""
        zero()

    def flag_reduction(self) -> Callable[[torch.Tensor], None] | None:
        """Return a function that max-reduces a flag over the ranks in place; None where all ranks agree.

        A gradient that is not finite, for example, is seen only by the rank that holds it.
        """
        return None


def _group_by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters that have a gradient, by its device mesh; plain tensors have none.

    A program that shards by itself has several: tensor or expert parallel layers in a replicated model. Torch
    has no operation on tensors of two meshes.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def _clip_norm_of_groups(
    groups: Sequence[list[torch.Tensor]], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip by the norm over parameters of several meshes; the arguments are those of ``clip_norm``."""
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
    norms: list[Any] = [nn.utils.get_total_norm(group, norm_type) for group in gradients]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]), norm_type)
    if max_norm != float("inf"):
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


@torch.no_grad()
def clip_sharded_norm(
    counted: Iterable[tuple[Sequence[Any], Sequence[torch.Tensor]]],
    scaled: Iterable[torch.Tensor],
    limit: float,
    p: float,
    device: torch.device,
    groups: Sequence[Any] = (),
) -> torch.Tensor:
    """Scale local shards so that the global norm of all is at most ``limit``; return the norm before.

    All ranks of the groups call it, also those without shards. The norm is equal on all ranks.

    Args:
        counted: local shards, with the process groups over which they are sharded.
        scaled: the local shards that are scaled.
        limit: the greatest norm; infinity scales nothing.
        p: of the p-norm; ``inf`` takes the greatest absolute value, ``-inf`` the smallest.
        device: where the all-reduces of one number run.
        groups: more process groups, whose ranks have other parameters that count too.

    Raises:
        SettingError: ``p`` is 0.
    """
    if p == 0:
        raise SettingError(
            "norm_type=0 counts tensors, and the shards of one lie on several ranks",
            fix="use another norm_type: 2.0, float('inf')",
        )
    op = dist.ReduceOp.SUM
    if math.isinf(p):
        op = dist.ReduceOp.MAX if p > 0 else dist.ReduceOp.MIN
    powers: list[torch.Tensor] = []
    for over, shards in counted:
        norms = [
            torch.linalg.vector_norm(shard, p, dtype=torch.promote_types(shard.dtype, torch.float32))
            for shard in shards
            if shard.numel()
        ]
        norms = [norm.to(device, torch.float32) for norm in norms]
        powers.append(_join_powers(norms if math.isinf(p) else [norm**p for norm in norms], p, device))
        for group in over:
            dist.all_reduce(powers[-1], op, group=group)
    total = _join_powers(powers, p, device)
    for group in groups:
        dist.all_reduce(total, op, group=group)
    norm = total if math.isinf(p) else total ** (1.0 / p)
    if limit == float("inf"):
        return norm
    # As torch does it: 1e-6 keeps the division defined.
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    kinds: dict[Any, list[torch.Tensor]] = {}
    for shard in scaled:
        if shard.numel():
            kinds.setdefault((shard.device, shard.dtype), []).append(shard)
    for shards in kinds.values():
        torch._foreach_mul_(shards, scale.to(shards[0].device))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _join_powers(powers: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the sum of p-th powers; for ``inf`` and ``-inf`` the greatest and the smallest of norms."""
    if not powers:
        return torch.full((), math.inf if p == -math.inf else 0.0, device=device)
    stacked = torch.stack(list(powers))
    return (stacked.amax() if p > 0 else stacked.amin()) if math.isinf(p) else stacked.sum()


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Return whether functions wait for the accumulated gradient of a parameter, to reduce it or to step."""
    return bool(parameter._post_accumulate_grad_hooks)


class ReductionMonitor:
    """A capability: a backward reduces gradients by itself, unless a program goes around it.

    Attributes:
        unreduced: the parameters with a gradient that should have been reduced, and was not; always the same
            set, which ``optimizer.step`` reads. It stays empty where such a gradient cannot be.
    """

    unreduced: set[torch.Tensor]

    def report_unreduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say once which of ``parameters`` are stepped with a gradient that was not reduced; forget all."""

    def late_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the trained ones whose gradients will never be reduced: they came after ``prepare``."""
        raise NotImplementedError


class ParamReplacement:
    """A capability: ``prepare`` gives a model new parameters, and the old ones never have a gradient."""

    def current_params(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that train in the place of ``parameters``, which may be old ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class GradientPiece:
    """A piece of the gradient of one parameter on one rank.

    Attributes:
        values: the piece, local to this rank.
        shape: of the parameter, unsharded.
        offsets: where the piece begins in it, in every dimension; a single number counts the elements of the
            flattened parameter, and ``values`` has one dimension then.
        ranks: by what the sum of all ranks' pieces is divided: the number of ranks that hold the piece with
            values of their own, of which the mean counts, or another number that makes it the reduced
            gradient; 0 for a piece that is reduced already, and equal on all ranks that hold it.
        boxes: (offsets in the parameter, sizes, offsets in ``values``) of each box, if the piece is several.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    ranks: float
    boxes: tuple[tuple[tuple[int, ...], ...], ...] = ()


def join_pieces(pieces: Iterable[GradientPiece]) -> torch.Tensor:
    """Return the unsharded gradient of one parameter, reduced, from the pieces of all ranks, on the host."""
    total: torch.Tensor | None = None
    reduced: set[tuple[Any, ...]] = set()
    for piece in pieces:
        if total is None:
            dtype = torch.promote_types(piece.values.dtype, torch.float32)
            total = torch.zeros(piece.shape, dtype=dtype, device="cpu")
        key = (piece.offsets, tuple(piece.values.shape))
        if piece.ranks == 0 and key in reduced:
            continue
        flat = len(piece.offsets) == 1 != len(piece.shape)
        target, values = total.view(-1) if flat else total, piece.values.to("cpu", total.dtype)
        whole = piece.offsets, tuple(values.shape), (0,) * values.dim()
        for box in starmap(ShardBox, piece.boxes or (whole,)):
            target[box.slices].add_(values[box.local_slices], alpha=1.0 / (piece.ranks or 1))
        if piece.ranks == 0:
            reduced.add(key)
    assert total is not None
    return total


class OpenGradients:
    """The methods for gradients that wait for the rest of their window; by default ``parameter.grad``.

    Names are those of the user's module, a tied parameter goes by its first one.

    Attributes:
        window_size: the micro-batches of the window that is saved, set before its pieces are read: the
            gradient of a micro-batch is divided by it.
    """

    window_size: int = 1

    if TYPE_CHECKING:  # of the strategy that has the capability
        world: World
        name: ClassVar[str]

        def unwrap(self, model: nn.Module) -> nn.Module: ...

    @property
    def has_readable_gradients(self) -> bool:
        """Return False where an engine keeps them in buffers that this package does not know."""
        return True

    @property
    def gradient_layout(self) -> str:
        """Pieces that were saved under an equal layout are given back to the ranks that held them."""
        return f"{self.name} of {self.world.size}"

    def gradient_pieces(self, model: nn.Module) -> dict[str, list[GradientPiece]]:
        """Return this rank's pieces by the names of their parameters; may be collective."""
        return {
            name: [whole_piece(p.grad, self.world.size)]
            for name, p in self.unwrap(model).named_parameters()
            if p.grad is not None
        }

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches the open window has had, where the strategy counts them; else 0."""
        return 0

    def restore_pieces(self, model: nn.Module, pieces: Mapping[str, Sequence[GradientPiece]]) -> None:
        """Put this rank's own pieces back."""
        self.load_gradients(model, {name: held[0].values for name, held in pieces.items()})

    def load_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make unsharded gradients, the same on all ranks, the open ones; each rank keeps its shard."""
        for name, parameter in self.unwrap(model).named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, parameter.dtype, copy=True)

    def resume_window(self, model: nn.Module, micro_batches: int, window_size: int) -> None:
        """Take over how many micro-batches of a window loaded gradients come from; 0: not known."""

    def local_buffers(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Return the buffers that may differ from those of rank 0 until the window ends; None without any.

        They are saved beside the gradients: the checkpoint of the model holds those of rank 0.
        """
        return None

    def restore_local_buffers(self, model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        """Put back what ``local_buffers`` has returned on this rank."""


def whole_piece(gradient: torch.Tensor, ranks: int) -> GradientPiece:
    """Return the piece that is the whole gradient of a parameter."""
    return GradientPiece(gradient.detach(), tuple(gradient.shape), (0,) * gradient.dim(), ranks)


def explain_sharded_step(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """Raise PrepareError if a step failed since the optimizer does not know sharded parameters."""
    if not _DTENSOR_ERROR.search(str(error)):
        return
    raise PrepareError(
        f"{type(optimizer).__name__} cannot step sharded parameters: part of the step may be done",
        why="parameters are distributed tensors (DTensor), and it uses an operation that torch has not for "
        "these: the usual reasons are means or products over whole matrices, and kernels of its own",
        fix="an optimizer that computes element by element (AdamW, SGD, with a state in 8 bits "
        "torchao.optim.AdamW8bit), or train under ddp",
    ) from error
