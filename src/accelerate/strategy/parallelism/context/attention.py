"""Attention over sharded sequences: calls of torch's attention are intercepted and distributed.

While a prepared model runs on sequence shards, every ``scaled_dot_product_attention`` below it goes through
a ``SequenceShardedAttention``. Models and their code stay as they are: hooks of the model's own modules
switch a torch function mode on and off, also when a block is computed again in the backward pass.

Models of transformers make a mask from the tokens they get, which are a shard here. So they get the padding
mask of the full sequences, and the library's mask function, which is looked up by name, is called for this
process's rows over all keys.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.context.sequence_shards import TokenRange, join_shards, token_ranges

_EXCHANGES = "accelerate_exchanges_tokens"  # the mark of a node of autograd
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of torch's attention function.

    Attributes:
        query: (..., heads, own tokens, width).
        key, value: the same of own keys.
        mask: over all keys, with the rows that this process computes (see ``select_mask_rows``).
        dropout: its probability.
        causal: whether a query sees only what is before it.
        extra_kwargs: the others, by name.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    extra_kwargs: dict[str, Any]

    def run_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Compute this attention of other tensors, by this device's kernel."""
        return F.scaled_dot_product_attention(
            query, key, value, mask, self.dropout, causal, **self.extra_kwargs
        )


class SequenceShardedAttention(ABC):
    """Attention in which processes that shard sequences see each other's tokens.

    Attributes:
        size, rank: of the processes that shard a sequence.
        group: torch's name or object for them.
        balanced: whether each has a run from the head of the sequence and one from the tail.
        lengths: this process's tokens of the sequences of the forward in progress, or of the last one;
            empty where they are whole, and attention is nobody else's business.
        documents: per row and token of the whole sequence, the number of its document; None for one.
        backward_state: ``lengths`` and ``documents`` of the forward whose backward began last; None once
            another forward has begun.
        calls: of attention, in this forward.
    """

    def __init__(self, size: int, rank: int, group: Any, balanced: bool) -> None:
        self.size, self.rank, self.group, self.balanced = size, rank, group, balanced
        self.lengths: frozenset[int] = frozenset()
        self.documents: torch.Tensor | None = None
        self.backward_state: tuple[frozenset[int], torch.Tensor | None] | None = None
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
        """Compute attention of local queries over all keys, with arguments and result of torch's function.

        Args:
            query: (..., heads, own tokens, width).
            key, value: the same of own keys.
            attn_mask: over all keys, or of one row over own keys; its rows are own queries, or all, or one.

        Raises:
            PrepareError: these are not this process's parts of sequences.
        """
        self.calls += 1
        queries, keys = query.shape[-2], key.shape[-2]
        if queries not in self.lengths or keys not in self.lengths or (is_causal and queries != keys):
            raise PrepareError(
                f"attention of {queries} queries over {keys} keys, where each of {self.size} processes has "
                f"{' or '.join(map(str, sorted(self.lengths)))} tokens of a sequence",
                why="keys of other processes belong in between, and it is not known where: caches, prefixes "
                "and pooled tokens do not go with shared sequences",
                fix="leave them out, or compute whole sequences: outside of maybe_context_parallel, with "
                "batches of a loader that is not cut",
            )
        if attn_mask is not None and is_causal:
            raise PrepareError("attention with attn_mask and is_causal", fix="give one of them")
        mask = None if attn_mask is None else self.globalize_mask(attn_mask, queries, keys)
        query, key, value = _cast_for_autocast(query, key, value)
        result = self.compute_attention(AttentionCall(query, key, value, mask, dropout_p, is_causal, more))
        if not torch.compiler.is_compiling() and result.grad_fn is not None:
            metadata: Any = result.grad_fn.metadata  # a property, which torch's stub has as a method
            metadata[_EXCHANGES] = True
        return result

    @abstractmethod
    def compute_attention(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention; the mask has the rows of ``select_mask_rows``."""

    @abstractmethod
    def select_mask_rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Select the rows of a mask over all keys of the queries that this process computes."""

    def globalize_mask(self, mask: torch.Tensor, own: int, keys: int) -> torch.Tensor:
        """Return a mask over all keys.

        Raises:
            PrepareError: it is over own keys, and says for each query which: it cannot know of the others.
        """
        height, width = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
        if width == keys and height == 1:
            return self.gather_sequence(mask, -1)
        if width not in (1, keys * self.size) or height not in (1, own, own * self.size):
            raise PrepareError(
                f"an attention mask of {height} queries over {width} keys, where each of {self.size} "
                f"processes has {own} of {own * self.size} tokens",
                why="it says nothing of the keys of other processes",
                fix="give is_causal=True, or a mask of these queries over all keys: batch['position_ids'] "
                "has the places of the queries",
            )
        return mask if height == 1 else self.select_mask_rows(mask, own)

    def gather_sequence(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All-gather a tensor in sequence order, without gradients."""
        with torch.no_grad():
            parts = all_gather_with_grad(part.contiguous(), self.size, self.group)
        return join_shards(parts, dim, self.balanced)

    def query_ranges(self, own: int) -> tuple[TokenRange, ...]:
        """Return the token ranges whose attention this process computes, where it has ``own`` tokens."""
        return token_ranges(own * self.size, self.size, self.rank, self.balanced)


def nodes_of_own_loss(loss: torch.Tensor) -> list[Any]:
    """Return the nodes of autograd that no gradient of other processes passes: those after all attention.

    None without a marked node, as in a compiled model. A block that is computed again may have attention.
    """

    def reach(roots: list[Any]) -> dict[Any, None]:
        nodes, waiting = dict[Any, None](), list(roots)
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes[node] = None
                waiting += [before for before, _ in node.next_functions]
        return nodes

    nodes = reach([loss.grad_fn])
    exchanging = [n for n in nodes if _EXCHANGES in n.metadata or n.name().startswith("CheckpointFunction")]
    shared = reach(exchanging)
    return [node for node in nodes if node not in shared] if exchanging else []


def _cast_for_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors as torch's attention does under autocast, before they are exchanged."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    wide = torch.float64
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != wide else t for t in tensors)


def all_gather_with_grad(tensor: torch.Tensor, size: int, group: Any) -> Sequence[torch.Tensor]:
    """All-gather a tensor over a group; gradients are reduced to where each came from.

    torch's functional collective, since the older ones gave wrong gradients for keys on gloo.
    """
    import torch.distributed._functional_collectives as collectives

    # The second is the name before torch 2.12.
    name = "all_gather_single_autograd"
    name = name if hasattr(collectives, name) else "all_gather_tensor_autograd"
    flat = tensor.reshape(1, *tensor.shape)
    return getattr(collectives, name)(flat, 0, group).unbind(0)


class _AttentionTorchFunctionMode(TorchFunctionMode):
    """A torch function mode that sends attention calls to ``attend``."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend
        # Torch asks for a mode again at the beginning of this function: a twin of it does not, and has ours.
        overrides = {"has_torch_function": lambda _: False, "scaled_dot_product_attention": attend}
        inner = F.multi_head_attention_forward
        self._multi_head_attention: Any = FunctionType(
            inner.__code__, {**vars(F), **overrides}, None, inner.__defaults__
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(**dict(zip(_NAMES, args, strict=False)) | options)
        if func is F.multi_head_attention_forward and not self._returns_weights(options):
            return self._multi_head_attention(*args, **options)
        return func(*args, **options)

    def _returns_weights(self, given: dict[str, Any]) -> bool:
        """Return whether attention weights are requested too; torch's own code runs then."""
        return bool(given.get("need_weights", True))


class AttentionInterceptor(_AttentionTorchFunctionMode):
    """A torch function mode that sends attention calls to a ``SequenceShardedAttention``."""

    def __init__(self, attention: SequenceShardedAttention) -> None:
        super().__init__(attention.attend)

    def _returns_weights(self, given: dict[str, Any]) -> bool:
        """Return False; refuse calls that request weights."""
        if super()._returns_weights(given):
            raise PrepareError(
                "nn.MultiheadAttention with need_weights=True on shared sequences",
                why="its weights would be those of all keys for each query, and nothing else uses them",
                fix="attention(q, k, v, need_weights=False)",
            )
        return False


class AttentionCallCounter(_AttentionTorchFunctionMode):
    """Counts attention calls on fake tensors, inside of stage modules and outside.

    Masks are left out: they may be over keys of all processes, and give no shape.

    Attributes:
        inside_calls, outside_calls: how many there were.
    """

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        super().__init__(self._count)
        self._is_inside = is_inside
        self.inside_calls = self.outside_calls = 0

    def _count(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **more: Any
    ) -> torch.Tensor:
        inside = self._is_inside()
        self.inside_calls += inside
        self.outside_calls += not inside
        return F.scaled_dot_product_attention(query, key, value, None, *rest, **more)


class AttentionFunctionModeHooks:
    """Module hooks that turn interception on, in the thread that runs the modules.

    A mode lives in one thread, and blocks that are computed again run in the backward's; so every module that
    is not one of torch's own has the hooks, and the outermost of them switches. A block that is computed
    again is in the state of its own forward, which need not be the last one.
    """

    def __init__(self, attention: SequenceShardedAttention) -> None:
        self.attention, self._mode = attention, AttentionInterceptor(attention)
        self._local = threading.local()

    def install(self, model: nn.Module) -> None:
        """Add the hooks."""
        for module in model.modules():
            if module is model or _may_attend(module):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, always_call=True)

    @property
    def _mode_stack(self) -> list[tuple[AttentionInterceptor | None, Any]]:
        if not hasattr(self._local, "depth"):
            self._local.depth = []
        return self._local.depth

    def _enter(self, module: nn.Module, args: Any) -> None:
        attention, depth = self.attention, self._mode_stack
        last_state = attention.lengths, attention.documents
        if not depth and attention.backward_state is not None:
            attention.lengths, attention.documents = attention.backward_state
        mode = self._mode if not depth and attention.lengths else None
        if mode is not None:
            mode.__enter__()
            ACTIVE.attention = attention
        depth.append((mode, last_state))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._mode_stack:
            return
        mode, last_state = self._mode_stack.pop()
        if mode is not None:
            ACTIVE.attention = None
            mode.__exit__(None, None, None)
        self.attention.lengths, self.attention.documents = last_state


class _ActiveAttention(threading.local):
    """The distributed attention that is active in this thread."""

    attention: SequenceShardedAttention | None = None


ACTIVE = _ActiveAttention()


def _may_attend(module: nn.Module) -> bool:
    kind = type(module)
    attends = isinstance(
        module, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    )
    return attends or not kind.__module__.startswith("torch.nn.modules.")


def is_flash(implementation: Any) -> bool:
    """Return whether a name of transformers is one of flash attention, also of a kernel from the hub."""
    name = str(implementation)
    return name in ("flash_attention_2", "flash_attention_3") or "flash-attn" in name


def replace_flash_attention(model: nn.Module, what: str) -> bool:
    """Let the models of transformers inside ``model`` compute flash attention by torch's function.

    Returns:
        Whether there are any.

    Raises:
        PrepareError: it would give other numbers, or the library cannot.
    """
    is_replaced = False
    for module in model.modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if not is_flash(implementation):
            continue
        # torch's function caps no scores: the library would leave that out without a word.
        set_implementation: Any = getattr(module, "set_attn_implementation", None)
        if set_implementation is not None and getattr(config, "attn_logit_softcapping", None) is None:
            set_implementation("sdpa")
        _check_config(config, what)
        is_replaced = True
        warnings.warn(
            f"{what} computes attn_implementation={implementation!r} by torch's scaled_dot_product_attention "
            "(sdpa), which gives the same numbers but for rounding",
            stacklevel=2,
        )
    return is_replaced


def check_model(model: nn.Module, what: str, mesh: Any, *, accepts_flash: bool = False) -> bool:
    """Refuse models that mix tokens by more than attention, or by attention that cannot be intercepted.

    Args:
        model: the model.
        what: the kind of parallelism, for messages.
        mesh: that of the processes that share sequences. A module that keeps it or its group as an attribute
            exchanges tokens itself, with all that it has.
        accepts_flash: ``replace_flash_attention`` follows.

    Returns:
        Whether there is such a module.

    Raises:
        PrepareError: with the module and the reason.
    """
    ranks, exchanging = _group_ranks(mesh), list[str]()
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(outer) for outer in exchanging):
            continue
        if any(_group_ranks(value) == ranks for value in vars(module).values()):
            exchanging.append(f"{name}." if name else "")
            continue
        reason = ""
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            reason = "it goes through tokens one after another"
        elif isinstance(module, nn.Conv1d) and any(size > 1 for size in module.kernel_size):
            reason = "it mixes neighbouring tokens"
        if reason:
            mesh_name = mesh.mesh_dim_names[0]
            raise PrepareError(
                f"{name or 'the model'} ({type(module).__name__}) cannot compute a part of a sequence",
                why=f"{reason}; {what} exchanges tokens in attention only",
                fix="train it without cp_size and sp_size; a layer that exchanges tokens itself keeps the "
                f'mesh of these processes: self.mesh = accelerator.torch_device_mesh["{mesh_name}"]',
            )
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        _check_config(config, what, bool(exchanging), accepts_flash)
    return bool(exchanging)


def _group_ranks(value: Any) -> list[int] | None:
    """Return the ranks of a mesh of one dimension or of a process group; None for other objects."""
    if isinstance(value, DeviceMesh) and value.ndim == 1:
        value = value.get_group()
    return dist.get_process_group_ranks(value) if isinstance(value, dist.ProcessGroup) else None


def _check_config(config: Any, what: str, has_own_layers: bool = False, accepts_flash: bool = False) -> None:
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in (None, "sdpa") and not (accepts_flash and is_flash(implementation)):
        raise PrepareError(
            f"attn_implementation={implementation!r} does not go with {what}",
            why="torch's scaled_dot_product_attention can be exchanged between processes, and nothing else",
            fix='from_pretrained(..., attn_implementation="sdpa"), or model.set_attn_implementation("sdpa")',
        )
    kinds = set() if has_own_layers else set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"attention", "full_attention", "sliding_attention", "chunked_attention"})
    if others or getattr(config, "is_encoder_decoder", False):
        kind = f"layers of type {', '.join(others)}" if others else "an encoder and a decoder"
        raise PrepareError(
            f"a model with {kind} does not go with {what}",
            why="only attention of a sequence to itself is exchanged between processes",
            fix="train it without cp_size and sp_size",
        )


def predicts_next_token(module: nn.Module) -> bool:
    """Return whether a model of transformers shifts the ``labels`` that it gets by itself."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not hasattr(module, "loss_type"):
        return False
    # A model without a loss type has the causal one; a few shift by hand.
    uses_loss_function = "loss_function" in code.co_names
    loss_name = getattr(getattr(module, "loss_function", None), "__name__", "") if uses_loss_function else ""
    return loss_name == "ForCausalLMLoss" or "shift_logits" in code.co_varnames


# --- attention masks of transformers' models

_registered_ids: set[int] = set()


def uses_library_masks(model: nn.Module) -> bool:
    """Return whether a module of ``model`` gets its masks from transformers."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(hasattr(config, "_attn_implementation") for config in configs)


def accepts_positions(model: nn.Module) -> bool:
    """Return whether its forward accepts ``position_ids``."""
    names = inspect.signature(model.forward).parameters
    open_ended = any(name.kind is name.VAR_KEYWORD for name in names.values())
    return "position_ids" in names or (open_ended and uses_library_masks(model))


def register_mask_function() -> None:
    """Wrap the library's mask function; outside of sharded forwards the original is called."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if id(original) in _registered_ids:
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        attention = ACTIVE.attention
        return (
            original(*args, **kwargs) if attention is None else _local_mask_rows(attention, original, kwargs)
        )

    _registered_ids.add(id(mask))
    AttentionMaskInterface.register("sdpa", mask)


def _local_mask_rows(
    attention: SequenceShardedAttention, original: Any, given: dict[str, Any]
) -> torch.Tensor | None:
    """Return this process's mask rows over all keys; None where ``is_causal`` or no mask is equivalent."""
    # Version 4 of the library gives the places of queries, version 5 how many there are.
    places = None if "q_length" in given else given["cache_position"]
    local_length = given["q_length"] if places is None else len(places)
    total = local_length * attention.size
    options = {**given, "kv_length": total, "kv_offset": 0}

    def rows(start: int, stop: int) -> Any:
        if places is None:
            return original(**{**options, "q_length": stop - start, "q_offset": start})
        return original(**{**options, "cache_position": torch.arange(start, stop, device=places.device)})

    documents = attention.documents
    if documents is None:
        # One row tells whether the library would leave the mask out. It never calls a single query causal.
        if local_length > 1 and rows(0, 1) is None:
            return None
    else:
        inner = given["mask_function"]

        def mask_function(row: Any, head: Any, query: Any, key: Any) -> Any:
            return inner(row, head, query, key) & (documents[row, query] == documents[row, key])

        options["mask_function"] = mask_function
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    parts = [rows(start, stop) for start, stop in attention.query_ranges(local_length)]
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


def add_mask_kwargs(
    attention: SequenceShardedAttention, own: int, kwargs: dict[str, Any], cached: bool
) -> dict[str, Any]:
    """Return the arguments of a forward with the full padding mask, and set ``attention.documents``.

    The library takes tokens whose positions do not follow each other for several documents in a row, unless
    there is a mask; a run from the tail looks like one. So there is always a mask.

    Args:
        own: the number of local tokens.
        kwargs: keyword arguments of the model.
        cached: the model uses a KV cache; then the library knows one document only.

    Raises:
        PrepareError: several documents are told by ``cu_seq_lens_q`` alone.
    """
    mask, positions, total = kwargs.get("attention_mask"), kwargs.get("position_ids"), own * attention.size
    attention.documents = None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] == own:
        mask = attention.gather_sequence(mask, 1)
    if mask is None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return kwargs
        if isinstance(positions, torch.Tensor) and positions.dim() == 2 and not cached:
            attention.documents = document_ids(
                attention.gather_sequence(positions.expand(tokens.shape[0], -1), 1)
            )
        mask = torch.ones(tokens.shape[0], total, dtype=torch.bool, device=tokens.device)
    cumulative = kwargs.get("cu_seq_lens_q")
    if cumulative is not None and len(cumulative) > 2 and attention.documents is None:
        raise PrepareError(
            "cu_seq_lens_q names several documents, and position_ids one",
            why="torch's scaled_dot_product_attention does not read cu_seq_lens_q",
            fix="give position_ids that begin at 0 in each document, use_cache=False and no attention_mask",
        )
    return {**kwargs, "attention_mask": mask}


def document_ids(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the document number of each token from full rows of positions; None where each row is one."""
    begins = positions.diff(dim=1) != 1
    if not bool(begins.any()):
        return None
    return nn.functional.pad(begins.cumsum(1), (1, 0))
