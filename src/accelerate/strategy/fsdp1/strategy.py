"""Fully sharded data parallel as torch's class does it, around the model: version 1.

Every part of the model is wrapped in an object of ``torch.distributed.fsdp.FullyShardedDataParallel``, and so
is the model: what ``prepare`` returns is that object, which passes on what it does not have itself. Files and
states go by the user's names. The work stands in the files of ``fsdp1_parts``, which are loaded only when
this strategy is chosen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core.effects import Effect, Option
from accelerate.core.errors import PrepareError
from accelerate.core.setting import load
from accelerate.strategy.base import Bundle, Request, leaves
from accelerate.strategy.settings.fsdp import FSDPSettings, FSDPSwitch
from accelerate.strategy.sharding.base import ShardedStrategy, asked, plugin_of
from accelerate.world import collective
from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import ShardingStrategy

    from accelerate.strategy.fsdp1.record import Record
    from accelerate.strategy.fsdp1.states import Book, Order
    from accelerate.strategy.fsdp1.wrap import FlatLayout, Wrapper

_WRAPPED = "_fsdp_wrapped_module"


class FSDP1(ShardedStrategy):
    """Cut over processes by torch's class around each part of a model."""

    name: ClassVar[str] = "fsdp1"
    priority: ClassVar[int] = 11

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._roots: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        # The user's parameters of each group of an optimizer, where flat ones took their places.
        self._orders: weakref.WeakKeyDictionary[Any, Order] = weakref.WeakKeyDictionary()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def claims(cls, request: Request) -> bool:
        """Several processes, and version 1 by the plugin or the launcher's variables."""
        plugin = plugin_of(request)
        if request.world.size == 1:
            return False
        if plugin is not None:
            return plugin.fsdp_version == 1
        return load(FSDPSwitch).value.use_fsdp and load(FSDPSettings).value.fsdp_version == 1

    @classmethod
    def asked(cls, request: Request) -> Iterator[Option]:
        """The switch or the plugin, where they ask for this version."""
        if cls.claims(request):
            yield from asked(request)

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """The contract's name, on any device."""
        return "FSDP"

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """See ``effects.py``."""
        from accelerate.strategy.fsdp1.effects import effects

        return effects(self.asked(self.request), self.plugin, [m for m in models if m in self.models])

    @property
    def _sharing(self) -> ShardingStrategy:
        """How parameters are shared; one copy of the shards is what the simple strategies make."""
        from torch.distributed.fsdp import ShardingStrategy

        wanted: ShardingStrategy = self.plugin.sharding_strategy
        simple = {
            ShardingStrategy.HYBRID_SHARD: ShardingStrategy.FULL_SHARD,
            ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.SHARD_GRAD_OP,
        }
        return simple.get(wanted, wanted) if self._grid[0] == 1 else wanted

    @cached_property
    def _wrapper(self) -> Wrapper:
        from accelerate.strategy.fsdp1.wrap import Wrapper

        self._watch_waits()
        return Wrapper(self._shard_mesh, self.plugin, self._sharing, self.world.device)

    # --- prepare

    @property
    def _copied(self) -> bool:
        """Whether every process keeps whole parameters."""
        return self.plugin.sharding_strategy.name == "NO_SHARD"

    @property
    def _shares(self) -> int:
        """One where each has whole ones."""
        return 1 if self._copied else super()._shares

    @property
    def _held(self) -> str:
        """Parts, or all."""
        if self._copied:
            return f"each of {self.world.size} processes holds all parameters, and gradients are averaged"
        return super()._held

    def _layout(self, model: nn.Module) -> FlatLayout:
        from accelerate.strategy.fsdp1.wrap import layout_of
        from accelerate.strategy.sharding.plugin import policy_of

        return layout_of(model, self.plugin, policy_of(self.request.precision, 1))

    def _known(self, model: nn.Module) -> bool:
        """Whether it is wrapped already.

        Raises:
            PrepareError: by somebody else.
        """
        from accelerate.strategy.fsdp1.wrap import is_wrapped, record_of

        if is_wrapped(model) and record_of(model) is None:
            raise PrepareError(
                "the model is wrapped in torch's FullyShardedDataParallel already",
                why="prepare wraps it itself, so that states and optimizers go by the user's names",
                fix="give prepare the plain model, and say in FullyShardedDataParallelPlugin how to wrap it",
            )
        return is_wrapped(model)

    def _shard(self, bundle: Bundle) -> None:
        if self.world.device.type == "meta":
            raise PrepareError(
                "version 1 of sharding cannot be rehearsed with empty tensors",
                why="torch's class gives them memory",
                fix="rehearse with fsdp_version=2: what a rank has is as large",
            )
        bundle.replace("model", self._wrapped)

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if self._known(model):
            return model
        record, renewed = self._wrapper.wrap(model, self._layout(model))
        self._renewed.update(renewed)
        self._know(record.root)
        return record.root

    def _know(self, model: nn.Module) -> None:
        """By the user's own as well."""
        super()._know(model)
        self._roots[self.unwrap(model)] = weakref.ref(model)

    def _catch_up(self, bundle: Bundle) -> None:
        """Also optimizers whose model was prepared in a call of its own."""
        from accelerate.strategy.fsdp1.follow import catch_up

        sync = bool(self.plugin.sync_module_states)
        for optimizer in bundle.of("optimizer"):
            own = getattr(optimizer, "optimizer", optimizer)
            catch_up(own, self._renewed, self._records(), self._orders, sync=sync)
            if isinstance(own, torch.optim.Optimizer) and own not in self._watched:
                self._watched.add(own)
                own.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        """An evaluation before a step leaves whole values of the outermost part, which are old now."""
        for record in self._records():
            for unit in record.units:
                unit.settle()

    def _check_optimizers(self, bundle: Bundle) -> None:
        """Also those that cannot follow.

        Raises:
            PrepareError: a flat parameter would lie in several groups, or the base class says why.
        """
        super()._check_optimizers(bundle)
        if not bundle.training or self.plugin.use_orig_params:
            return
        from accelerate.strategy.fsdp1.follow import check_groups

        fresh = [model for model in bundle.of("model") if not self._known(model)]
        for optimizer in bundle.of("optimizer"):
            for model in fresh:
                check_groups(optimizer, [own for _, own in self._layout(model).parts])

    # --- the loop

    def _records(self) -> list[Record]:
        from accelerate.strategy.fsdp1.wrap import record_of

        return [record for record in map(record_of, self.models) if record is not None]

    def _record(self, model: nn.Module) -> Record | None:
        """Of a wrapped model, or of the user's own in one."""
        from accelerate.strategy.fsdp1.wrap import record_of

        root = self._roots.get(model)
        return record_of(model if root is None else root())

    def synchronises(self, model: nn.Module) -> bool:
        """Unless ``no_sync`` is around it."""
        return bool(getattr(model, "_sync_gradients", True))

    @staticmethod
    def _reduce(model: nn.Module, sync: bool) -> None:
        """As torch's ``no_sync``, but a backward inside may be told to reduce after all."""
        if _WRAPPED in getattr(model, "_modules", {}):
            for part in (part for part in model.modules() if _WRAPPED in part._modules):
                part._sync_gradients = sync  # type: ignore[assignment]

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """The next backward reduces, with what was kept back."""
        FSDP1._reduce(model, True)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """The user's or the flat ones: between a forward and its backward other tensors may stand there."""
        from accelerate.strategy.fsdp1.grads import parameters

        record = self._record(model)
        return super().parameters(model) if record is None else parameters(record)

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The pieces here, or whole gradients that have not been reduced yet."""
        from accelerate.strategy.fsdp1.grads import accumulated

        return accumulated(self._records(), parameters)

    def reached(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Graphs reach flat parameters: those that lie in them."""
        from accelerate.strategy.fsdp1.grads import reached

        return reached(self._records(), leaves(loss))

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """The whole backward: other processes wait for every gather and reduction in it."""
        from accelerate.strategy.fsdp1.grads import zero_backward

        zero_backward(self._records(), loss)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """By one exchange of one number."""
        from accelerate.strategy.fsdp1.grads import clip_norm

        return clip_norm(self._records(), parameters, max_norm, float(norm_type), self.world.device)

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Also what was kept back."""
        if self._keeps_back:
            from accelerate.strategy.fsdp1.grads import drop

            drop(self._records(), (p for group in optimizer.param_groups for p in group["params"]))
        zero()

    def agreement(self) -> Callable[[torch.Tensor], None]:
        """What one process has found in its pieces of gradients holds for all."""
        return _greatest

    # --- states

    @property
    def saves_sharded(self) -> bool:
        """As the plugin's ``state_dict_type`` says."""
        return "FULL_STATE_DICT" not in str(self.plugin.state_dict_type)

    def as_saved(self, model: nn.Module) -> Any:
        """The model by its names, with distributed tensors where it is cut."""
        from accelerate.strategy.fsdp1.record import named

        record = self._record(model)
        return self.unwrap(model) if record is None else named(record)

    def optimizer_as_saved(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer of the user's parameters, with distributed tensors where they are cut."""
        from accelerate.strategy.fsdp1.states import named_optimizer

        return named_optimizer(self._book(optimizer))

    def _book(self, optimizer: torch.optim.Optimizer) -> Book:
        from accelerate.strategy.fsdp1.states import Book

        return Book(optimizer, self._records(), self._orders.get(optimizer, ()))

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Gathered, on the host of rank 0; other ranks get nothing. All processes must call it."""
        from accelerate.strategy.fsdp1.record import nothing, on_host

        record = self._record(model)
        if record is None:
            return super().state(model)
        # Torch's own collectives would wait for a rank that does something else.
        collective.all_objects(type(record.module).__name__, "get_state_dict")
        return record.state(on_host if self._leads else nothing)

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """A full state on every process; each takes its part."""
        record = self._record(model)
        return (
            super().load(model, state, strict=strict) if record is None else record.load(state, strict=strict)
        )

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gathered, on the host of rank 0."""
        from accelerate.strategy.fsdp1.record import nothing, on_host

        state = self._book(optimizer).state(on_host if self._leads else nothing)
        return state if self._leads else {}

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """A full state on every process; each takes its part."""
        self._book(optimizer).load(state)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module; its forward gathers nothing of what lies outside of its wrapped parts."""
        inner = model._modules.get(_WRAPPED)
        return model if inner is None else inner


def _greatest(found: torch.Tensor) -> None:
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)


PLUGIN = FSDP1
