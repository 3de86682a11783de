"""The base class of the dimensions that shard sequences: context parallel and Ulysses.

A forward is on parts, or on whole sequences, which every process then computes by itself. Which of the two is
never guessed: inside ``maybe_context_parallel`` its buffers are parts; the tensors that a cutting loader gave
are known one by one; anything else is whole, or refused where that could be a mistake.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core import tree
from accelerate.core.errors import PrepareError, SettingError
from accelerate.core.torch_internals import require
from accelerate.strategy.base import PrepareBundle, PrepareStep
from accelerate.strategy.parallelism.context.attention import (
    AttentionCallCounter,
    AttentionFunctionModeHooks,
    SequenceShardedAttention,
    accepts_positions,
    add_mask_kwargs,
    check_model,
    nodes_of_own_loss,
    predicts_next_token,
    register_mask_function,
    replace_flash_attention,
    uses_library_masks,
)
from accelerate.strategy.parallelism.context.output_comparison import (
    check_equal,
    has_fixed_numbers,
    has_numbers,
)
from accelerate.strategy.parallelism.context.sequence_shards import (
    MASK,
    TOKENS,
    SequenceSharder,
    expand_positions,
    join_shards,
)
from accelerate.strategy.parallelism.strategy import MeshDimension

require("collectives with gradients")


class SequenceParallelMeshDimension(MeshDimension):
    """A mesh dimension whose processes shard sequences.

    Attributes:
        title: its name in messages.
        balanced: whether shards are balanced for causal attention.
        replaces_flash: whether models with flash attention are taken, and compute it by torch's function.
        _flash_models: those whose flash attention was replaced: it tells documents apart with a KV cache too.
        is_left: the program shards the sequences, and this dimension only has its place in the mesh.
    """

    title: ClassVar[str]
    balanced: bool
    replaces_flash: ClassVar[bool] = False

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.size, self.rank = self.mesh[self.name].size(), self.mesh.get_local_rank(self.name)
        self.group = self.mesh.get_group(self.name)
        self.attention = self.attention_class(self.size, self.rank, self.group, self.balanced)
        self._hooks = AttentionFunctionModeHooks(self.attention)
        self._option: bool | Mapping[str, int] | None = getattr(self.handler, "cut", None)
        dims = self._option if isinstance(self._option, Mapping) else None
        self.sharder = SequenceSharder(self.size, self.rank, self.balanced, dims)
        # The models, and their original class names: FSDP2 gives them others.
        self._models: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._flash_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._sharded_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # Whether stages of a pipelined model have attention; True where layers exchange tokens themselves.
        self._has_attention: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._shard_refusals: weakref.WeakKeyDictionary[nn.Module, PrepareError] = weakref.WeakKeyDictionary()
        # The tensors that are sequence shards, with their sequence dimension.
        self._shards: Any = WeakIdKeyDictionary()
        self._positions: Any = WeakIdKeyDictionary()
        # Shards of labels, with those of the same labels shifted.
        self._shift_labels: Any = WeakIdKeyDictionary()
        # Those of loaders whose batches stay whole, and whether they are of sequences.
        self._whole_tensors: Any = WeakIdKeyDictionary()
        # Lengths of the shards that loaders gave, and of those inside the context; None outside of one.
        self._shard_lengths: set[int] = set()
        self._active_lengths: frozenset[int] | None = None
        self._warned = self._zero_gradients = self._has_run = self.is_left = False

    @property
    def handler(self) -> Any:
        """The options of this dimension."""
        return getattr(self.config, f"{self.name}_handler")

    @property
    def attention_class(self) -> type[SequenceShardedAttention]:
        """The attention class of this dimension."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse pipeline schedules that compute the loss per micro-batch.

        Raises:
            SettingError: the schedule has them.
        """
        schedule = self.config.pp_handler.schedule if self.config.pp_handler is not None else "gpipe"
        if self.config.pp_enabled and schedule != "gpipe":
            raise SettingError(
                f"schedule={schedule!r} does not go with {self.name}_size={self.size}",
                why="with it a gradient is computed before it is known whether the shards of sequences in a "
                "chunk have a label at all",
                fix="schedule='gpipe', which takes the loss over the whole batch",
            )

    # --- prepare

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Intercept attention of the models, and shard the batches of loaders prepared with one."""
        if self.is_left:
            return
        models = self._new_models(bundle)
        for model in models:
            self._check_layers(model)
        if models:
            reason = f"{self.size} processes share each sequence, and exchange what attention needs"
            yield PrepareStep(self.name, reason, self._install)
        if bundle.objects_of("model") and bundle.objects_of("loader") and self._option is None:
            reason = f"each process gets its part, 1/{self.size}, of every sequence"
            yield PrepareStep(
                "sequences", reason, lambda b: self._sharded_loaders.update(b.objects_of("loader"))
            )

    def _check_layers(self, model: nn.Module) -> None:
        try:
            if check_model(model, self.title, self.mesh[self.name], accepts_flash=self.replaces_flash):
                self._has_attention[model] = True
        except PrepareError as error:
            # Where loaders give whole sequences, the program may never have this model compute parts.
            if self._option is not False:
                raise
            self._shard_refusals[model] = copy(error)  # without its traceback, which would keep the model

    def _new_models(self, bundle: PrepareBundle) -> list[nn.Module]:
        """Return the user's modules without hooks; what wraps one may be prepared again."""
        modules = dict.fromkeys(self.strategy.unwrap(model) for model in bundle.objects_of("model"))
        return [module for module in modules if module not in self._models]

    def _install(self, bundle: PrepareBundle) -> None:
        for model in self._new_models(bundle):
            if self.replaces_flash and replace_flash_attention(model, self.title):
                self._flash_models.add(model)
            self._models[model] = type(model).__name__
            model.register_forward_pre_hook(self._pre_forward, with_kwargs=True)
            self._hooks.install(model)
            for module in model.modules():
                if predicts_next_token(module):
                    hook = partial(self._add_shift_labels, type(module).__name__)
                    module.register_forward_pre_hook(hook, with_kwargs=True)
            model.register_forward_hook(self._post_forward)
            if uses_library_masks(model):
                register_mask_function()

    # --- batches

    def shards_loader(self, loader: Any) -> bool:
        """Return whether the batches of ``loader``, as the user gave it, are sharded."""
        if self.is_left:
            return False
        return loader in self._sharded_loaders if self._option is None else self._option is not False

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any]:
        """Return the function that shards batches of ``loader``, or notes that they stay whole."""
        return self.slice_batch if self.shards_loader(loader) else self._keep_whole

    def _keep_whole(self, batch: Any) -> Any:
        has_tokens = self.sharder.has_tokens(batch)
        for _, leaf in tree.iterate_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self._whole_tensors[leaf] = has_tokens
        return batch

    def slice_batch(self, batch: Any) -> Any:
        """Return this process's shard of a batch of full sequences.

        Raises:
            PrepareError: it has no tokens by a known name, although cutting was asked for.
        """
        if not self.sharder.has_tokens(batch):
            if self._option is None:
                return batch
            keys = f" with {', '.join(map(str, batch))}" if tree.is_mapping(batch) else ""
            raise PrepareError(
                f"a batch, a {type(batch).__name__}{keys}, has no tokens to shard by {self.title}",
                why="cut= asks for it, and a batch is cut by its keys",
                fix='give dicts with "input_ids", or name the keys and the dimensions of their tokens: '
                'cut={"tokens": 1}',
            )
        parts = self.sharder(batch)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and part is not batch.get(name) and name != MASK:
                dim = (self.sharder.dims or {}).get(name, self.sharder.token_dim)
                self._shards[part] = dim
                if name == "position_ids":
                    self._positions[part] = True
                self._shard_lengths.add(part.shape[dim])
        if isinstance(parts.get("labels"), torch.Tensor) and "shift_labels" in parts:
            self._shift_labels[parts["labels"]] = parts["shift_labels"]
        return parts

    @contextmanager
    def trace_context(self, model: nn.Module, inside: Callable[[], bool]) -> Iterator[None]:
        """Count attention calls in a traced forward: a stage may have none; outside of stages it is refused.

        Raises:
            PrepareError: attention is called between the stages.
        """
        if model not in self._models:
            yield
            return
        with AttentionCallCounter(inside) as counter:
            yield
        self._has_attention[model] = counter.inside_calls > 0
        if counter.outside_calls:
            raise PrepareError(
                f"{self._models[model]} calls attention between the modules that are split into stages",
                why=f"every stage runs that code, also over whole batches, and {self.title} exchanges tokens "
                "in the attention of modules only",
                fix="call attention in a module of its own, or set pp_size=1",
            )

    @contextmanager
    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> Iterator[None]:
        """Shard full sequences inside the context; shards stay as they are."""
        if self.is_left:
            yield
            return
        if len(buffers) != len(dims):
            raise PrepareError(
                f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims",
                fix="give the dimension of the tokens for each buffer",
            )
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        lengths: set[int] = set()
        # All are sharded before any is changed: an error leaves them full.
        shards = [
            (b, b.detach() if b in self._shards else self.sharder.local_shard(b.detach(), d))
            for b, d in zip(buffers, dims, strict=True)
        ]
        for (buffer, part), dim in zip(shards, dims, strict=True):
            lengths.add(part.shape[dim])
            if buffer in self._shards:
                continue
            if any(buffer is other for other in kept):
                self._shards[buffer] = dim
            else:
                whole.append((buffer, buffer.detach()))
            buffer.data = part
        before, self._active_lengths = self._active_lengths, frozenset(lengths)
        try:
            yield
        finally:
            self._active_lengths = before
            for buffer, tokens in whole:
                buffer.data = tokens

    # --- the model

    def _pre_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Decide whether the forward is on shards, and add positions and masks of full sequences."""
        tensors = [leaf for _, leaf in tree.iterate_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        attention, self._has_run = self.attention, True
        attention.lengths = self._sequence_lengths(model, tensors)
        attention.documents, attention.backward_state, attention.calls = None, None, 0
        if not attention.lengths:
            return None
        names = inspect.signature(model.forward).parameters
        if not accepts_positions(model):
            self._check_positions(model, tensors)
            return None
        fixed = [name for name, kind in names.items() if kind.kind is kind.POSITIONAL_OR_KEYWORD]
        named = dict(zip(fixed, args, strict=False)) | kwargs
        tokens = next(
            (named[name] for name in TOKENS if named.get(name) is not None), args[0] if args else None
        )
        if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            return None
        if named.get("position_ids") is None:
            # Those of the shard's tokens in their sequences.
            dim = self.sharder.token_dim
            positions = torch.arange(tokens.shape[dim] * self.size, device=tokens.device)
            positions = self.sharder.local_shard(positions, 0)
            named["position_ids"] = expand_positions(positions, tokens.shape[1 - dim], dim)
        if uses_library_masks(model):
            cached = named.get("use_cache")
            cached = getattr(model.config, "use_cache", False) if cached is None else cached
            caches = bool(cached) and model not in self._flash_models
            named = add_mask_kwargs(attention, tokens.shape[1], named, caches)
        return args[len(fixed) :], named

    def _add_shift_labels(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Add the shifted labels of a shard: shifted inside of it, its runs would end with wrong ones.

        Raises:
            PrepareError: the labels are no known shard, or the model takes no shifted ones.
        """
        if not self.attention.lengths:
            return None
        names = inspect.signature(module.forward).parameters
        named = dict(zip(names, args, strict=False)) | kwargs
        labels = named.get("labels")
        if labels is None or named.get("shift_labels") is not None:
            return None
        shifted = self._shift_labels.get(labels)
        takes = "shift_labels" in names or any(kind.kind is kind.VAR_KEYWORD for kind in names.values())
        if shifted is None or not takes:
            raise self._unshifted_labels(name)
        return args, {**kwargs, "shift_labels": shifted}

    def _unshifted_labels(self, name: str) -> PrepareError:
        return PrepareError(
            f"{name} got labels, and no shift_labels",
            why=f"it has a part of each sequence ({self.title}), and the next token may be in another",
            fix="give it batch['shift_labels'] too, or compute the loss from its logits and those; in "
            "maybe_context_parallel, labels that were shifted before it are one of its buffers",
        )

    def _check_positions(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a model that gets no positions: it would count from 0 in every shard.

        Raises:
            PrepareError: a loader shards sequences, and the model got no positions.
        """
        if self._active_lengths is None and not any(tensor in self._positions for tensor in tensors):
            raise PrepareError(
                f"{self._models[model]} does not get the positions of its tokens",
                why=f"it has a part of each sequence ({self.title}), and would count from 0 in every part",
                fix="give it batch['position_ids'], and let it look its positions up there; a model without "
                "positions may take the argument and leave it",
            )

    def _sequence_lengths(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the lengths of the shards in this forward; empty where sequences are full.

        Raises:
            PrepareError: the model cannot compute shards, or is given what should be one.
        """
        parts = {tensor.shape[self._shards[tensor]] for tensor in tensors if tensor in self._shards}
        lengths = frozenset(parts) or self._active_lengths
        if lengths and (refusal := self._shard_refusals.get(model)):
            raise copy(refusal)
        if lengths is not None:
            return lengths
        if self._shard_lengths and (model.training or not any(t in self._whole_tensors for t in tensors)):
            self._check_unsharded(model, tensors)
        elif self.name == "cp" and model.training and torch.is_grad_enabled():
            self._check_whole(model, tensors)
        return frozenset()

    def _check_whole(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse to train on whole sequences that nothing will shard; warn where they may be none.

        Raises:
            PrepareError: the model takes tokens, or the tensors are those of a loader's sequences.
        """
        why = f"under {self.title} all {self.size} processes would compute all tokens of the same sequences"
        fix = (
            "put `with accelerator.maybe_context_parallel(buffers=[...], buffer_seq_dims=[...]):` around "
            "forward and backward, or let loaders shard: TorchContextParallelConfig(cut=True); for whole "
            "sequences the same with no buffers"
        )
        is_tokens = any(name in TOKENS for name in inspect.signature(model.forward).parameters)
        if is_tokens or any(self._whole_tensors.get(tensor) for tensor in tensors):
            raise PrepareError(f"{self._models[model]} trains on whole sequences", why=why, fix=fix)
        if not self._warned:
            self._warned = True
            warnings.warn(f"{why}: {fix}", stacklevel=2)

    def _check_unsharded(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that are no known shards, where loaders give shards.

        Raises:
            PrepareError: they could be copies of shards.
        """
        views = [tensor for tensor in tensors if tensor._base is not None and tensor._base in self._shards]
        dim = self.sharder.token_dim
        alike = [
            tensor for tensor in tensors if tensor.dim() > 1 and tensor.shape[dim] in self._shard_lengths
        ]
        if views or alike or model.training:
            shown = ", ".join(str(tuple(tensor.shape)) for tensor in views or alike or tensors)
            raise PrepareError(
                f"{self._models[model]} got tensors that are none of a prepared loader's: {shown}",
                why=f"loaders give this process its part of each sequence ({self.title}), and a copy or a "
                "slice of one is taken for a whole",
                fix="give the model the batch's own tensors (its labels are shifted already: shift_labels); "
                "for whole sequences put `with accelerator.maybe_context_parallel():` around the call",
            )

    @contextmanager
    def call_context(self, model: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Take micro-batches for what the batch is, shards or whole sequences.

        Raises:
            PrepareError: wrong arguments of the call, or a model in which tracing saw no attention.
        """
        if model not in self._models:
            yield
            return
        tensors = [leaf for _, leaf in tree.iterate_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        lengths = self._sequence_lengths(model, tensors)
        if lengths and not accepts_positions(model):
            self._check_positions(model, tensors)
        if lengths and not self._has_attention[model]:
            raise self._no_attention(model)
        # Stages get labels in chunks: all of them refuse here, and none waits for another.
        unshifted = kwargs.get("labels") is not None and kwargs.get("shift_labels") is None
        if lengths and unshifted and any(predicts_next_token(module) for module in model.modules()):
            raise self._unshifted_labels(self._models[model])
        before, self._active_lengths = self._active_lengths, lengths
        try:
            yield
        finally:
            self._active_lengths = before

    def _no_attention(self, model: nn.Module) -> PrepareError:
        return PrepareError(
            f"{self._models[model]} has computed a part of its sequences without any attention",
            why=f"{self.title} exchanges tokens in torch's scaled_dot_product_attention, and it was not "
            "called: this model's attention is made otherwise, and would see a part only",
            fix='use torch.nn.functional.scaled_dot_product_attention (attn_implementation="sdpa"), '
            "or train without cp_size and sp_size",
        )

    def _post_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        # A pipeline stage may have none.
        if self.attention.lengths and not (self.attention.calls or model in self._has_attention):
            raise self._no_attention(model)
        if torch.is_grad_enabled():
            begin = partial(self._begin_backward, (self.attention.lengths, self.attention.documents))
            for _, leaf in tree.iterate_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(begin)

    def _begin_backward(self, state: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        """Compute blocks again in the state of their forward: backward reaches one forward after another."""
        self.attention.backward_state = state
        return torch.zeros_like(gradient) if self._zero_gradients else None

    def backward_zero(self, loss: torch.Tensor, run: Callable[[], Any]) -> bool:
        """Run the backward of a shard without labels: its own loss, NaN perhaps, adds nothing.

        Gradients of its keys from other processes still pass through it.
        """
        if not self.attention.lengths:
            return False
        # A model may return its loss alone: zero times infinity would be NaN inside of it.
        hooks = [node.register_hook(_zero_all) for node in nodes_of_own_loss(loss)]
        self._zero_gradients = True
        try:
            run()
        finally:
            self._zero_gradients = False
            for hook in hooks:
                hook.remove()
        return True

    # --- outputs

    def merge_outputs(self, values: Any, *, as_objects: bool) -> Any:
        """Merge the outputs of the processes of a sequence to what one process would have computed.

        After a forward on shards; before the first one, the lengths are those of the loaders. Tensors and
        arrays whose second dimension is the length of a shard are joined to full sequences; the first, if the
        named keys have their tokens there. Other floating-point ones that differ belong to the shards, and
        become their mean.

        Raises:
            PrepareError: whole numbers, or values that are neither tensors nor arrays, that differ.
        """
        lengths = self.attention.lengths if self._has_run else frozenset(self._shard_lengths)
        leaves = [leaf for _, leaf in tree.iterate_leaves(values)]
        if not lengths and not any(
            isinstance(leaf, torch.Tensor) and leaf in self._shards for leaf in leaves
        ):
            return values
        if as_objects or not has_fixed_numbers(values):
            compared = [... if has_numbers(leaf) and not as_objects else leaf for leaf in leaves]
            check_equal(compared, self.size, self.group, self.title)
        return values if as_objects else tree.map_tree(partial(self._merge_leaf, lengths), values)

    def _merge_leaf(self, lengths: frozenset[int], leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and has_numbers(leaf):
            return self._merge_leaf(lengths, torch.from_numpy(leaf).to(self.world.device)).cpu().numpy()
        if not isinstance(leaf, torch.Tensor) or leaf in self._whole_tensors:
            return leaf
        local = leaf.detach().contiguous()
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.group)
        dim = self._shards.get(leaf, self.sharder.token_dim)
        if leaf in self._shards or (local.dim() > 1 and local.shape[dim] in lengths):
            return join_shards(gathered, dim, self.balanced)
        if all(torch.equal(gathered[0], part) for part in gathered[1:]):
            return leaf
        if not leaf.is_floating_point():
            raise PrepareError(
                f"a tensor of {leaf.dtype}, {tuple(leaf.shape)}, differs between processes of one sequence",
                why="each has a part of its tokens, and what is to count for the whole is not known",
                fix="gather what is per token, (rows, tokens), or add up: accelerator.reduce(count)",
            )
        return torch.stack(gathered).mean(0)


def _zero_all(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
