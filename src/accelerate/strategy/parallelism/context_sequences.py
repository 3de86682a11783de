"""What the dimensions share in which several processes have parts of the same sequences.

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
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core import tree
from accelerate.core.errors import PrepareError, SettingError
from accelerate.strategy.base import Bundle, Step
from accelerate.strategy.parallelism import attention_masks
from accelerate.strategy.parallelism.attention import Exchange, Switch, Watch, check
from accelerate.strategy.parallelism.base import Dimension
from accelerate.strategy.parallelism.context_cut import MASK, TOKENS, Cutter, join

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.config import ParallelismConfig
    from accelerate.world.world import World

_WHOLE: frozenset[int] = frozenset()


class Sequences(Dimension):
    """Processes that share sequences.

    Attributes:
        what: its name in sentences.
        balanced: whether parts are balanced for causal attention.
    """

    what: ClassVar[str]
    balanced: ClassVar[bool]

    def __init__(self, config: ParallelismConfig, mesh: DeviceMesh, world: World) -> None:
        super().__init__(config, mesh, world)
        self.size, self.place = mesh[self.name].size(), mesh.get_local_rank(self.name)
        self.group = mesh.get_group(self.name)
        self.exchange = self.kind(self.size, self.place, self.group, self.balanced)
        self._switch = Switch(self.exchange)
        self._option: bool | Mapping[str, int] | None = getattr(self.handler, "cut", None)
        dims = self._option if isinstance(self._option, Mapping) else None
        self.cutter = Cutter(self.size, self.place, self.balanced, dims)
        # The models, and the names that their users know: sharding gives them others.
        self._models: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._together: weakref.WeakSet[Any] = weakref.WeakSet()
        # Whether a model in stages has attention in any of them.
        self._attends: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        # The tensors that are parts, and the dimension of their tokens.
        self._parts: Any = WeakIdKeyDictionary()
        self._places: Any = WeakIdKeyDictionary()
        # Tokens of the parts that loaders gave, and of those inside the block; None outside of one.
        self._given: set[int] = set()
        self._inside: frozenset[int] | None = None
        self._warned = self._nothing = False

    @property
    def handler(self) -> Any:
        """The options of this dimension."""
        return getattr(self.config, f"{self.name}_handler")

    @property
    def kind(self) -> type[Exchange]:
        """How this dimension exchanges tokens."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuses losses that stages take chunk by chunk.

        Raises:
            SettingError: the schedule has them.
        """
        schedule = self.config.pp_handler.schedule if self.config.pp_handler is not None else "gpipe"
        if self.config.pp_enabled and schedule != "gpipe":
            raise SettingError(
                f"schedule={schedule!r} does not go with {self.name}_size={self.size}",
                why="with it gradients are made before anybody knows whether the parts of sequences in a "
                "chunk have a label at all",
                fix="schedule='gpipe', which takes the loss over the whole batch",
            )

    # --- prepare

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Catch attention of the models, and cut the batches of loaders that come with one."""
        models = [model for model in dict.fromkeys(bundle.of("model")) if model not in self._models]
        for model in models:
            check(model, self.what)
        if models:
            reason = f"{self.size} processes share each sequence, and exchange what attention needs"
            yield Step(self.name, reason, self._install)
        if bundle.of("model") and bundle.of("loader") and self._option is None:
            reason = f"each process gets its part, 1/{self.size}, of every sequence"
            yield Step("sequences", reason, lambda b: self._together.update(b.of("loader")))

    def _install(self, bundle: Bundle) -> None:
        for model in dict.fromkeys(bundle.of("model")):
            if model not in self._models:
                self._models[model] = type(model).__name__
                model.register_forward_pre_hook(self._before, with_kwargs=True)
                self._switch.install(model)
                model.register_forward_hook(self._after)
                if attention_masks.applies(model):
                    attention_masks.register()

    # --- batches

    def cuts(self, loader: Any) -> bool:
        """Whether the batches of ``loader``, as the user gave it, are cut when it is prepared."""
        return loader in self._together if self._option is None else self._option is not False

    def own_part(self, batch: Any) -> Any:
        """This process's part of a batch of whole sequences.

        Raises:
            PrepareError: it has no tokens by a known name, although cutting was asked for.
        """
        if not self.cutter.cuts(batch):
            if self._option is None:
                return batch
            raise PrepareError(
                f"a batch, {_described(batch)}, has no tokens that could be shared by {self.what}",
                why="cut= asks for it, and a batch is cut by its keys",
                fix='give dicts with "input_ids", or name the keys and the dimensions of their tokens: '
                'cut={"tokens": 1}',
            )
        parts = self.cutter(batch)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and part is not batch.get(name) and name != MASK:
                dim = self.cutter.dims.get(name, 1) if self.cutter.dims else 1
                self._parts[part] = dim
                if name == "position_ids":
                    self._places[part] = True
                self._given.add(part.shape[dim])
        return parts

    def chunked(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows of a part are a part."""
        for known in (self._parts, self._places):
            if whole in known:
                known[rows] = known[whole]

    @contextmanager
    def rehearsal(self, model: nn.Module, inside: Callable[[], bool]) -> Iterator[None]:
        """Looks where attention is: a stage may have none, and between the stages nothing exchanges it.

        Raises:
            PrepareError: it is there.
        """
        if model not in self._models:
            yield
            return
        with Watch(inside) as watch:
            yield
        self._attends[model] = watch.inside > 0
        if watch.outside:
            raise PrepareError(
                f"{self._models[model]} calls attention between the modules that are cut into stages",
                why=f"every stage runs that code, also over whole batches, and {self.what} exchanges tokens "
                "in the attention of modules only",
                fix="call attention in a module of its own, or set pp_size=1",
            )

    @contextmanager
    def sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> Iterator[None]:
        """Whole sequences are parts inside; what is a part already stays as it is."""
        if len(buffers) != len(dims):
            raise PrepareError(
                f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims",
                fix="give the dimension of the tokens for each buffer",
            )
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        lengths: set[int] = set()
        # All are cut before any is changed: an error leaves them whole.
        made = [
            (b, b.detach() if b in self._parts else self._cut(b, d))
            for b, d in zip(buffers, dims, strict=True)
        ]
        for (buffer, part), dim in zip(made, dims, strict=True):
            lengths.add(part.shape[dim])
            if buffer in self._parts:
                continue
            if any(buffer is other for other in kept):
                self._parts[buffer] = dim
            else:
                whole.append((buffer, buffer.detach()))
            buffer.data = part
        before, self._inside = self._inside, frozenset(lengths)
        try:
            yield
        finally:
            self._inside = before
            for buffer, tokens in whole:
                buffer.data = tokens

    def _cut(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        return self.cutter.part(buffer.detach(), dim)

    # --- the model

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Decides what the forward is on, and tells the model of whole sequences."""
        tensors = [leaf for _, leaf in tree.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        exchange = self.exchange
        exchange.lengths, exchange.documents, exchange.calls = self._lengths(model, tensors), None, 0
        if not exchange.lengths:
            return None
        names = inspect.signature(model.forward).parameters
        known = attention_masks.applies(model)
        if not _takes_places(model):
            self._check_places(model, tensors)
            return None
        fixed = [name for name, kind in names.items() if kind.kind is kind.POSITIONAL_OR_KEYWORD]
        named = dict(zip(fixed, args, strict=False)) | kwargs
        tokens = next(
            (named[name] for name in TOKENS if named.get(name) is not None), args[0] if args else None
        )
        if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            return None
        if named.get("position_ids") is None:
            named["position_ids"] = self._places_of(tokens)
        if known:
            cached = named.get("use_cache")
            cached = getattr(model.config, "use_cache", False) if cached is None else cached
            named = attention_masks.told(exchange, tokens.shape[1], named, bool(cached))
        return args[len(fixed) :], named

    def _places_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where the tokens of a part are in their sequences."""
        whole = torch.arange(tokens.shape[1] * self.size, device=tokens.device)
        return self.cutter.part(whole, 0).expand(tokens.shape[0], -1)

    def _check_places(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """A model that is not told where its tokens are counts from 0 in every part.

        Raises:
            PrepareError: a loader has cut, and the model got no positions.
        """
        if self._inside is None and not any(tensor in self._places for tensor in tensors):
            raise PrepareError(
                f"{self._models[model]} does not get the positions of its tokens",
                why=f"it has a part of each sequence ({self.what}), and would count from 0 in every part",
                fix="give it batch['position_ids'], and let it look its positions up there; a model without "
                "positions may take the argument and leave it",
            )

    def _lengths(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """The tokens of the parts in this forward; none where sequences are whole."""
        parts = {tensor.shape[self._parts[tensor]] for tensor in tensors if tensor in self._parts}
        if parts:
            return frozenset(parts)
        if self._inside is not None:
            return self._inside
        if self._given:
            self._check_whole(model, tensors)
        elif self.name == "cp" and model.training and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.size} processes compute the same whole sequences: nothing has cut them. Prepare the "
                "loader together with the model, or put accelerator.maybe_context_parallel(buffers=..., "
                "buffer_seq_dims=...) around forward and backward",
                stacklevel=2,
            )
        return _WHOLE

    def _check_whole(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Sequences that are no parts by name, where loaders gave parts.

        Raises:
            PrepareError: they could be copies of parts.
        """
        views = [tensor for tensor in tensors if tensor._base is not None and tensor._base in self._parts]
        alike = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.shape[1] in self._given]
        if views or alike or model.training:
            shown = ", ".join(str(tuple(tensor.shape)) for tensor in views or alike or tensors)
            raise PrepareError(
                f"{self._models[model]} got tensors that are none of a prepared loader's: {shown}",
                why=f"loaders give this process its part of each sequence ({self.what}), and a copy or a "
                "slice of one is taken for a whole",
                fix="give the model the batch's own tensors (its labels are shifted already: shift_labels); "
                "for whole sequences put `with accelerator.maybe_context_parallel():` around the call",
            )

    def called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """What is wrong with its arguments; and that it has no attention, which a rehearsal has seen."""
        if model not in self._models:
            return
        tensors = [leaf for _, leaf in tree.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not self._lengths(model, tensors):
            return
        if not _takes_places(model):
            self._check_places(model, tensors)
        if not self._attends[model]:
            raise self._no_attention(model)

    def _no_attention(self, model: nn.Module) -> PrepareError:
        return PrepareError(
            f"{self._models[model]} has computed a part of its sequences without any attention",
            why=f"{self.what} exchanges tokens in torch's scaled_dot_product_attention, and it was not "
            "called: this model's attention is made otherwise, and would see a part only",
            fix='use torch.nn.functional.scaled_dot_product_attention (attn_implementation="sdpa"), '
            "or train without cp_size and sp_size",
        )

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        # One stage may have none.
        if self.exchange.lengths and not (self.exchange.calls or model in self._attends):
            raise self._no_attention(model)
        if self.exchange.lengths and torch.is_grad_enabled():
            for _, leaf in tree.leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._silent)

    def _silent(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if self._nothing else None

    def backward_zero(self, loss: torch.Tensor) -> bool:
        """A backward of a part without any label: its own loss, NaN perhaps, adds nothing.

        What others have learned of its keys goes through it all the same.
        """
        if not self.exchange.lengths:
            return False
        self._nothing = True
        try:
            loss.backward(gradient=torch.zeros_like(loss))
        finally:
            self._nothing = False
        return True

    # --- what was computed

    def joined(self, values: Any) -> Any:
        """What the processes of a sequence have computed, as one of them would have computed it whole.

        After a forward on parts. Tensors whose second dimension is that of the tokens of a part are joined to
        whole sequences. Other numbers that differ are of the parts, and become their mean.

        Raises:
            PrepareError: whole numbers that differ.
        """
        return tree.map_tree(self._joined, values) if self.exchange.lengths else values

    def _joined(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        mine = leaf.detach().contiguous()
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        if mine.dim() > 1 and mine.shape[1] in self.exchange.lengths:
            return join(found, 1, self.balanced)
        if all(torch.equal(found[0], part) for part in found[1:]):
            return leaf
        if not leaf.is_floating_point():
            raise PrepareError(
                f"a tensor of {leaf.dtype}, {tuple(leaf.shape)}, differs between processes of one sequence",
                why="each has a part of its tokens, and what is to count for the whole is not known",
                fix="gather what is per token, (rows, tokens), or add up: accelerator.reduce(count)",
            )
        return torch.stack(found).mean(0)


def _takes_places(model: nn.Module) -> bool:
    """Whether its forward can be given the positions of its tokens."""
    names = inspect.signature(model.forward).parameters
    open_ended = any(name.kind is name.VAR_KEYWORD for name in names.values())
    return "position_ids" in names or (open_ended and attention_masks.applies(model))


def _described(batch: Any) -> str:
    keys = f" with {', '.join(map(str, batch))}" if tree.is_mapping(batch) else ""
    return f"a {type(batch).__name__}{keys}"
