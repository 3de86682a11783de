"""Keys around a ring, in one process: its kernels, what they are given, and where there is none."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accelerate.core.errors import SettingError
from accelerate.strategy.parallelism.context import context_parallel
from accelerate.strategy.parallelism.context.attention import AttentionCall
from accelerate.strategy.parallelism.context.context_parallel import (
    KERNELS,
    TORCH_MODULE,
    AllGatherAttention,
    AttentionKernel,
    RingAttention,
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A ring of one: torch's template without its exchanges; what it was asked for, and torch's options."""
    asked: list[dict[str, Any]] = []
    module = import_module(TORCH_MODULE)

    def forward(group: Any, seq_dim: int, op: Any, q: Any, k: Any, v: Any, causal: bool, **more: Any) -> Any:
        asked.append({"group": group, "dim": seq_dim, **vars(module._cp_options)})
        found = tuple(op(q, k, v, is_causal=causal, **more))
        # Results are merged by their sums, so there is one for each query.
        assert found[1].shape[:3] == found[0].shape[:3]
        return found

    def backward(
        group: Any, dim: int, op: Any, given: Any, name: str, q: Any, k: Any, v: Any, *more: Any, **rest: Any
    ) -> Any:
        asked.append({"group": group, "dim": dim, **vars(module._cp_options)})
        out, sums, causal = more
        rest |= {name: given, "query": q, "key": k, "value": v, "out": out, "logsumexp": sums}
        return op(**rest, is_causal=causal)

    monkeypatch.setattr(module, "_templated_ring_attention", forward)
    monkeypatch.setattr(module, "_templated_ring_attention_backward", backward)
    return asked


def parts(device: str, width: int = 16) -> list[torch.Tensor]:
    """Queries of four heads, and keys and values of two."""
    torch.manual_seed(0)
    shapes = ((2, 4, 8, width), (2, 2, 8, width), (2, 2, 8, width))
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def call(*tensors: torch.Tensor, causal: bool = True, **more: Any) -> AttentionCall:
    query, key, value = tensors
    return AttentionCall(query, key, value, None, 0.0, causal, more)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name.lstrip("_"))
def test_every_kernel_takes_what_it_is_given(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch, kernel: AttentionKernel
) -> None:
    """Those of accelerators too: without data, their operations are checked by name, number and shape."""
    monkeypatch.setattr(RingAttention, "_kernel", lambda *_: kernel)
    given = parts("meta")
    result = RingAttention(2, 0, "group", True).compute_attention(call(*given))
    result.sum().backward()
    assert result.shape == given[0].shape
    assert [part.grad.shape for part in given if part.grad is not None] == [part.shape for part in given]
    assert len(alone) == 2


@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_of_one_is_torchs_attention(alone: list[Any], causal: bool, width: int) -> None:
    """Widths that kernels do not take are filled up, and do not change the scale."""
    ours, theirs = parts("cpu", width), parts("cpu", width)
    mine = RingAttention(1, 0, "group", True).compute_attention(call(*ours, causal=causal))
    key, value = (part.repeat_interleave(2, 1) for part in theirs[1:])
    wanted = F.scaled_dot_product_attention(theirs[0], key, value, is_causal=causal)
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)
    mine.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)


def test_sums_of_no_query_are_infinite(alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has sums for 32 queries at once: they are cut for the ring, and filled up for its gradient."""
    (blocks,) = (kernel for kernel in KERNELS if kernel.query_multiple > 1)
    given: dict[str, torch.Tensor] = {}

    def operation(kernel: AttentionKernel, ending: str = "") -> Any:
        def forward(q: Any, k: Any, v: Any, **more: Any) -> Any:
            return q * 1, torch.zeros(2, 4, 32), torch.zeros(()), torch.zeros(())

        def backward(**named: Any) -> Any:
            given.update(named)
            return named["query"], named["key"], named["value"], None

        return backward if ending else forward

    monkeypatch.setattr(RingAttention, "_kernel", lambda *_: blocks)
    monkeypatch.setattr(AttentionKernel, "operation", operation)
    RingAttention(1, 0, "group", True).compute_attention(call(*parts("cpu"))).sum().backward()
    sums = given["logsumexp"]
    assert (tuple(sums.shape), sums.is_contiguous()) == ((2, 4, 32), True)
    assert sums[:, :, :8].isfinite().all()
    assert sums[:, :, 8:].isposinf().all()


def test_torchs_options_are_changed_for_the_time_of_a_call(alone: list[Any]) -> None:
    options = import_module(TORCH_MODULE)._cp_options
    before = dict(vars(options))
    ring = RingAttention(2, 1, "group", True)
    q, k, v = parts("cpu")
    ring.compute_attention(call(q, k, v)).sum().backward()
    ring.compute_attention(call(*(part[:, :, :7] for part in (q, k, v))))
    ring.compute_attention(call(q, k, v, causal=False))
    ring.compute_attention(call(q.double(), k.double(), v.double()))
    told = [(one["rotate_method"].name, one["enable_load_balance"], one["convert_to_f32"]) for one in alone]
    balanced, plain = ("ALL_TO_ALL", True, True), ("ALL_TO_ALL", False, True)
    assert told == [balanced, balanced, plain, plain, ("ALL_TO_ALL", True, False)]
    assert {one["group"] for one in alone} == {"group"}
    assert {one["dim"] for one in alone} == {2}
    assert vars(options) == before
    with pytest.raises(RuntimeError):
        ring.compute_attention(call(q, k, v, scale="wrong"))
    assert vars(options) == before


def test_it_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    context_parallel.check_ring_support("cpu")
    with pytest.raises(SettingError, match="no attention kernel for mps") as caught:
        context_parallel.check_ring_support("mps")
    assert 'cp_comm_strategy="allgather"' in str(caught.value)
    taken = {**context_parallel._SIGNATURES, "_templated_ring_attention": ("mesh", "seq_dim", "op")}
    monkeypatch.setattr(context_parallel, "_SIGNATURES", taken)
    with pytest.raises(
        SettingError, match=r"no ring attention that is known here; torch 2\.10 or newer has it"
    ):
        context_parallel.check_ring_support("cpu")
    monkeypatch.setattr(
        context_parallel, "TORCH_MODULE", "torch.distributed.tensor.experimental.elsewhere.ring"
    )
    with pytest.raises(SettingError, match="no ring attention that is known here"):
        context_parallel.check_ring_support("cpu")


def test_calls_that_no_kernel_takes_are_all_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning: programs of 1.x give masks to a ring, as transformers' own test of it does."""
    monkeypatch.setattr(AllGatherAttention, "compute_attention", lambda self, call: call.query)
    context_parallel._warn_of_all_gather.cache_clear()
    ring = RingAttention(2, 0, "group", True)
    q, k, v = parts("cpu")
    with pytest.warns(UserWarning, match=r"'alltoall' has no effect.*torch.int64 of width 16 on cpu"):
        ring.compute_attention(call(q.long(), k.long(), v.long()))
    with pytest.warns(UserWarning, match="queries, keys and values of equal rows and widths"):
        ring.compute_attention(call(q, k[:1], v))
    ring.lengths = frozenset({8})
    with pytest.warns(UserWarning, match="its kernels take no attention mask"):
        ring.attend(q, k, v, torch.ones(8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring.attend(q, k, v, torch.ones(8, 16))  # said once
