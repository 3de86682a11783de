"""Gradients of sharded parameters: unreduced gradients, norms, clipping; numbers that optimizers read.

Between the micro-batches of a window torch keeps unsharded gradients at its own unsharded parameters, not in
``parameter.grad``. It has no public name for them, so this file reads the FSDP state of its modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from accelerate.core.errors import list_first, warn_user
from accelerate.core.torch_internals import require
from accelerate.strategy.protocol.gradient_sync import GradientPiece, clip_sharded_norm, whole_piece
from accelerate.strategy.protocol.output_tensors import find_hidden_tensors
from accelerate.strategy.sharding.full_state import distribute
from accelerate.world.shard_boxes import is_sharded_placement, shard_boxes, shard_mesh_dims

require("FSDP2", "distributed tensors", "index of sharded checkpoints")


def fsdp_param_groups(model: nn.Module) -> Iterator[Any]:
    """Yield torch's FSDP parameter groups, whose parameters are all-gathered together."""
    return (group for group, _ in _groups_with_policies(model))


def _groups_with_policies(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each group with the ``MixedPrecisionPolicy`` of its module: torch 2.15's groups have none."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if several is None else several:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group, state._mp_policy


def hook_output(module: nn.Module, state: Any, register: Callable[[Any], Any], output: Any) -> Any:
    """Make the backward of a unit begin at tensors too that its forward returns in objects, or keeps.

    torch registers hooks on tensors in tuples, lists, dicts and, from 2.12 on, dataclasses. Of an output
    without any of these the unit would not be all-gathered, or its gradients would not be reduced.

    Args:
        module: the unit. If it returns None, what it computes is in its attributes.
        state: torch's state of the unit.
        register: its own ``_register_pre_backward_hook``.
        output: what the forward returns.
    """
    output = register(output)
    if not isinstance(output, torch.Tensor) and torch.is_grad_enabled():
        for tensor in find_hidden_tensors(SimpleNamespace(**vars(module)) if output is None else output):
            if tensor.grad_fn is not None:
                tensor.register_hook(state._pre_backward)
    return output


def reduces_gradients(model: nn.Module) -> bool:
    """Return whether a backward through ``model`` now reduces gradients."""
    return all(group.reduce_grads for group in fsdp_param_groups(model))


def mixed_precision_dtypes(model: Any) -> tuple[torch.dtype | None, bool, torch.dtype | None]:
    """Return (dtype of unsharded parameters, whether inputs are cast to it, dtype of outputs)."""
    if not isinstance(model, FSDPModule):
        return None, False, None
    policy = model._get_fsdp_state()._mp_policy
    return policy.param_dtype, policy.cast_forward_inputs, policy.output_dtype


@contextmanager
def partial_backward(model: Any, *, last: bool, sync: bool) -> Iterator[None]:
    """Run one of several backwards of one micro-batch inside; gradients are reduced in the last one.

    Args:
        model: the model, sharded or not.
        last: whether it is the last backward.
        sync: whether gradients are reduced at all.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(sync and last)
    model.set_is_last_backward(last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(True)


def fsdp_params(models: Iterable[nn.Module]) -> dict[torch.Tensor, Any]:
    """Return torch's ``FSDPParam`` of each sharded parameter, by the parameter."""
    return {p.sharded_param: p for m in models for group in fsdp_param_groups(m) for p in group.fsdp_params}


def unsharded_param(fsdp_param: Any) -> torch.Tensor | None:
    """Return the unsharded parameter, which graphs reach; None before the first forward."""
    return getattr(fsdp_param, "_unsharded_param", None)


def unreduced_grad(fsdp_param: Any) -> torch.Tensor | None:
    """Return the unsharded gradient that has not been reduced yet, or None."""
    accumulated = getattr(fsdp_param, "unsharded_accumulated_grad", None)
    if accumulated is not None:
        return accumulated
    whole = unsharded_param(fsdp_param)
    return None if whole is None else whole.grad


def _grad_stays_at_param(fsdp_param: Any) -> bool:
    """Return whether unreduced gradients stay in ``.grad`` of the unsharded parameter, as from torch 2.15."""
    kind: Any = type(fsdp_param)
    return hasattr(kind, "unsharded_grad_dtype")


def clear_unreduced(fsdp_param: Any) -> None:
    """Clear the unreduced gradient."""
    if not _grad_stays_at_param(fsdp_param):
        fsdp_param.unsharded_accumulated_grad = None
    whole = unsharded_param(fsdp_param)
    if whole is not None:
        whole.grad = None


def make_unsharded(group: Any) -> None:
    """Wait for the first all-gather of a unit, which makes tensors that stay, outside of ``inference_mode``.

    No later all-gather could write tensors that were made inside of it.
    """
    del group.wait_for_unshard
    with torch.inference_mode(False), torch.no_grad():
        group.wait_for_unshard()


@dataclass(eq=False)
class UsedParams:
    """The parameters of a model that a backward uses on some rank; the reduction takes zeros for the others.

    torch reduce-scatters as one tensor the gradients of a unit that this rank has: ranks that use other
    parameters of it (experts, a branch) would get the gradients of each other. A parameter that no rank has
    used ends the backward without a gradient, as in one process: an optimizer leaves it alone.

    Attributes:
        params: torch's ``FSDPParam`` of every parameter, in the same order on all ranks.
        mesh: the device mesh over which gradients are reduced.
        upcast: whether weights that trained when the model was sharded are stored in float32.
        differentiable: whether a backward may be differentiated; collectives of tensor and context
            parallelism in it would give wrong gradients.
        used: those with a gradient of this rank in the running backward.
        filled: those with zeros in it, and no gradient of an earlier one.
        kept: the units that stay unsharded for the backward of a backward.
    """

    params: list[Any]
    mesh: DeviceMesh
    upcast: bool
    differentiable: bool = True
    used: set[Any] = field(default_factory=set)
    filled: set[Any] = field(default_factory=set)
    kept: set[Any] = field(default_factory=set)
    task: int = -1

    def post_backward(self, group: Any, reduce: Callable[..., None], *args: Any) -> None:
        """Call ``reduce``, which is torch's ``post_backward`` of a unit, on gradients of all parameters.

        A unit without any gradient of this rank is left as it is: torch comes to it at the end, where other
        ranks do not wait for it. After a backward that makes a graph of its own (``create_graph=True``) of
        other gradients, the unsharded parameters stay for the backward through that graph.
        """
        held = [whole for p in group.fsdp_params if (whole := unsharded_param(p)) is not None]
        if self.differentiable and torch.is_grad_enabled() and all(whole.grad is None for whole in held):
            self._keep_unsharded(group)
            return
        if not held:  # no forward has used the unit yet
            return
        wholes: dict[Any, Any] = {p: unsharded_param(p) for p in group.fsdp_params if group.reduce_grads}
        for p in [p for p, whole in wholes.items() if whole is not None and not whole.numel()]:
            clear_unreduced(p)  # torch cannot reduce an empty one
        trained = {
            p: whole
            for p, whole in wholes.items()
            if whole is not None and whole.requires_grad and whole.numel()
        }
        grads = {p: unreduced_grad(p) for p in trained}
        if present := [grad for grad in grads.values() if grad is not None]:
            if (task := torch._C._current_graph_task_id()) != self.task:
                self.task = task
                self.used.clear()
                self.filled.clear()
                Variable._execution_engine.queue_callback(self._clear_unused)  # type: ignore[attr-defined]
            # torch takes dtypes at the first forward, in which all parameters of the unit may be frozen.
            if getattr(group, "_orig_dtype", group) is None:
                group._init_mp_dtypes()
            if self.upcast and next(iter(trained)).sharded_param.dtype.itemsize == 2:
                self._note_half_precision()
            # Those of earlier micro-batches may wait in a wider dtype, and torch reduces equal ones only.
            dtype = max(present, key=torch.Tensor.element_size).dtype
            for p, grad in grads.items():
                whole = trained[p]
                if grad is not None:
                    self.used.add(p)
                elif p.sharded_param.grad is None:
                    self.filled.add(p)
                if grad is not None and grad.dtype == dtype:
                    continue
                if not _grad_stays_at_param(p):
                    wide = torch.zeros_like(whole, dtype=dtype) if grad is None else grad.to(dtype)
                    p.unsharded_accumulated_grad, whole.grad = wide, None
                elif grad is None:
                    whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype or whole.dtype)
        reduce(*args)
        # A reentrant checkpoint may compute the unit again, for an earlier call: a forward as any other, but
        # torch would take it for a part of this backward, and not reduce its gradients.
        state = group.modules[0]._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE

    def _keep_unsharded(self, group: Any) -> None:
        """Leave a unit unsharded until its next backward or forward, which must not see old values."""
        if group not in self.kept:

            def reshard(*_: Any) -> None:
                handle.remove()
                self.kept.discard(group)
                group.reshard()

            self.kept.add(group)
            handle = group.modules[0].register_forward_pre_hook(reshard, prepend=True)

    def _note_half_precision(self) -> None:
        self.upcast = False
        half = [
            p for p in self.params if p.sharded_param.requires_grad and p.sharded_param.dtype.itemsize == 2
        ]
        names, dtype = list_first([p._param_fqn for p in half]), half[0].sharded_param.dtype
        warn_user(
            f"{names} train in {dtype}: they were frozen when the model was prepared, and only what trains "
            "then is stored in float32. Updates below their rounding are lost. Freeze them after prepare"
        )

    def _clear_unused(self) -> None:
        """Clear the gradients that are zeros on all ranks; only a rank that has some waits."""
        self.task, device = -1, self.mesh.device_type
        flags = torch.ones(len(self.params), dtype=torch.uint8, device=device)
        if self.filled:
            flags = torch.tensor([p in self.used for p in self.params], dtype=torch.uint8, device=device)
        for axis in range(self.mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        for p, is_used in zip(self.params, flags.tolist(), strict=True) if self.filled else ():
            if not is_used and p in self.filled:
                p.sharded_param.grad = None
        self.used.clear()
        self.filled.clear()


def unreduced_bytes(models: Iterable[nn.Module]) -> int:
    """Return the bytes of the unsharded gradients that wait for the last micro-batch of a window."""
    total = 0
    for group, policy in (pair for model in models for pair in _groups_with_policies(model)):
        for fsdp_param in group.fsdp_params:
            sharded_param = fsdp_param.sharded_param
            if sharded_param.requires_grad:
                # That of the computation, until torch 2.15 keeps that of the parameter.
                computed = None if _grad_stays_at_param(fsdp_param) else policy.param_dtype
                dtype = policy.reduce_dtype or computed or sharded_param.dtype
                total += fsdp_param._orig_size.numel() * dtype.itemsize
    return total


# ---------------------------------------------------------------- gradients of a window that is not complete


def gradient_pieces(model: nn.Module, ranks: int) -> dict[str, list[GradientPiece]]:
    """Return this rank's pieces of the open gradients; see ``OpenGradients``.

    Args:
        model: the sharded model.
        ranks: over how many ranks the gradients of a parameter are averaged.
    """
    pieces: dict[str, list[GradientPiece]] = {}
    for name, parameter, fsdp_param in _named_params(model):
        held = pieces.setdefault(name, [])
        if parameter.grad is not None:
            held += sharded_pieces(_reduce_partial(parameter.grad), 0 if fsdp_param is not None else ranks)
        waiting: list[torch.Tensor | None] = []
        if fsdp_param is not None and not _grad_stays_at_param(fsdp_param):
            waiting.append(fsdp_param.unsharded_accumulated_grad)
        if fsdp_param is not None and (whole := unsharded_param(fsdp_param)) is not None:
            waiting.append(whole.grad)
        for gradient in waiting:
            if gradient is not None:
                held += sharded_pieces(_spread_as_param(gradient, fsdp_param), ranks)
    return {name: held for name, held in pieces.items() if held}


def takes_unreduced(models: Iterable[nn.Module]) -> bool:
    """Return whether unreduced gradients can be set: from torch 2.15 on, only after the first forward."""
    return not any(map(_grad_stays_at_param, fsdp_params(models).values()))


def restore_pieces(model: nn.Module, pieces: Mapping[str, Sequence[GradientPiece]]) -> None:
    """Put this rank's pieces back where ``gradient_pieces`` has found them."""
    for name, parameter, fsdp_param in _named_params(model):
        for piece in pieces.get(name, ()):
            if fsdp_param is None or piece.ranks == 0:
                values = piece.values.to(local_grad(parameter).device, parameter.dtype, copy=True)
                if isinstance(parameter, DTensor):
                    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
                    values = DTensor.from_local(
                        values, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
                    )
                parameter.grad = values
                continue
            values = piece.values.to(fsdp_param.device, copy=True)
            spec = _unsharded_spec(fsdp_param)
            if spec is not None:
                values = _from_unsharded_spec(values, spec)
            old = fsdp_param.unsharded_accumulated_grad
            fsdp_param.unsharded_accumulated_grad = values if old is None else old.add_(values)


@torch.no_grad()
def load_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Keep this rank's shard of unsharded, reduced gradients: the next reduction adds to it."""
    for name, parameter, _ in _named_params(model):
        if name in gradients:
            whole = gradients[name].to(parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.grad = distribute(whole, parameter)
            else:
                parameter.grad = whole.to(parameter.device, copy=True)


def _named_params(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, the parameter that optimizers hold, its ``FSDPParam`` or None)."""
    by_param = fsdp_params([model])
    sharded = {unsharded_param(each): p for p, each in by_param.items()}
    for name, parameter in model.named_parameters():
        held = sharded.get(parameter, parameter)
        yield name, held, by_param.get(held)


def _unsharded_spec(fsdp_param: Any) -> Any:
    """Return mesh and placements of the unsharded parameter where tensor parallelism shards it; else None."""
    if not fsdp_param.is_dtensor:
        return None
    spec = getattr(fsdp_param, "_unsharded_dtensor_spec", None)
    return fsdp_param._tp_spec if spec is None else spec


def _spread_as_param(gradient: Any, fsdp_param: Any) -> Any:
    """Return an unreduced gradient as its parameter is sharded by tensor parallelism."""
    spec = _unsharded_spec(fsdp_param)
    if spec is None:
        return gradient
    return _from_unsharded_spec(fsdp_param._get_grad_inner_tensor(gradient), spec)


def _from_unsharded_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """Return a gradient that tensor parallelism shards as its parameter, also unevenly."""
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def sharded_pieces(gradient: Any, ranks: int) -> list[GradientPiece]:
    """Return the piece of this rank in a gradient; none where its shard is empty."""
    if not isinstance(gradient, DTensor):
        return [whole_piece(gradient, ranks)]
    local = gradient.to_local().detach()
    if not local.numel():
        return []
    shards = math.prod(gradient.device_mesh.size(axis) for axis in shard_mesh_dims(gradient.placements))
    boxes = shard_boxes(gradient)
    several = tuple(map(tuple, boxes)) if len(boxes) > 1 else ()
    return [GradientPiece(local, tuple(gradient.shape), boxes[0].offsets, ranks // shards, several)]


@torch.no_grad()
def local_grad(gradient: Any) -> torch.Tensor:
    """Return the local shard of a gradient; in-place changes take effect."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@torch.no_grad()
def clip_norm(
    parameters: Iterable[torch.Tensor],
    limit: float,
    p: float,
    device: torch.device,
    stages: Sequence[Any] = (),
    elsewhere: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``limit``; return the norm before.

    Every element counts once, however many ranks have it. The norm is equal on all ranks.

    Args:
        parameters: the parameters, sharded or not.
        limit: the greatest norm; infinity scales nothing.
        p: of the p-norm, not 0; ``inf`` takes the greatest absolute value, ``-inf`` the smallest.
        device: where the all-reduce runs.
        stages: pipeline parallel groups, whose ranks have other parameters that count too.
        elsewhere: parameters that count on another rank of such a group, which has them too.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads and not stages:
        return torch.zeros((), device=device)
    others = {id(parameter.grad) for parameter in elsewhere}
    counted = shards_by_groups(grad for grad in grads if id(grad) not in others)
    return clip_sharded_norm(counted, map(local_grad, grads), limit, float(p), device, stages)


def shards_by_groups(gradients: Iterable[Any]) -> list[tuple[list[Any], list[torch.Tensor]]]:
    """Return the local shards of gradients with the process groups over which they are sharded."""
    by_axes: dict[Any, list[torch.Tensor]] = {}
    for grad in map(_reduce_partial, gradients):
        by_axes.setdefault(_shard_axes(grad), []).append(local_grad(grad))
    return [([over[0].get_group(axis) for axis in over[1:]], shards) for over, shards in by_axes.items()]


def _reduce_partial(gradient: Any) -> Any:
    """Redistribute a gradient with ``Partial`` placements to a replicated one; others stay."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
    )


def _shard_axes(gradient: Any) -> tuple[Any, ...]:
    """Return the mesh of a gradient and the mesh dimensions over which it is sharded."""
    if not isinstance(gradient, DTensor):
        return ()
    return gradient.device_mesh, *(
        axis for axis, p in enumerate(gradient.placements) if is_sharded_placement(p)
    )


@torch.no_grad()
def clip_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clamp every gradient element to ``[-limit, limit]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            # The sum is clamped, not its summands.
            parameter.grad = _reduce_partial(parameter.grad)
            local_grad(parameter.grad).clamp_(-limit, limit)


_READS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__bool__,
        torch.Tensor.__index__,
        torch.Tensor.__complex__,
        torch.Tensor.is_nonzero,
        torch.is_nonzero,
    }
)


class PartialReads(TorchFunctionMode):
    """Inside, numbers that an optimizer reads of partial DTensors are those over all ranks: a collective.

    A norm or sum over shards (``p.norm().item()``) is a partial DTensor. torch gives this rank's summand of
    it as the number, so that every rank would step with another one. All ranks step alike: the sum can be
    formed where the number is read.

    Complex parameters are viewed as real ones, for the optimizer to write into. torch gives it a copy where
    the shards of a vector are uneven, and what it writes there is lost.

    Args:
        optimizer: as it was before ``prepare``.

    Attributes:
        is_needed: there was such a number, there are complex parameters, or the optimizer is none of torch's
            and may read one in any step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.is_needed = not type(optimizer).__module__.startswith("torch.optim.")
        for group in optimizer.param_groups:
            self.is_needed |= any(map(torch.is_complex, group["params"]))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, on the sum over all ranks if it reads a partial DTensor."""
        if func is torch.view_as_real and isinstance(args[0], DTensor):
            whole, shape = args[0], torch.Size((*args[0].shape, 2))
            stride = (*(2 * step for step in whole.stride()), 1)
            return DTensor.from_local(
                func(whole.to_local()), whole.device_mesh, whole.placements, shape=shape, stride=stride
            )
        if (
            func in _READS
            and isinstance(args[0], DTensor)
            and any(p.is_partial() for p in args[0].placements)
        ):
            self.is_needed = True
            args = (args[0].full_tensor(), *args[1:])
        return func(*args, **(kwargs or {}))
