"""Context parallelism: each process has the queries of its tokens, and attends to the keys of all.

``cp_comm_strategy`` selects how. ``allgather`` all-gathers keys and values before each attention; their
gradients are reduce-scattered. A causal query sees only keys before it, so a process computes attention of
each range of its tokens over the keys up to its end: no mask is made, and all processes have the same work.

``alltoall`` is ring attention: a process has the keys of one other process at a time. It computes attention
of its queries over them, by a kernel that also returns the logsumexp, so that what comes next can be merged;
gradients of keys go around once more. torch's template of that takes any such kernel. Its own table of them,
which it asks through DTensor, has none of the host's; so the kernels are named here, and the template is
called directly. What these kernels cannot compute, such as a call with a mask, is all-gathered.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from accelerate.core.errors import SettingError, warn_user
from accelerate.strategy.base import PrepareBundle, PrepareStep
from accelerate.strategy.parallelism.context.attention import (
    AttentionCall,
    SequenceShardedAttention,
    all_gather_with_grad,
)
from accelerate.strategy.parallelism.context.sequence_sharding_base import SequenceParallelMeshDimension
from accelerate.strategy.parallelism.context.sequence_shards import join_shards

TORCH_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
ALTERNATIVE = 'cp_comm_strategy="allgather", which gathers keys and gives the same numbers'
# What is handed to the template, and has to be what it takes.
_SIGNATURES = {
    "_templated_ring_attention": ("group", "seq_dim", "op", "query", "key", "value", "is_causal"),
    "_templated_ring_attention_backward": (
        *("group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value"),
        *("out", "logsumexp", "is_causal"),
    ),
}
_TOKEN_DIM = 2  # the dimension of tokens, of (rows, heads, tokens, width)
_WIDTH_MULTIPLE = 8  # kernels take multiples of it


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel that returns the logsumexp.

    Attributes:
        kind: what torch calls it when it chooses one.
        name: of the operation; its gradient is ``name + "_backward"``.
        saved_names: arguments of the gradient that are results of the forward, after the first two.
        forward_kwargs, backward_kwargs: other arguments of each.
        grad_name: what the gradient of the result is called.
        query_multiple: sums are there for a multiple of so many queries; those of no query are infinite.
    """

    kind: SDPBackend
    name: str
    saved_names: tuple[str, ...] = ()
    forward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    backward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    grad_name: str = "grad_out"
    query_multiple: int = 1

    def operation(self, ending: str = "") -> Any:
        """The operation, or with ``"_backward"`` its gradient."""
        return getattr(torch.ops.aten, self.name + ending).default

    def runs_on(self, kind: str) -> bool:
        """Return whether torch has the kernel for a device type."""
        if not hasattr(torch.ops.aten, self.name):
            return False
        key = torch._C._dispatch_key_for_device(kind)
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{self.name}", key)


_LENGTHS, _RANDOM = ("cum_seq_q", "cum_seq_k", "max_q", "max_k"), ("philox_seed", "philox_offset")
_BIAS: dict[str, Any] = {"attn_bias": None}
_SUMS: dict[str, Any] = {**_BIAS, "compute_log_sumexp": True}
KERNELS = (
    AttentionKernel(SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention", (*_LENGTHS, *_RANDOM)),
    AttentionKernel(SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention_for_cpu"),
    AttentionKernel(
        SDPBackend.EFFICIENT_ATTENTION,
        "_scaled_dot_product_efficient_attention",
        _RANDOM,
        _SUMS,
        {**_BIAS, "grad_input_mask": (True, True, True, False)},
        "grad_out_",
        query_multiple=32,
    ),
    AttentionKernel(
        SDPBackend.CUDNN_ATTENTION,
        "_scaled_dot_product_cudnn_attention",
        (*_LENGTHS, *_RANDOM),
        _SUMS,
        _BIAS,
    ),
)


def check_ring_support(kind: str) -> None:
    """Refuse a torch without ring attention, and a device type without a kernel for it.

    Raises:
        SettingError: with the reason.
    """
    if not any(kernel.runs_on(kind) for kernel in KERNELS):
        reason = f"torch {torch.__version__} has no attention kernel for {kind} that a ring could be made of"
    elif not _has_ring_template():
        known = "no ring attention that is known here; torch 2.10 or newer has it"
        reason = f"torch {torch.__version__} has {known}"
    else:
        return
    raise SettingError("cp_comm_strategy='alltoall' cannot work here", why=reason, fix=ALTERNATIVE)


def _has_ring_template() -> bool:
    """Return whether torch has the ring template with the expected signature."""
    if find_spec(TORCH_MODULE.rpartition(".")[0]) is None or find_spec(TORCH_MODULE) is None:
        return False
    ring = import_module(TORCH_MODULE)
    options = getattr(ring, "_cp_options", None)
    return hasattr(options, "enable_load_balance") and all(
        hasattr(ring, name) and tuple(inspect.signature(getattr(ring, name)).parameters)[:-1] == expected
        for name, expected in _SIGNATURES.items()
    )


class AllGatherAttention(SequenceShardedAttention):
    """Attention that all-gathers keys and values."""

    def compute_attention(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention of local queries over all keys, range by range where it is causal."""
        keys, values = self._gather_keys_values(call.key, call.value)
        if not call.causal:
            return call.run_kernel(call.query, keys, values, call.mask)
        done = 0
        results: list[torch.Tensor] = []
        for start, stop in self.query_ranges(call.query.shape[-2]):
            part = call.query.narrow(-2, done, stop - start)
            bias = causal_lower_right(stop - start, stop)
            results.append(call.run_kernel(part, keys[..., :stop, :], values[..., :stop, :], bias))
            done += stop - start
        return torch.cat(results, -2) if len(results) > 1 else results[0]

    def select_mask_rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Select the rows of the local queries."""
        if mask.shape[-2] == own:
            return mask
        return torch.cat([mask[..., start:stop, :] for start, stop in self.query_ranges(own)], -2)

    def _gather_keys_values(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather keys and values, in sequence order; in one collective where they have one shape."""
        if key.shape == value.shape and key.dtype == value.dtype:
            both = join_shards(
                all_gather_with_grad(torch.stack((key, value)), self.size, self.group), -2, self.balanced
            )
            return both[0], both[1]
        gathered = (all_gather_with_grad(part.contiguous(), self.size, self.group) for part in (key, value))
        keys, values = (join_shards(parts, -2, self.balanced) for parts in gathered)
        return keys, values


class RingAttention(AllGatherAttention):
    """Attention whose keys and values go around a ring, or are all-gathered where its kernels cannot."""

    def compute_attention(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention of local queries over all keys, one process's after another's."""
        # Zeros behind each vector change no product of two.
        query, key, value = (
            _pad_to_multiple(_as_four_dims(p), _WIDTH_MULTIPLE, 3) for p in (call.query, call.key, call.value)
        )
        kernel = self._kernel(query, key, value, call)
        if isinstance(kernel, str):
            if not torch.compiler.is_compiling():
                _warn_of_all_gather(kernel)
            return super().compute_attention(call)
        width, scale = call.query.shape[-1], call.extra_kwargs.get("scale")
        ring_call = _RingCall(
            self.group,
            kernel,
            call.causal,
            # Parts are balanced where the length allows it (see ``runs``); otherwise order is not asked for.
            call.causal and self.balanced and query.shape[_TOKEN_DIM] % 2 == 0,
            width**-0.5 if scale is None else scale,
        )
        result: Any = _RingFunction.apply(query, key, value, ring_call)
        return result[..., :width].reshape(call.query.shape)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> AttentionKernel | str:
        """Return the kernel that torch would select for these tensors, or why no ring can be made of it."""
        if call.mask is not None:
            return "its kernels take no attention mask, which padding, windows and documents in a row need"
        if call.dropout:
            return "the gradient of dropout would use the random numbers of the last block only"
        widths = {call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]}
        rows = {query.shape[0], key.shape[0], value.shape[0]}
        if len(widths) + len(rows) > 2 or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            return "its kernels take queries, keys and values of equal rows and widths"
        key, value = _repeat_heads(query, key, value)
        chosen: Any = SDPBackend(torch.ops.aten._fused_sdp_choice(query, key, value, None, 0.0, call.causal))
        kind = query.device.type
        for kernel in KERNELS:
            if kernel.kind == chosen and kernel.runs_on(kind):
                return kernel
        return (
            f"for {query.dtype} of width {call.query.shape[-1]} on {kind} torch takes {chosen.name}, which "
            "does not return the logsumexp that blocks are merged by"
        )


@cache
def _warn_of_all_gather(why: str) -> None:
    """Warn, once for each reason, that an attention call does not go around the ring."""
    warn_user(
        f"cp_comm_strategy='alltoall' has no effect on an attention call: {why}. Its keys and values are "
        'all-gathered, which gives the same numbers, as with cp_comm_strategy="allgather".'
    )


def _as_four_dims(part: torch.Tensor) -> torch.Tensor:
    """Reshape (..., heads, tokens, width) to (rows, heads, tokens, width)."""
    return part[(None,) * (4 - part.dim())] if part.dim() < 4 else part.flatten(0, -4)


def _pad_to_multiple(part: torch.Tensor, multiple: int, dim: int, value: float = 0.0) -> torch.Tensor:
    """Pad with ``value`` along ``dim`` to a multiple."""
    missing = -part.shape[dim] % multiple
    after = (0, 0) * (part.dim() - 1 - dim) + (0, missing)
    return torch.nn.functional.pad(part, after, value=value) if missing else part


def _repeat_heads(query: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Repeat key heads as often as query heads share them."""
    times = query.shape[1] // parts[0].shape[1]
    return [part.repeat_interleave(times, 1) if times > 1 else part for part in parts]


@dataclass(frozen=True)
class _RingCall:
    """One ring attention call: the options that forward and backward share."""

    group: Any
    kernel: AttentionKernel
    causal: bool
    balanced: bool
    scale: float

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
        """Return the result, its logsumexp, and the other tensors that the backward needs."""
        operation = self.kernel.operation()

        def run_block(query: Any, key: Any, value: Any, **more: Any) -> Any:
            result, sums, *rest = operation(query, *_repeat_heads(query, key, value), **more)
            return result, sums[:, :, : query.shape[_TOKEN_DIM]], *rest

        outputs = import_module(TORCH_MODULE)._templated_ring_attention(
            self.group,
            _TOKEN_DIM,
            run_block,
            query,
            key,
            value,
            self.causal,
            **self.kernel.forward_kwargs,
            **self._common_kwargs,
        )
        return outputs[: 2 + len(self.kernel.saved_names)]

    def backward(self, gradient: torch.Tensor, saved: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Gradients of (queries, keys, values); ``saved`` are these, and what ``forward`` has found."""
        operation = self.kernel.operation("_backward")

        def run_block(query: Any, key: Any, value: Any, logsumexp: Any, **more: Any) -> Any:
            keys, values = _repeat_heads(query, key, value)
            sums = _pad_to_multiple(logsumexp, self.kernel.query_multiple, _TOKEN_DIM, float("inf"))
            first, *others = operation(query=query, key=keys, value=values, logsumexp=sums, **more)[:3]
            heads = key.shape[1]
            return first, *(part.unflatten(1, (heads, -1)).sum(2) for part in others)

        query, key, value, result, sums, *rest = saved
        more = {
            **dict(zip(self.kernel.saved_names, rest, strict=True)),
            **self.kernel.backward_kwargs,
            **self._common_kwargs,
        }
        return import_module(TORCH_MODULE)._templated_ring_attention_backward(
            *(self.group, _TOKEN_DIM, run_block, gradient.contiguous(), self.kernel.grad_name),
            *(query, key, value, result, sums, self.causal),
            **more,
        )[:3]

    @property
    def _common_kwargs(self) -> dict[str, Any]:
        return {"dropout_p": 0.0, "scale": self.scale}


class _RingFunction(torch.autograd.Function):
    """The autograd function of ring attention; gradients of keys go around the ring too."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring_call: _RingCall
    ) -> torch.Tensor:
        with _ring_options(ring_call.balanced, query.dtype):
            result, sums, *rest = ring_call.forward(query, key, value)
        tensors = [part if isinstance(part, torch.Tensor) else None for part in rest]
        ctx.save_for_backward(query, key, value, result, sums, *tensors)
        ctx.others = [None if isinstance(part, torch.Tensor) else part for part in rest]
        ctx.ring_call = ring_call
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # Asked once: what is computed again is there for one time only.
        saved = ctx.saved_tensors
        rest = [other if part is None else part for part, other in zip(saved[5:], ctx.others, strict=True)]
        with _ring_options(ctx.ring_call.balanced, gradient.dtype):
            return *ctx.ring_call.backward(gradient, (*saved[:5], *rest)), None


@contextmanager
def _ring_options(balanced: bool, dtype: torch.dtype) -> Iterator[None]:
    """Set torch's process-wide ring options for the time of one call."""
    options = import_module(TORCH_MODULE)._cp_options
    set_rotate_method = import_module(TORCH_MODULE).set_rotate_method
    names = ("rotate_method", "enable_load_balance", "convert_to_f32")
    before = {name: getattr(options, name) for name in names}
    set_rotate_method("alltoall")
    options.enable_load_balance, options.convert_to_f32 = balanced, dtype != torch.float64
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(options, name, value)


# The attention classes by ``TorchContextParallelConfig.cp_comm_strategy``.
ATTENTION_CLASSES: dict[str, type[SequenceShardedAttention]] = {
    "allgather": AllGatherAttention,
    "alltoall": RingAttention,
}


class ContextParallel(SequenceParallelMeshDimension):
    """The context parallel dimension, ``cp``."""

    name: ClassVar[str] = "cp"
    title: ClassVar[str] = "context parallelism"

    def __init__(self, strategy: Any) -> None:
        # torch's option: layers that exchange tokens themselves may need contiguous parts. Nobody has changed
        # it in a module that is not imported; the second has it before torch 2.10.
        modules = map(sys.modules.get, (TORCH_MODULE, "torch.distributed.tensor.experimental._attention"))
        options = [getattr(module, "_cp_options", None) for module in modules]
        self.balanced = all(getattr(option, "enable_load_balance", True) for option in options)
        super().__init__(strategy)
        # Programs shift labels and count tokens of whole sequences before maybe_context_parallel shards them.
        self._option = self._option or False

    @property
    def attention_class(self) -> type[SequenceShardedAttention]:
        """The attention class that ``cp_comm_strategy`` selects."""
        return ATTENTION_CLASSES[self.handler.cp_comm_strategy]

    def check(self) -> None:
        """Refuse ring attention where it is not available.

        Raises:
            SettingError: it is asked for, and torch or the device has none.
        """
        super().check()
        if self.attention_class is RingAttention:
            check_ring_support(self.world.device.type)

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Intercept attention and shard batches, unless the program does."""
        if bundle.program_shards_sequences:
            yield PrepareStep(self.name, "the program shards sequences, and exchanges keys", self._leave)
        else:
            yield from super().prepare_steps(bundle)

    def _leave(self, bundle: PrepareBundle) -> None:
        self.is_left = True
