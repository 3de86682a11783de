"""What strategies share that cut parameters, gradients and optimizer state over processes.

Before a block computes, its parameters are gathered, and they are freed afterwards; its gradients are
reduced, and every process keeps its part. torch's ``fully_shard`` does it, in place: the model stays the
user's object, with its names, and its parameters are distributed tensors. The work stands in the
other files of this folder, which are loaded only when such a strategy is chosen: they cost a second of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.core.effects import Effect
from accelerate.strategy.base import Bundle, leaves
from accelerate.strategy.sharding.base import ShardedStrategy
from accelerate.world import collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.sharding.layout import Layout
    from accelerate.strategy.sharding.shard import Sharder


class Sharding(ShardedStrategy):
    """Parameters, gradients and optimizer state cut over processes, in place."""

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """See ``effects.py``."""
        from accelerate.strategy.sharding.effects import effects
        from accelerate.strategy.sharding.plugin import policy_of

        mine = [model for model in models if model in self.models]
        return effects(self.asked(self.request), self.plugin, mine, policy_of(self.request.precision))

    # --- over which processes

    @property
    def _alike(self) -> Sequence[DeviceMesh]:
        """Further meshes of one dimension along which parameters are equal unless they are distributed."""
        return ()

    @property
    def _stages(self) -> Sequence[ProcessGroup]:
        """Groups of processes with other parameters of the same model, which count for its norm."""
        return ()

    def _counted(self) -> Sequence[torch.Tensor]:
        """Parameters that another process of such a group has as well, and counts."""
        return ()

    @cached_property
    def _sharder(self) -> Sharder:
        from accelerate.strategy.sharding.shard import Sharder

        if not self._stages:
            self._watch_waits()
        return Sharder(self._shard_mesh, self.plugin, self.world.device, self._alike)

    # --- prepare

    def _layout(self, model: nn.Module) -> Layout:
        from accelerate.strategy.sharding.plugin import policy_of
        from accelerate.strategy.sharding.shard import layout_of

        return layout_of(model, self.plugin, policy_of(self.request.precision))

    def _shard(self, bundle: Bundle) -> None:
        for model in dict.fromkeys(bundle.of("model")):
            if not self._known(model):
                self.shard(model, bundle.of("optimizer"))

    def shard(self, model: nn.Module, optimizers: Sequence[Any] = ()) -> None:
        """Shards one model in place, and makes ``optimizers`` hold its new parameters."""
        self._sharder.shard(model, self._layout(model), optimizers, self._follow)
        self._know(model)

    def _known(self, model: nn.Module) -> bool:
        from accelerate.strategy.sharding.shard import is_sharded

        return is_sharded(model)

    def _follow(self, renewed: Mapping[int, tuple[Any, Any]], optimizers: list[Any]) -> None:
        from accelerate.strategy.sharding.shard import follow

        follow(renewed, optimizers)
        for old, new in renewed.values():
            self._renewed[old] = new

    def _catch_up(self, bundle: Bundle) -> None:
        """Optimizers that were made before their model was prepared, in a call of its own."""
        from accelerate.strategy.sharding.shard import follow

        for optimizer in bundle.of("optimizer"):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            renewed = {id(p): (p, self._newest(p)) for p in held if p in self._renewed}
            # It may have been made right after a forward.
            whole = self._whole()
            renewed |= {id(p): (p, whole[p]) for p in held if p in whole}
            follow(renewed, [optimizer])

    def _newest(self, parameter: torch.Tensor) -> torch.Tensor:
        """What has taken its place: other dimensions may have divided it before it was sharded."""
        while parameter in self._renewed:
            parameter = self._renewed[parameter]
        return parameter

    # --- the loop

    def synchronises(self, model: nn.Module) -> bool:
        """Unless ``no_sync`` is around it."""
        from accelerate.strategy.sharding.grads import reduces

        return reduces(model)

    def waiting(self, models: Iterable[nn.Module]) -> int:
        """Whole gradients take as many bytes as unsharded training's."""
        from accelerate.strategy.sharding.grads import unreduced

        return unreduced(model for model in models if model in self.models)

    @staticmethod
    def _reduce(model: nn.Module, sync: bool) -> None:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(sync)  # type: ignore[operator]

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """The next backward reduces, with what was kept back."""
        Sharding._reduce(model, True)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """The sharded ones: after a forward the root still has its whole ones in their places."""
        whole = self._whole()
        return [whole.get(p, p) for p in model.parameters()]

    def _whole(self) -> dict[torch.Tensor, torch.Tensor]:
        """Sharded parameters by the whole ones that stand in their places now and then."""
        from accelerate.strategy.sharding.grads import leaf, places

        pairs = ((leaf(place), p) for p, place in places(self.models).items())
        return {found: p for found, p in pairs if found is not None}

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The local parts, and whole gradients that have not been reduced yet."""
        from accelerate.strategy.sharding.grads import kept_back, local, places

        wanted = list(parameters)
        found = [local(p.grad) for p in wanted if p.grad is not None]
        if self._keeps_back:
            record = places(self.models)
            more = (kept_back(record[p]) for p in wanted if p in record)
            found += [grad for grad in more if grad is not None]
        return found

    def reached(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Graphs reach the whole parameters: those that they stand for."""
        from accelerate.strategy.sharding.grads import leaf, places

        found = leaves(loss)
        return found | {p for p, place in places(self.models).items() if leaf(place) in found}

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """The whole backward: other processes wait for every gather and reduction in it."""
        from accelerate.strategy.sharding.grads import zero_backward

        zero_backward(self.models, loss)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """By exchanges of one number."""
        from accelerate.strategy.sharding.grads import clip_norm

        device, elsewhere = self.world.device, self._counted()
        return clip_norm(parameters, max_norm, norm_type, device, self._stages, elsewhere)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Each process its part."""
        from accelerate.strategy.sharding.grads import clip_value

        clip_value(parameters, limit)

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Also what was kept back."""
        if self._keeps_back:
            from accelerate.strategy.sharding.grads import drop, places

            record = places(self.models)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in record:
                        drop(record[parameter])
        zero()

    # --- states

    @property
    def saves_sharded(self) -> bool:
        """As the plugin's ``state_dict_type`` says."""
        return "SHARDED_STATE_DICT" in str(self.plugin.state_dict_type)

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Gathered, on the host of rank 0; other ranks get nothing. All processes must call it."""
        from accelerate.strategy.sharding.load import hollow, refuse_hollow
        from accelerate.strategy.sharding.whole import model_state

        every = collective.all_objects(hollow(model), "get_state_dict")
        refuse_hollow(name for names in every for name in names)
        return model_state(model, self._leads)

    def check_filled(self, model: nn.Module) -> None:
        """Its parts on this process."""
        from accelerate.strategy.sharding.load import hollow, refuse_hollow

        refuse_hollow(hollow(model))

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """A full state on every process; each takes its part."""
        from accelerate.strategy.sharding.whole import load_model

        return load_model(model, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gathered, on the host of rank 0."""
        from accelerate.strategy.sharding.whole import optimizer_state

        # Torch's own collectives would wait for a rank that does something else.
        collective.all_objects(type(optimizer).__name__, "the state of an optimizer")
        return optimizer_state(optimizer, self._leads)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """A full state on every process; each takes its part."""
        from accelerate.strategy.sharding.whole import load_optimizer

        load_optimizer(optimizer, state)
