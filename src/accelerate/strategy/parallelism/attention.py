"""Attention over sequences that several processes share: calls of torch's attention are caught and exchanged.

While a prepared model runs on a part of its sequences, every ``scaled_dot_product_attention`` below it goes
through an ``Exchange``. Models and their code stay as they are: hooks of the model's own modules switch a
torch function mode on and off, also when a block is computed again in the backward pass.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.context_cut import Run, join, runs

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class Call:
    """A call of attention, with the arguments of torch's function.

    Attributes:
        query: (..., heads, own tokens, width).
        key, value: the same of own keys.
        mask: over all keys, with the rows that this process computes (see ``Exchange.rows``).
        dropout: its probability.
        causal: whether a query sees only what is before it.
        more: the others, by name.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    more: dict[str, Any]

    def on(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """The same attention of other tensors, by this device's kernel."""
        return F.scaled_dot_product_attention(query, key, value, mask, self.dropout, causal, **self.more)


class Exchange(ABC):
    """How the processes that share sequences see each other's tokens in attention.

    Attributes:
        size, place: of the processes that share a sequence.
        group: torch's name or object for them.
        balanced: whether each has a run from the head of the sequence and one from the tail.
        lengths: this process's tokens of the sequences of the forward in progress, or of the last one;
            empty where they are whole, and attention is nobody else's business.
        documents: per row and token of the whole sequence, the number of its document; None for one.
        calls: of attention, in this forward.
    """

    def __init__(self, size: int, place: int, group: Any, balanced: bool) -> None:
        self.size, self.place, self.group, self.balanced = size, place, group, balanced
        self.lengths: frozenset[int] = frozenset()
        self.documents: torch.Tensor | None = None
        self.calls = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """Attention of this process's queries over all keys: arguments and result of torch's function.

        Args:
            query: (..., heads, own tokens, width).
            key, value: the same of own keys.
            attn_mask: over all keys, or of one row over own keys; its rows are own queries, or all, or one.

        Raises:
            PrepareError: these are not this process's parts of sequences.
        """
        self.calls += 1
        own, keys = query.shape[-2], key.shape[-2]
        if own not in self.lengths or keys not in self.lengths or (is_causal and own != keys):
            raise PrepareError(
                f"attention of {own} queries over {keys} keys, where each of {self.size} processes has "
                f"{' or '.join(map(str, sorted(self.lengths)))} tokens of a sequence",
                why="keys of other processes belong in between, and it is not known where: caches, prefixes "
                "and pooled tokens do not go with shared sequences",
                fix="leave them out, or compute whole sequences: outside of maybe_context_parallel, with "
                "batches of a loader that is not cut",
            )
        if attn_mask is not None and is_causal:
            raise PrepareError("attention with attn_mask and is_causal", fix="give one of them")
        mask = None if attn_mask is None else self.mask(attn_mask, own, keys)
        query, key, value = _autocast(query, key, value)
        return self.exchanged(Call(query, key, value, mask, dropout_p, is_causal, more))

    @abstractmethod
    def exchanged(self, call: Call) -> torch.Tensor:
        """The same with a mask that fits (see ``rows``)."""

    @abstractmethod
    def rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """A mask over all keys with the rows of those queries that this process computes."""

    def mask(self, mask: torch.Tensor, own: int, keys: int) -> torch.Tensor:
        """A mask over all keys.

        Raises:
            PrepareError: it is over own keys, and says for each query which: it cannot know of the others.
        """
        height, width = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
        if width == keys and height == 1:
            return self.whole(mask, -1)
        if width not in (1, keys * self.size) or height not in (1, own, own * self.size):
            raise PrepareError(
                f"an attention mask of {height} queries over {width} keys, where each of {self.size} "
                f"processes has {own} of {own * self.size} tokens",
                why="it says nothing of the keys of other processes",
                fix="give is_causal=True, or a mask of these queries over all keys: batch['position_ids'] "
                "has the places of the queries",
            )
        return mask if height == 1 else self.rows(mask, own)

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All parts of a tensor, in the order of the sequence, without gradients."""
        with torch.no_grad():
            parts = gather(part.contiguous(), self.size, self.group)
        return join(parts, dim, self.balanced)

    def queries(self, own: int) -> tuple[Run, ...]:
        """The tokens of a sequence whose attention this process computes, where it has ``own``."""
        return runs(own * self.size, self.size, self.place, self.balanced)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch's function casts them under autocast: before they are exchanged and compared."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    wide = torch.float64
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != wide else t for t in tensors)


def gather(tensor: torch.Tensor, size: int, group: Any) -> Sequence[torch.Tensor]:
    """The tensors of all processes of a group; gradients go back to where each came from.

    torch's functional collective, since the older ones gave wrong gradients for keys on gloo.
    """
    import torch.distributed._functional_collectives as collectives

    # The second is the name before torch 2.12.
    name = "all_gather_single_autograd"
    name = name if hasattr(collectives, name) else "all_gather_tensor_autograd"
    flat = tensor.reshape(1, *tensor.shape)
    return getattr(collectives, name)(flat, 0, group).unbind(0)


class _Caught(TorchFunctionMode):
    """Sends calls of attention to ``attend``, which takes the arguments of torch's function."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend
        # Torch asks for a mode again at the beginning of this function: a twin of it does not, and has ours.
        given = {"has_torch_function": lambda _: False, "scaled_dot_product_attention": attend}
        inner = F.multi_head_attention_forward
        self._heads: Any = FunctionType(inner.__code__, {**vars(F), **given}, None, inner.__defaults__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(**dict(zip(_NAMES, args, strict=False)) | given)
        if func is F.multi_head_attention_forward and not self._weighs(given):
            return self._heads(*args, **given)
        return func(*args, **given)

    def _weighs(self, given: dict[str, Any]) -> bool:
        """Whether it gives its weights too, and is torch's own code then."""
        return bool(given.get("need_weights", True))


class Catch(_Caught):
    """Sends calls of attention to the exchange."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.attend)

    def _weighs(self, given: dict[str, Any]) -> bool:
        """No; it is refused if it would."""
        if super()._weighs(given):
            raise PrepareError(
                "nn.MultiheadAttention with need_weights=True on shared sequences",
                why="its weights would be those of all keys for each query, and nothing else uses them",
                fix="attention(q, k, v, need_weights=False)",
            )
        return False


class Watch(_Caught):
    """Counts calls of attention of tensors without values, those inside of some modules and others.

    Masks are left out: they may be over keys of all processes, and give no shape.

    Attributes:
        inside, outside: how many there were.
    """

    def __init__(self, within: Callable[[], bool]) -> None:
        super().__init__(self._count)
        self._within = within
        self.inside = self.outside = 0

    def _count(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **more: Any
    ) -> torch.Tensor:
        within = self._within()
        self.inside += within
        self.outside += not within
        return F.scaled_dot_product_attention(query, key, value, None, *rest, **more)


class Switch:
    """Turns catching on below a model's own modules, in the thread that runs them.

    A mode lives in one thread, and blocks that are computed again run in the backward's; so every module that
    is not one of torch's own has the hooks, and the outermost of them switches.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self._mode = exchange, Catch(exchange)
        self._local = threading.local()

    def install(self, model: nn.Module) -> None:
        """Adds the hooks."""
        for module in model.modules():
            if module is model or _may_attend(module):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, always_call=True)

    @property
    def _depth(self) -> list[Catch | None]:
        if not hasattr(self._local, "depth"):
            self._local.depth = []
        return self._local.depth

    def _enter(self, module: nn.Module, args: Any) -> None:
        depth = self._depth
        mode = self._mode if not depth and self.exchange.lengths else None
        if mode is not None:
            mode.__enter__()
            ACTIVE.exchange = self.exchange
        depth.append(mode)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._depth.pop() if self._depth else None
        if mode is not None:
            ACTIVE.exchange = None
            mode.__exit__(None, None, None)


class _Active(threading.local):
    """The exchange that is on in this thread."""

    exchange: Exchange | None = None


ACTIVE = _Active()


def _may_attend(module: nn.Module) -> bool:
    kind = type(module)
    attends = isinstance(
        module, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    )
    return attends or not kind.__module__.startswith("torch.nn.modules.")


def check(model: nn.Module, what: str) -> None:
    """Refuses models that mix tokens by more than attention, or by attention that cannot be caught.

    Raises:
        PrepareError: with what was found.
    """
    for name, module in model.named_modules():
        why = _mixes(module)
        if why:
            raise PrepareError(
                f"{name or 'the model'} ({type(module).__name__}) cannot compute a part of a sequence",
                why=f"{why}; {what} exchanges tokens in attention only",
                fix="train it without cp_size and sp_size",
            )
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        _check_config(config, what)


def _mixes(module: nn.Module) -> str:
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "it goes through tokens one after another"
    if isinstance(module, nn.Conv1d) and any(size > 1 for size in module.kernel_size):
        return "it mixes neighbouring tokens"
    return ""


def _check_config(config: Any, what: str) -> None:
    found = getattr(config, "_attn_implementation", None)
    if found not in (None, "sdpa"):
        raise PrepareError(
            f"attn_implementation={found!r} does not go with {what}",
            why="torch's scaled_dot_product_attention can be exchanged between processes, and nothing else",
            fix='from_pretrained(..., attn_implementation="sdpa"), or model.set_attn_implementation("sdpa")',
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if others or getattr(config, "is_encoder_decoder", False):
        kind = f"layers of type {', '.join(others)}" if others else "an encoder and a decoder"
        raise PrepareError(
            f"a model with {kind} does not go with {what}",
            why="only attention of a sequence to itself is exchanged between processes",
            fix="train it without cp_size and sp_size",
        )
