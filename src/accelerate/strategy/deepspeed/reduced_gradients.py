"""Reduced gradients in DeepSpeed's buffers: adding those of several complete backwards, and clearing them.

DeepSpeed 0.19 expects one backward at the end of each window. By ``runtime/zero/stage_1_and_2.py`` and
``stage3.py``:

- stages 1 and 2: a second one replaces ``averaged_gradients`` or, with an offloaded optimizer, the gradient
  of the float32 vectors. Where sums are float32 beside 16-bit weights, it adds to them.
- stage 3: it adds to the partitions only after another forward.
- An offloaded optimizer lacks the gradients of a parameter that the last backward of a window does not use.
- A parameter that a window does not use keeps its old gradient in the partitions of stage 3, and in the
  vectors of an offloaded optimizer; the step would take it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from accelerate.core.errors import PrepareError

STAGE3_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
# By the number of the group: the vector's gradient, or the fragments of its parameters.
ReducedGradients = dict[int, list[torch.Tensor]]


def is_stage_1_or_2(inner: Any) -> bool:
    """Return whether DeepSpeed's optimizer is that of stages 1 and 2.

    Stage 1 has another one too, to whose gradients backwards add. ZenFlow has buffers of its own.
    """
    return hasattr(inner, "single_partition_of_fp32_groups") and not getattr(inner, "zenflow", False)


def is_stage_3(inner: Any) -> bool:
    """Return whether DeepSpeed's optimizer is that of stage 3."""
    return hasattr(inner, STAGE3_PARTITIONS)


@torch.no_grad()
def take_reduced(inner: Any) -> ReducedGradients:
    """Take the reduced gradients that the next complete backward would replace.

    Args:
        inner: DeepSpeed's optimizer, as in all functions of this module.

    Raises:
        PrepareError: they cannot be added up.
    """
    if not is_stage_1_or_2(inner):
        return {}  # another backward adds to them
    if not hasattr(inner, "_use_compact_grad_partition_buffer"):
        raise PrepareError(
            "a second backward after gradients were reduced, with this version of DeepSpeed",
            why="it would replace the gradients of the first one, and they are not where 0.19 has them",
            fix="pip install 'deepspeed>=0.19', or add the losses and call accelerator.backward(loss) once",
        )
    if "muon" in type(inner.optimizer).__name__.lower() and not inner.cpu_offload:
        raise PrepareError(
            "a second backward after gradients were reduced, with Muon",
            why="DeepSpeed has made Muon's update of the first gradients; the sum of two updates is not the "
            "update of the sum",
            fix="add the losses, and call accelerator.backward(loss) once for each micro-batch",
        )
    taken: ReducedGradients = {}
    for group in range(len(inner.bit16_groups)):
        adds_up = inner._use_compact_grad_partition_buffer(group)
        if inner.cpu_offload:
            inner._wait_for_offload_copies()
            gradient = inner.single_partition_of_fp32_groups[group].grad
            taken[group] = [] if adds_up else [gradient.clone()]
            if not adds_up:
                gradient.zero_()
        elif not adds_up and inner.averaged_gradients.get(group) is not None:
            taken[group] = inner.averaged_gradients[group]
    if inner.cpu_offload:
        # The next backward begins anew.
        inner.micro_step_id, inner.norm_for_param_grads = -1, {}
        inner._offload_accumulated_param_ids = set()
    return taken


@torch.no_grad()
def add_reduced(inner: Any, taken: ReducedGradients) -> None:
    """Add gradients that were taken to those of a complete backward."""
    for group, gradients in taken.items():
        if not inner.cpu_offload:
            for total, gradient in zip(inner.averaged_gradients[group], gradients, strict=True):
                total.add_(gradient)
            continue
        inner._wait_for_offload_copies()
        total = inner.single_partition_of_fp32_groups[group].grad
        for gradient in gradients:
            total.add_(gradient)
        for parameter in inner.params_in_partition[group]:
            number = inner.get_param_id(parameter)
            _, _, start, numel = inner.grad_position[number]
            inner.norm_for_param_grads[number] = total.view(-1).narrow(0, start, numel).norm(2)


@torch.no_grad()
def finish_window(inner: Any) -> None:
    """Take into the vectors of an offloaded optimizer what only the earlier micro-batches of a window used.

    DeepSpeed copies the sums of a parameter when the last backward of the window reduces its gradient.
    """
    norms = getattr(inner, "norm_for_param_grads", {})  # of the parameters that were copied
    # Versions before 0.19 lack these.
    if is_stage_3(inner) and hasattr(inner, "_offload_boundary_param_ids") and inner.offload_optimizer:
        reduced = inner._offload_boundary_param_ids
        copied = {p.ds_id for group in inner.fp16_groups for p in group if inner.get_param_id(p) in norms}
        inner._offload_boundary_param_ids = reduced - copied
        inner._finalize_offload_gradient_accumulation()
        inner._offload_boundary_param_ids = reduced
    elif is_stage_1_or_2(inner) and hasattr(inner, "_offload_accumulated_param_ids") and inner.cpu_offload:
        reduced = inner._offload_accumulated_param_ids
        inner._offload_accumulated_param_ids = reduced - norms.keys()
        inner._finalize_cpu_offload_gradient_accumulation()
        inner._offload_accumulated_param_ids = reduced


def begin_backward(inner: Any) -> None:
    """Tell DeepSpeed that another backward begins, where no forward has told it."""
    if getattr(inner, "_epilogue_ran_this_backward", False):
        inner.clear_backward_seen_flag()


@torch.no_grad()
def clear_reduced(inner: Any) -> None:
    """Clear the gradients that DeepSpeed leaves in its buffers after a step."""
    for buffer in _kept_buffers(inner):
        buffer.zero_()


def _kept_buffers(inner: Any) -> Iterator[torch.Tensor]:
    if is_stage_3(inner):
        yield inner.grad_partitions_flat_buffer  # of which the partitions are views
        if inner.offload_optimizer:
            vectors = inner.fp32_partitioned_groups_flat
            yield from _gradients(
                v for i, v in enumerate(vectors) if not inner._swappable_optimizer_subgroup(i)
            )
    elif is_stage_1_or_2(inner) and inner.cpu_offload:
        yield from _gradients(inner.single_partition_of_fp32_groups)
        # A window's later micro-batches add to these.
        yield from inner.accumulated_grads_in_cpu.values()


def _gradients(vectors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (vector.grad for vector in vectors if vector.grad is not None)
