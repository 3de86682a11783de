"""Lets megatron-core compute on the CPU, so that the strategy is tested for real where there is no GPU.

The engine asks torch.cuda for devices, streams, random states and type names, whatever its tensors are on.
Six patches answer for a CPU; nothing of what it computes or sends is changed. Call ``on_cpu()`` in a rank,
which is a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


class _Stream:
    """A stream that has nothing to wait for."""

    def __init__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


@functools.cache
def on_cpu() -> None:
    """Patches this process, once."""
    # It compiles small functions when it is imported, by torch's own names: imported first.
    from megatron.core.models.gpt import GPTModel

    assert GPTModel
    cuda: Any = torch.cuda
    # 1. The current device, and what would wait for it.
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize"):
        setattr(cuda, name, _nothing(name))
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _Stream)
    # 2. Tensors that are moved there.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    # 3. Tensors that are made there.
    for name in ("tensor", "zeros", "ones", "empty", "arange"):
        setattr(torch, name, _here(getattr(torch, name)))
    # 4. What tensors there are called.
    plain = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: (  # type: ignore[method-assign, assignment]
        plain(self, *a, **k) if a or k else _TYPES.get(plain(self), plain(self))
    )
    # 5. Random streams of its dropout: the program's own is used.
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None  # it sets the program's own beside it
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()  # type: ignore[method-assign]
    # 6. The device type that our strategy asks for.
    from accelerate.strategy.megatron import layout

    layout.DEVICE_TYPE = "cpu"


def dropout_streams(layout: Any) -> tuple[list[int], list[float], bool]:
    """After equal seeds: that of attention's dropout, draws of other dropout, whether a resume keeps it."""
    from megatron.core import tensor_parallel

    from accelerate.strategy.megatron import layout as rooms

    seeds: list[int] = []
    cpu = rooms.devices.get("cpu")
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", seeds.append)
        patch.setattr(rooms.devices, "get", lambda kind: cpu)
        rooms.seed_dropout(torch.device("cuda", 0), layout)
    rooms.share_rng_state(torch.device("cpu"), layout)
    state = torch.get_rng_state()
    rooms.share_rng_state(torch.device("cpu"), layout)
    is_kept = torch.equal(state, torch.get_rng_state())
    return seeds, torch.rand(3).tolist(), is_kept


def _nothing(name: str) -> Callable[..., None]:
    def done(*_: Any) -> None:
        """Nothing to wait for."""

    return done


def _here(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made
