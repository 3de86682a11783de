"""Keys and values that go around a ring: torch's own ring attention, behind the same seam as gathered keys.

Each process has the keys of one other process at a time. It computes attention of its queries over them, by a
kernel that also tells the logarithm of the sums, so that what comes next can be merged; gradients of keys go
around once more. torch's template of that takes any such kernel. Its own table of them, which it asks through
DTensor, has none of the host's; so the kernels are named here, and the template is called directly.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from accelerate.core.errors import PrepareError, SettingError
from accelerate.strategy.parallelism.attention import Call, Exchange

WHERE = "torch.distributed.tensor.experimental._context_parallel._attention"
OTHERS = 'cp_comm_strategy="allgather", which gathers keys and gives the same numbers'
# What is handed to the template, and has to be what it takes.
_TAKEN = {
    "_templated_ring_attention": ("group", "seq_dim", "op", "query", "key", "value", "is_causal"),
    "_templated_ring_attention_backward": (
        *("group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value"),
        *("out", "logsumexp", "is_causal"),
    ),
}
_TOKENS = 2  # the dimension of tokens, of (rows, heads, tokens, width)
_WIDTHS = 8  # kernels take multiples of it


@dataclass(frozen=True)
class Kernel:
    """An attention kernel that tells the logarithms of the sums.

    Attributes:
        kind: what torch calls it when it chooses one.
        name: of the operation; its gradient is ``name + "_backward"``.
        rest: arguments of the gradient that are results of the forward, after the first two.
        forward, backward: other arguments of each.
        gradient: what the gradient of the result is called.
        block: sums are there for a multiple of so many queries; those of no query are infinite.
    """

    kind: SDPBackend
    name: str
    rest: tuple[str, ...] = ()
    forward: Mapping[str, Any] = field(default_factory=dict)
    backward: Mapping[str, Any] = field(default_factory=dict)
    gradient: str = "grad_out"
    block: int = 1

    def operation(self, ending: str = "") -> Any:
        """The operation, or with ``"_backward"`` its gradient."""
        return getattr(torch.ops.aten, self.name + ending).default

    def runs_on(self, kind: str) -> bool:
        """Whether torch has it for this type of device."""
        if not hasattr(torch.ops.aten, self.name):
            return False
        key = torch._C._dispatch_key_for_device(kind)
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{self.name}", key)


_LENGTHS, _RANDOM = ("cum_seq_q", "cum_seq_k", "max_q", "max_k"), ("philox_seed", "philox_offset")
_BIAS: dict[str, Any] = {"attn_bias": None}
_SUMS: dict[str, Any] = {**_BIAS, "compute_log_sumexp": True}
KERNELS = (
    Kernel(SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention", (*_LENGTHS, *_RANDOM)),
    Kernel(SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention_for_cpu"),
    Kernel(
        SDPBackend.EFFICIENT_ATTENTION,
        "_scaled_dot_product_efficient_attention",
        _RANDOM,
        _SUMS,
        {**_BIAS, "grad_input_mask": (True, True, True, False)},
        "grad_out_",
        block=32,
    ),
    Kernel(
        SDPBackend.CUDNN_ATTENTION,
        "_scaled_dot_product_cudnn_attention",
        (*_LENGTHS, *_RANDOM),
        _SUMS,
        _BIAS,
    ),
)


def check(kind: str) -> None:
    """Refuses a torch without such a ring, and a type of device without a kernel for it.

    Raises:
        SettingError: with the reason.
    """
    if not any(kernel.runs_on(kind) for kernel in KERNELS):
        why = f"torch {torch.__version__} has no attention kernel for {kind} that a ring could be made of"
    elif not _known():
        why = f"torch {torch.__version__} has no ring attention that is known here; torch 2.13 has it"
    else:
        return
    raise SettingError("cp_comm_strategy='alltoall' cannot work here", why=why, fix=OTHERS)


def _known() -> bool:
    """Whether torch has the template, with the arguments that it is given."""
    if find_spec(WHERE.rpartition(".")[0]) is None or find_spec(WHERE) is None:
        return False
    ring = import_module(WHERE)
    options = getattr(ring, "_cp_options", None)
    return hasattr(options, "enable_load_balance") and all(
        hasattr(ring, name) and tuple(inspect.signature(getattr(ring, name)).parameters)[:-1] == taken
        for name, taken in _TAKEN.items()
    )


class Ring(Exchange):
    """Keys and values go around."""

    def mask(self, mask: torch.Tensor, own: int, keys: int) -> torch.Tensor:
        """None: kernels of a ring take no masks.

        Raises:
            PrepareError: always.
        """
        raise _unfit(
            f"an attention mask, {tuple(mask.shape)}",
            "padding, windows and documents in a row need one, and its kernels take none",
        )

    def rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Masks do not come this far."""
        return mask

    def exchanged(self, call: Call) -> torch.Tensor:
        """Attention of own queries over all keys, one process's after another's.

        Raises:
            PrepareError: its kernels do not take it.
        """
        if call.dropout:
            raise _unfit(
                f"dropout_p={call.dropout}",
                "its gradient would use the random numbers of the last block only",
            )
        # Zeros behind each vector change no product of two.
        query, key, value = (_filled(_four(p), _WIDTHS, 3) for p in (call.query, call.key, call.value))
        width, scale = call.query.shape[-1], call.more.get("scale")
        job = _Job(
            self.group,
            self._kernel(query, key, value, call),
            call.causal,
            # Parts are balanced where the length allows it (see ``runs``); otherwise order is not asked for.
            call.causal and self.balanced and query.shape[_TOKENS] % 2 == 0,
            width**-0.5 if scale is None else scale,
        )
        result: Any = _Around.apply(query, key, value, job)
        return result[..., :width].reshape(call.query.shape)

    def _kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Kernel:
        """The one that torch would take for a block of these."""
        widths = {call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]}
        rows = {query.shape[0], key.shape[0], value.shape[0]}
        if len(widths) + len(rows) > 2 or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            shapes = ", ".join(str(tuple(part.shape)) for part in (call.query, call.key, call.value))
            raise _unfit(f"queries, keys and values of {shapes}", "its kernels take equal rows and widths")
        key, value = _repeated(query, key, value)
        chosen: Any = SDPBackend(torch.ops.aten._fused_sdp_choice(query, key, value, None, 0.0, call.causal))
        kind = query.device.type
        for kernel in KERNELS:
            if kernel.kind == chosen and kernel.runs_on(kind):
                return kernel
        raise _unfit(
            f"queries of {query.dtype} and width {call.query.shape[-1]} on {kind}",
            f"for these torch takes {chosen.name}, which does not tell the sums that are merged",
        )


def _unfit(what: str, why: str) -> PrepareError:
    return PrepareError(
        f"{what}, with cp_comm_strategy='alltoall'", why=f"keys go around a ring: {why}", fix=OTHERS
    )


def _four(part: torch.Tensor) -> torch.Tensor:
    """(..., heads, tokens, width) as (rows, heads, tokens, width)."""
    return part[(None,) * (4 - part.dim())] if part.dim() < 4 else part.flatten(0, -4)


def _filled(part: torch.Tensor, multiple: int, dim: int, value: float = 0.0) -> torch.Tensor:
    """With as many more of ``value`` along ``dim`` as make its length a multiple."""
    missing = -part.shape[dim] % multiple
    after = (0, 0) * (part.dim() - 1 - dim) + (0, missing)
    return torch.nn.functional.pad(part, after, value=value) if missing else part


def _repeated(query: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Heads of keys, as often as heads of queries share them."""
    times = query.shape[1] // parts[0].shape[1]
    return [part.repeat_interleave(times, 1) if times > 1 else part for part in parts]


@dataclass(frozen=True)
class _Job:
    """One attention around a ring: what forward and backward have in common."""

    group: Any
    kernel: Kernel
    causal: bool
    balanced: bool
    scale: float

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
        """The result, its logarithms of sums, and the rest that the gradient needs."""
        operation = self.kernel.operation()

        def block(query: Any, key: Any, value: Any, **more: Any) -> Any:
            result, sums, *rest = operation(query, *_repeated(query, key, value), **more)
            return result, sums[:, :, : query.shape[_TOKENS]], *rest

        found = import_module(WHERE)._templated_ring_attention(
            self.group, _TOKENS, block, query, key, value, self.causal, **self.kernel.forward, **self._more
        )
        return found[: 2 + len(self.kernel.rest)]

    def backward(self, gradient: torch.Tensor, saved: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Gradients of (queries, keys, values); ``saved`` are these, and what ``forward`` has found."""
        operation = self.kernel.operation("_backward")

        def block(query: Any, key: Any, value: Any, logsumexp: Any, **more: Any) -> Any:
            keys, values = _repeated(query, key, value)
            sums = _filled(logsumexp, self.kernel.block, _TOKENS, float("inf"))
            first, *others = operation(query=query, key=keys, value=values, logsumexp=sums, **more)[:3]
            heads = key.shape[1]
            return first, *(part.unflatten(1, (heads, -1)).sum(2) for part in others)

        query, key, value, result, sums, *rest = saved
        more = {**dict(zip(self.kernel.rest, rest, strict=True)), **self.kernel.backward, **self._more}
        return import_module(WHERE)._templated_ring_attention_backward(
            *(self.group, _TOKENS, block, gradient.contiguous(), self.kernel.gradient),
            *(query, key, value, result, sums, self.causal),
            **more,
        )[:3]

    @property
    def _more(self) -> dict[str, Any]:
        return {"dropout_p": 0.0, "scale": self.scale}


class _Around(torch.autograd.Function):
    """Attention around a ring, and its gradient, which goes around as well."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, job: _Job
    ) -> torch.Tensor:
        with _asked(job.balanced, query.dtype):
            result, sums, *rest = job.forward(query, key, value)
        tensors = [part if isinstance(part, torch.Tensor) else None for part in rest]
        ctx.save_for_backward(query, key, value, result, sums, *tensors)
        ctx.others = [None if isinstance(part, torch.Tensor) else part for part in rest]
        ctx.job = job
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # Asked once: what is computed again is there for one time only.
        saved = ctx.saved_tensors
        rest = [other if part is None else part for part, other in zip(saved[5:], ctx.others, strict=True)]
        with _asked(ctx.job.balanced, gradient.dtype):
            return *ctx.job.backward(gradient, (*saved[:5], *rest)), None


@contextmanager
def _asked(balanced: bool, dtype: torch.dtype) -> Iterator[None]:
    """Torch's options are of the process: these are for the time of one call."""
    options = import_module(WHERE)._cp_options
    set_rotate_method = import_module(WHERE).set_rotate_method
    names = ("rotate_method", "enable_load_balance", "convert_to_f32")
    before = {name: getattr(options, name) for name in names}
    set_rotate_method("alltoall")
    options.enable_load_balance, options.convert_to_f32 = balanced, dtype != torch.float64
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(options, name, value)
