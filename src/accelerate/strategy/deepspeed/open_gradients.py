"""The gradients of a window that is not complete, in DeepSpeed's buffers: reading them and putting them back.

Where DeepSpeed 0.19 adds them up until the window ends, by ``runtime/zero/stage_1_and_2.py``, ``stage3.py``
and ``bf16_optimizer.py``:

- stage 0: ``parameter.grad``; in bfloat16 ``fp32_groups_gradients``. Stage 1: ``parameter.grad`` or
  ``grad_accum``. Each rank has its own, unreduced.
- stage 2: ``all_grad_tensors`` has a tensor for each parameter of this rank's partition, of which the
  fragment counts; ``averaged_gradients`` where they are float32 beside 16-bit weights;
  ``accumulated_grads_in_cpu`` where the optimizer is offloaded. Reduced.
- stage 3: a dict of partitions by ``ds_id``. Reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.strategy.deepspeed.reduced_gradients import STAGE3_PARTITIONS, is_stage_1_or_2
from accelerate.strategy.protocol.gradient_sync import GradientPiece, OpenGradients, whole_piece

if TYPE_CHECKING:
    from weakref import WeakMethod

    from accelerate.strategy.deepspeed.engine_handle import DeepSpeedEngineRegistry, EngineHandle
    from accelerate.strategy.deepspeed.full_state import ParamFragment


class DeepSpeedOpenGradients(OpenGradients):
    """The capability of the strategy ``DeepSpeed`` to save and restore its open gradients."""

    if TYPE_CHECKING:  # of the strategy
        engines: DeepSpeedEngineRegistry

        def trained_engines(self, models: Iterable[nn.Module]) -> list[EngineHandle]: ...

    def set_step_owner(self, optimizer: Any, owner: WeakMethod[Callable[[str], None]]) -> None:
        """Offer ``owner`` each step that the program leaves out."""
        if (handle := self.engines.find_by_optimizer(optimizer)) is not None:
            handle.omitted_steps.owner = owner

    def note_own_step(self, optimizer: Any) -> None:
        """Note that the program takes the steps of an optimizer, and leaves none out."""
        if (handle := self.engines.find_by_optimizer(optimizer)) is not None:
            handle.omitted_steps.is_over = True

    def has_partial_gradients(self, optimizer: Any) -> bool:
        """Return whether the optimizer has gradients of a window that is not complete."""
        handle = self.engines.find_by_optimizer(optimizer)
        return handle is not None and handle.has_gradients and not handle.window_complete

    def waiting_backwards(self, optimizer: Any, models: Sequence[Any] | None = None) -> float:
        """Return the number of complete backwards that wait for a step which the program leaves out.

        Infinity where the program itself has told which backward of a window is its last.

        Args:
            optimizer: the user's.
            models: those whose gradients count; None for all.
        """
        handle = self.engines.find_by_optimizer(optimizer)
        if handle is None or handle.omitted_steps.is_over:
            return 0
        if not handle.has_gradients or not handle.window_complete:
            return 0
        is_named = models is None or any(self.engines.find(model) is handle for model in models)
        if not is_named:
            return 0
        return math.inf if handle.omitted_steps.ends_window else handle.omitted_steps.backwards

    def has_read_norm(self, optimizer: Any) -> bool:
        """Return whether the program has asked for the norm of its gradients between backward and step."""
        handle = self.engines.find_by_optimizer(optimizer)
        return handle is not None and handle.omitted_steps.has_read_norm

    @property
    def has_readable_gradients(self) -> bool:
        """Return whether this version of DeepSpeed has its buffers where they are looked for."""
        return all(map(has_known_buffers, self.engines.trained_engines()))

    @property
    def gradient_layout(self) -> str:
        """Return what decides which gradients a rank holds: the stages and the world size.

        Nothing where a backward of stage 1 or 2 was complete: its gradients are loaded as unsharded ones, for
        the next backward would replace them where they are.
        """
        handles = self.engines.trained_engines()
        if any(map(has_partitioned_sums, handles)):
            return ""
        stages = ", ".join(str(handle.stage) for handle in handles)
        return f"{self.name}, stage {stages}, of {self.world.size}"

    def gradient_pieces(self, model: nn.Module) -> dict[str, list[GradientPiece]]:
        """Return this rank's pieces of what DeepSpeed has added up since the last step."""
        engines = self.trained_engines([model])
        return read_gradients(engines[0], self.world.size) if engines else {}

    def restore_pieces(self, model: nn.Module, pieces: Mapping[str, Sequence[GradientPiece]]) -> None:
        """Put this rank's own pieces back into DeepSpeed's buffers."""
        for handle in self.trained_engines([model]):
            load_gradients(handle, {name: held[0].values for name, held in pieces.items()}, unsharded=False)

    def load_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make unsharded gradients the open ones; each rank keeps its fragments."""
        for handle in self.trained_engines([model]):
            load_gradients(handle, gradients, unsharded=True)


# What is read of DeepSpeed's optimizer, by the stage.
_REQUIRED_ATTRIBUTES = {
    2: (
        *("params_in_partition", "cpu_offload", "averaged_gradients", "all_grad_tensors", "micro_step_id"),
        *("gradient_accumulation_dtype", "_use_compact_grad_partition_buffer"),
        "_build_compact_grad_partition_buffer",
    ),
    3: (STAGE3_PARTITIONS, "micro_step_id"),
}


def has_known_buffers(handle: EngineHandle) -> bool:
    """Return whether all open gradients are where this module looks for them in DeepSpeed's buffers."""
    if handle.reduced and not handle.window_complete:
        return False  # beside a micro-batch in no_sync after a complete one
    inner = handle.engine_optimizer
    others = ("zenflow", "low_precision_master_weights_and_grads")  # keep gradients in other buffers
    if any(getattr(inner, option, False) for option in others):
        return False
    stage = 2 if has_partitioned_sums(handle) else handle.stage
    return all(hasattr(inner, name) for name in _REQUIRED_ATTRIBUTES.get(stage, ()))


def has_partitioned_sums(handle: EngineHandle) -> bool:
    """Return whether a complete backward of stage 1 or 2 has left the sums of this rank's partition only."""
    is_complete = handle.has_gradients and handle.window_complete
    return is_complete and is_stage_1_or_2(handle.engine_optimizer)


def read_gradients(handle: EngineHandle, ranks: int) -> dict[str, list[GradientPiece]]:
    """Return this rank's pieces by the names of their parameters; empty where no window is open.

    Args:
        handle: a trained engine.
        ranks: the world size.
    """
    if not handle.has_gradients:
        return {}
    pieces: dict[str, list[GradientPiece]] = {}
    if handle.stage < 2 and not has_partitioned_sums(handle):
        for name, parameter in _trained_parameters(handle):
            gradient = _unreduced_gradient(handle, parameter)
            if gradient is not None:
                pieces[name] = [whole_piece(gradient.view(parameter.shape), ranks)]
        return pieces
    from accelerate.strategy.deepspeed.full_state import local_fragments

    fragments = local_fragments(handle)
    for name, parameter in _trained_parameters(handle):
        fragment = fragments.get(id(parameter))
        values = None if fragment is None or not fragment.numel else _find_reduced_gradient(handle, fragment)
        if fragment is not None and values is not None:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            pieces[name] = [GradientPiece(values.detach(), shape, (fragment.param_start,), 0)]
    return pieces


@torch.no_grad()
def load_gradients(handle: EngineHandle, gradients: Mapping[str, torch.Tensor], *, unsharded: bool) -> None:
    """Make gradients the open ones, to which the rest of the window adds.

    Args:
        handle: a trained engine without gradients.
        gradients: by name; those that this rank has read, or unsharded and reduced ones.
        unsharded: which of the two.
    """
    from accelerate.strategy.deepspeed.full_state import local_fragments

    pairs = [(p, gradients[name]) for name, p in _trained_parameters(handle) if name in gradients]
    if handle.stage < 2:
        for parameter, gradient in pairs:
            _set_unreduced_gradient(handle, parameter, gradient)
    else:
        _prepare_buffers(handle)
        fragments = local_fragments(handle)
        for parameter, gradient in pairs:
            fragment = fragments.get(id(parameter))
            if fragment is None or not fragment.numel:
                continue
            part = gradient.reshape(-1)
            part = part.narrow(0, fragment.param_start, fragment.numel) if unsharded else part
            values = _find_reduced_gradient(handle, fragment)
            assert values is not None
            values.copy_(part)
    handle.has_gradients, handle.window_complete = True, False


def _trained_parameters(handle: EngineHandle) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that the optimizer changes, by their first names in the user's module."""
    members = {id(p) for group in handle.groups for p in group if p.requires_grad}
    return ((name, p) for name, p in handle.module.named_parameters() if id(p) in members)


# --- stages 0 and 1


def _unreduced_gradient(handle: EngineHandle, parameter: Any) -> torch.Tensor | None:
    """Return the gradient of this rank alone, or None."""
    inner = handle.engine_optimizer
    if hasattr(inner, "fp32_groups_has_gradients"):
        group, index = _find_in_groups(inner.bf16_groups, parameter)
        has_gradient = inner.fp32_groups_has_gradients[group][index]
        return inner.fp32_groups_gradients[group][index] if has_gradient else None
    return getattr(parameter, _gradient_attribute(inner))


def _set_unreduced_gradient(handle: EngineHandle, parameter: Any, gradient: torch.Tensor) -> None:
    inner = handle.engine_optimizer
    if hasattr(inner, "fp32_groups_has_gradients"):
        group, index = _find_in_groups(inner.bf16_groups, parameter)
        inner.fp32_groups_gradients[group][index].view(-1).copy_(gradient.reshape(-1))
        inner.fp32_groups_has_gradients[group][index] = True
        return
    attribute = _gradient_attribute(inner)
    dtype = parameter.dtype if attribute == "grad" else inner.gradient_accumulation_dtype
    setattr(parameter, attribute, gradient.to(parameter.device, dtype, copy=True))


def _gradient_attribute(inner: Any) -> str:
    return "grad_accum" if getattr(inner, "use_grad_accum_attribute", False) else "grad"


def _find_in_groups(groups: list[list[Any]], parameter: Any) -> tuple[int, int]:
    return next((i, j) for i, group in enumerate(groups) for j, p in enumerate(group) if p is parameter)


# --- stages 2 and 3


def _find_reduced_gradient(handle: EngineHandle, fragment: ParamFragment) -> torch.Tensor | None:
    """Return the part of DeepSpeed's buffer with the reduced gradient of a fragment; one dimension."""
    inner, parameter = handle.engine_optimizer, fragment.parameter
    if handle.stage == 3:
        partitions = getattr(inner, STAGE3_PARTITIONS)
        return partitions[parameter.ds_id].narrow(0, 0, fragment.numel)  # type: ignore[attr-defined]
    group, index = _find_in_groups(inner.params_in_partition, parameter)
    if has_partitioned_sums(handle) and not inner._use_compact_grad_partition_buffer(group):
        if not inner.cpu_offload:
            return inner.averaged_gradients[group][index].view(-1)
        inner._wait_for_offload_copies()
        return fragment.slice_vector(inner.single_partition_of_fp32_groups[group].grad)
    within_param = slice(fragment.param_start, fragment.param_start + fragment.numel)
    if inner.cpu_offload:
        if hasattr(inner, "_wait_for_offload_copies"):
            inner._wait_for_offload_copies()
        held = inner.accumulated_grads_in_cpu.get(inner.get_param_id(parameter))
        return None if held is None else held.view(-1)[within_param]
    if inner._use_compact_grad_partition_buffer(group):
        buffers = inner.averaged_gradients.get(group)
        return None if buffers is None else fragment.slice_vector(buffers.flat_partition)
    tensors = inner.all_grad_tensors.get(group)
    return None if tensors is None else tensors[index].view(-1)[within_param]


def _prepare_buffers(handle: EngineHandle) -> None:
    """Make buffers of zeros for the reduced gradients of this rank, which the next backward adds to."""
    inner = handle.engine_optimizer
    if handle.stage == 3:
        for partition in getattr(inner, STAGE3_PARTITIONS).values():
            partition.zero_()
        inner.micro_step_id = 1  # 0 would replace what is there
        return
    inner.micro_step_id = 0  # raised before it is read, and with 0 the next backward would replace
    for group, members in enumerate(inner.params_in_partition):
        if inner.cpu_offload:
            for p in members:
                inner.accumulated_grads_in_cpu[inner.get_param_id(p)] = torch.zeros(
                    p.numel(), dtype=p.dtype, device=inner.device
                )
            inner._offload_accumulated_param_ids |= {inner.get_param_id(p) for p in members}
        elif inner._use_compact_grad_partition_buffer(group):
            inner.averaged_gradients[group] = inner._build_compact_grad_partition_buffer(group)
        else:
            dtype = inner.gradient_accumulation_dtype
            inner.all_grad_tensors[group] = [torch.zeros_like(p, dtype=dtype) for p in members]
