"""The activations that a forward saves for its backward, traced on fake tensors.

torch's FakeTensorMode runs a model without computing anything and without memory. What autograd saves is
counted, every storage once. The tensors report that they are on the CPU; where an accelerator saves
something else, that is counted: see ``_AcceleratorActivationMode`` and ``_FusedAttention``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from accelerate.core.torch_internals import require
from accelerate.offload.module_tensors import tensor_slots

_INPUTS = ("input_ids", "decoder_input_ids")
_PREDICT_TOKENS = ("LM", "ForConditionalGeneration")  # parts of the names of classes with a loss over tokens
_SHORT = 2  # blocks of the shorter of the two forwards that a long model is extrapolated from
_LEAF = "AccumulateGrad"
_CAST = "ToCopyBackward0"


# What autocast of accelerators computes in float32, of the functions that networks are made of
# (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32").
_IN_FLOAT32: set[Callable[..., Any]] = {
    getattr(owner, name)
    for owner, names in (
        (F, "layer_norm group_norm softmax log_softmax softplus mse_loss nll_loss cross_entropy"),
        (torch, "softmax log_softmax pow exp log rsqrt sum cumsum"),
        (torch.Tensor, "softmax log_softmax pow __pow__ exp log rsqrt sum cumsum"),
    )
    for name in names.split()
}


class _AcceleratorActivationMode(TorchFunctionMode):
    """Run functions as accelerators do.

    Dropout saves a mask of one byte, attention is fused, autocast widens some inputs.
    """

    def __init__(self, narrow: torch.dtype | None) -> None:
        super().__init__()
        self.narrow = narrow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self.narrow is not None and func in _IN_FLOAT32:
            args, kwargs = tree_map_only(torch.Tensor, self._widen, (args, kwargs))
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *options: Any,
        **named_options: Any,
    ) -> Any:
        del options, named_options  # dropout by a seed, causal, scale, grouped heads: they add nothing
        if self.narrow is not None:
            query, key, value = (tensor.to(self.narrow) for tensor in (query, key, value))
        return _FusedAttention.apply(query, key, value, attn_mask)

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self.narrow else tensor


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, True)[0] if training and p else input


class _FusedAttention(torch.autograd.Function):
    """An attention that saves what fused kernels do: inputs, output, one float32 per row for the softmax.

    Shapes: (batch, heads, length, width); heads of key and value may be fewer. The output lies in memory as
    (batch, length, heads, width), so that joining the heads copies nothing. torch's kernels for the CPU do
    not serve every such call, and then the scores are kept. Source: Dao, FlashAttention-2, 2023.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        *batch, heads, length, _ = query.shape
        result = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-3, -2)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, result, logsumexp)
        return result


@dataclass(frozen=True)
class SavedActivationBytes:
    """The bytes that are saved from a forward to its backward.

    Attributes:
        activations: what autograd saves, weights left out.
        casts: copies of weights in the format of autocast.
    """

    activations: int
    casts: int


def trace_saved(
    model: nn.Module,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    attention: str = "fused",
) -> SavedActivationBytes | str:
    """Trace the forward of a transformers language model on ``batch`` x ``length`` tokens.

    Args:
        model: on the meta device; it is not usable afterwards.
        dtype: of the weights.
        autocast: the format in which matrix products are computed; None is that of the weights.
        attention: ``fused``, or ``eager``, which keeps the scores.

    Returns:
        What is saved, or why the model cannot be traced.
    """
    require("fake tensors")
    from torch._subclasses.fake_tensor import FakeTensorMode

    if getattr(model, "main_input_name", None) not in _INPUTS:
        return f"{type(model).__name__} takes no tokens"
    chosen: Any = getattr(model, "set_attn_implementation", None)
    try:
        if chosen is not None:
            chosen("sdpa" if attention == "fused" else "eager")
        with _silence_torch_log(), FakeTensorMode(allow_non_fake_inputs=True):
            _replace_with_fakes(model, dtype)
            words = torch.zeros(batch, length, dtype=torch.long)
            return _count_by_blocks(model.train(), words, autocast)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, KeyError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return f"{type(model).__name__} cannot be traced: {reason}"


@contextmanager
def _silence_torch_log() -> Generator[None]:
    """Silence torch's traceback for an operator that it cannot run on fake tensors; the error is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _replace_with_fakes(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all weights and buffers with fake tensors; tied ones stay tied."""
    fakes: dict[int, torch.Tensor] = {}
    for table, name, tensor in tensor_slots(model.modules()):
        table[name] = fakes.setdefault(id(tensor), _fake_like(tensor, dtype))


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of that shape, of ``dtype`` if it is a floating point tensor."""
    new = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _count_by_blocks(
    model: nn.Module, words: torch.Tensor, autocast: torch.dtype | None
) -> SavedActivationBytes:
    """Count what a forward saves; of many equal blocks, two short forwards tell what each adds."""
    chain = _find_equal_blocks(model)
    if chain is None:
        return _count_saved(model, words, autocast)
    parent, name, blocks = chain
    counts: list[SavedActivationBytes] = []
    for number in (_SHORT, _SHORT + 1):
        setattr(parent, name, blocks[:number])
        counts.append(_count_saved(model, words, autocast))
    setattr(parent, name, blocks)
    first, second = counts
    more = len(blocks) - _SHORT
    return SavedActivationBytes(
        first.activations + more * (second.activations - first.activations),
        first.casts + more * (second.casts - first.casts),
    )


def _find_equal_blocks(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """Return (owner, attribute, blocks) of the one long list of equal blocks; None where there is none.

    The forward must take the blocks from the list itself, so the list is the only one of its length, and no
    other module knows a block by its number.
    """
    lists = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > _SHORT + 2
    ]
    if len(lists) != 1:
        return None
    first, *others = map(_describe_block, lists[0][2])
    equal = all(_is_equal_block(first, other, number) for number, other in enumerate(others, 1))
    return lists[0] if equal else None


def _describe_block(block: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what the memory of a block's forward depends on, by module and attribute."""
    described: dict[tuple[str, str], Any] = {}
    for name, module in block.named_modules():
        described[name, ""] = type(module)
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        described |= {(name, key): (tensor.shape, tensor.dtype) for key, tensor in tensors}
        plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        described |= {(name, key): value for key, value in plain.items()}
    return described


def _is_equal_block(
    first: dict[tuple[str, str], Any], other: dict[tuple[str, str], Any], number: int
) -> bool:
    """Return True where a block is the first one again, up to attributes that hold its number."""
    return first.keys() == other.keys() and all(
        other[key] == value or (isinstance(value, int) and other[key] == value + number)
        for key, value in first.items()
    )


def _count_saved(model: nn.Module, words: torch.Tensor, autocast: torch.dtype | None) -> SavedActivationBytes:
    """Count what one forward saves. Storages are held until the end, so that no address is used twice."""
    model_storages = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in model_storages:
            storages.setdefault(storage._cdata, (storage, _is_cast(tensor)))
        return tensor

    labels = {"labels": words} if any(part in type(model).__name__ for part in _PREDICT_TOKENS) else {}
    context = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    mode = _AcceleratorActivationMode(autocast)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), context, mode:
        result: Any = model(input_ids=words, **labels)
    sizes = [(storage.nbytes(), cast) for storage, cast in storages.values()]
    del result
    return SavedActivationBytes(
        sum(size for size, cast in sizes if not cast), sum(size for size, cast in sizes if cast)
    )


def _is_cast(tensor: torch.Tensor) -> bool:
    """Return True when a tensor is a parameter in another dtype, or a view of it."""
    node: Any = tensor.grad_fn
    cast = False
    while node is not None and len(node.next_functions) == 1:
        cast = cast or node.name() == _CAST
        node = node.next_functions[0][0]
        if node is not None and node.name().endswith(_LEAF):
            return cast
    return False
