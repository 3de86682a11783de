"""LocalSGD and DiLoCo: every rank trains its own copy of a model, and rounds combine the copies."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from types import TracebackType
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError, SettingError
from accelerate.world import collective
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)

# The most bytes of one all-reduce, so that its flat buffer stays small.
BUCKET_BYTES = 256 * 2**20
_HALVES = (torch.float16, torch.bfloat16)


class LocalTrainingStrategyError(PrepareError, NotImplementedError):
    """Ranks cannot train locally under this strategy."""


class LocalSGDContext(ABC):
    """A ``with`` block in which every rank trains its own copy of a model; rounds combine the copies.

    Gradients are not all-reduced inside. After every ``sync_interval`` optimizer steps, and at the end of the
    block, there is a round of all ranks. A rank that leaves the block earlier than others (its data ended, it
    broke out) takes part in their rounds with its copy until all have left. After an exception there is no
    last round: the copies stay as they are.

    At the end all ranks have the same weights, and also the same state of optimizers, schedulers and loss
    scale, so that usual training may continue.

    Args:
        accelerator: the ``Accelerator`` that has prepared the model and its optimizers.
        model: the prepared model.
        sync_interval: optimizer steps of each rank between two rounds; micro-batches of an accumulation that
            do not step do not count.
        enabled: False turns all of this off.

    Attributes:
        num_steps: optimizer steps of this rank inside such blocks so far.

    Raises:
        SettingError: ``sync_interval`` is not a positive number.
        PrepareError: the model is not prepared by this accelerator, or its strategy does not keep a whole
            copy of the model on every process.
    """

    accelerator: Any
    model: nn.Module
    enabled: bool
    num_steps: int

    def __init__(
        self, accelerator: Any, model: nn.Module, sync_interval: int, enabled: bool, option_name: str
    ) -> None:
        if not isinstance(sync_interval, int) or isinstance(sync_interval, bool) or sync_interval < 1:
            raise SettingError(
                f"{option_name} is {sync_interval!r}, but it is a number of steps and at least 1"
            )
        self.accelerator, self.model, self.enabled = accelerator, model, enabled
        self.num_steps = 0
        self.model_sync_obj: Any = None
        self._sync_interval, self._steps_since_sync = sync_interval, 0
        if enabled:
            self.model = self._find_prepared_model(model)

    def _find_prepared_model(self, model: nn.Module) -> nn.Module:
        """Return the prepared model, also for the user's own model, whose gradients would be all-reduced."""
        strategy = self.accelerator.strategy
        if strategy.owns_step or not strategy.replicates_model:
            raise LocalTrainingStrategyError(
                f"{type(self).__name__} does not work with the strategy {strategy.name!r}",
                why="every process must hold a whole copy of the model and step by itself",
                fix="use it with plain data parallel training, or pass enabled=False",
            )

        def unwrap(module: nn.Module) -> nn.Module:
            return self.accelerator.unwrap_model(module, keep_torch_compile=False)

        for prepared in self.accelerator._models:
            if prepared is model or unwrap(prepared) is unwrap(model):
                return prepared
        raise PrepareError(
            f"{type(self).__name__} was given a model that this accelerator has not prepared",
            fix="model, optimizer = accelerator.prepare(model, optimizer), and then pass that model",
        )

    def __enter__(self) -> Any:
        if self.enabled:
            if self.model_sync_obj is not None:
                raise PrepareError(f"this {type(self).__name__} block is entered already")
            self.model_sync_obj = self.accelerator.strategy.local_steps(self.model)
            self.model_sync_obj.__enter__()
            self.accelerator.strategy.local_training = True
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self.model_sync_obj is None:
            return
        self.model_sync_obj.__exit__(type, value, tb)
        self.model_sync_obj = None
        self.accelerator.strategy.local_training = False
        # After an error the others may be anywhere: a collective call would wait for them, or they for it.
        if type is None:
            while not self._sync_round(leaving=True):
                pass
            self._sync_training_state()

    def step(self) -> None:
        """Count an optimizer step and begin a round when it is due; call it after every ``optimizer.step()``.

        Raises:
            PrepareError: called outside of the ``with`` block.
        """
        if not self.enabled:
            return
        if self.model_sync_obj is None:
            name = type(self).__name__
            raise PrepareError(
                f"{name}.step() was called outside of its block",
                why="gradients stay on their process inside of it only",
                fix=f"with {name}(...) as local: ... local.step()",
            )
        if self.accelerator.sync_gradients:
            self.num_steps += 1
            self._steps_since_sync += 1
            if self._steps_since_sync >= self._sync_interval:
                self._sync_round()

    def _sync_round(self, *, leaving: bool = False) -> bool:
        """Run one round of all ranks; return True when all of them are leaving."""
        world = worlds.current()
        device = None if world is None else world.device
        flags = torch.tensor([leaving, self._steps_since_sync > 0], dtype=torch.int64, device=device)
        leaving_ranks, stepped_ranks = collective.reduce(flags, "sum").tolist()
        if stepped_ranks:
            self._combine_copies()
            self._steps_since_sync = 0
        return leaving_ranks == collective.world_size()

    @abstractmethod
    def _combine_copies(self) -> None:
        """Combine the copies of all ranks; a collective call."""

    def _sync_training_state(self) -> None:
        """Make the state equal that usual training keeps equal: optimizers, loss scale, schedulers."""
        if collective.world_size() == 1:
            return
        for optimizer in self._optimizers():
            sync_optimizer_state(optimizer)
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.load_state_dict(collective.broadcast_object(scaler.state_dict()))
        for scheduler in self.accelerator._schedulers:
            scheduler.load_state_dict(collective.broadcast_object(scheduler.state_dict()))

    # --- the trained tensors

    def _trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by the user's names; a tied one once."""
        module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return {name: each for name, each in module.named_parameters() if each.requires_grad}

    def _persistent_buffers(self) -> list[torch.Tensor]:
        """Return the persistent buffers, such as running statistics."""
        module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        saved = module.state_dict(keep_vars=True)
        return [saved[name] for name, _ in module.named_buffers() if name in saved]

    def _average_buffers(self) -> None:
        average_in_place(self._persistent_buffers())

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the user's optimizers of this model."""
        own_ids = {id(parameter) for parameter in self.model.parameters()}
        for wrapped in self.accelerator._optimizers:
            if any(id(each) in own_ids for group in wrapped.param_groups for each in group["params"]):
                yield wrapped.optimizer

    # --- checkpoints inside a block

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this block, for ``register_for_checkpointing``; equal on all ranks."""
        return {"steps": self.num_steps, "since": self._steps_since_sync}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the progress."""
        self.num_steps, self._steps_since_sync = state_dict["steps"], state_dict["since"]

    def rank_state_dict(self) -> dict[str, Any] | None:
        """Return this rank's copy of what is trained; None where the copies are one."""
        if not self.enabled:
            return None
        return {
            "model": {name: value.detach() for name, value in self._rank_tensors().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers()],
            # A step that overflowed on one rank has lowered its loss scale and held its schedules only.
            "schedulers": [scheduler.state_dict() for scheduler in self.accelerator._schedulers],
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
        }

    def load_rank_states(self, states: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Load the model and its optimizers from this rank's copy.

        With another world size the copies are averaged first, and the optimizer states of the first ranks
        are taken.

        Args:
            states: the copies of all ranks that saved; empty where they were one.
            rank: this one.
        """
        if not states:
            return
        own_copy = states[rank % len(states)]
        copies = [own_copy] if len(states) == collective.world_size() else states
        models = [each["model"] for each in copies]
        with torch.no_grad():
            for name, value in self._rank_tensors().items():
                if models[0][name].is_floating_point():
                    value.copy_(torch.stack([model[name].double() for model in models]).mean(0))
                else:
                    value.copy_(models[0][name])
        own_copy = deepcopy({name: value for name, value in own_copy.items() if name != "model"})
        for optimizer, state in zip(self._optimizers(), own_copy["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(self.accelerator._schedulers, own_copy["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.accelerator.scaler is not None and own_copy["scaler"]:
            self.accelerator.scaler.load_state_dict(own_copy["scaler"])

    def _rank_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that differ between ranks: trainable parameters and buffers."""
        buffers = {f"buffer {index}": value for index, value in enumerate(self._persistent_buffers())}
        return {**self._trainable_parameters(), **buffers}


class LocalSGD(LocalSGDContext):
    """Every rank takes ``local_sgd_steps`` local steps; then parameters are averaged.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767), algorithm 1.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                local_sgd.step()

    Trainable parameters and floating point buffers are averaged; integer buffers become those of
    rank 0. Frozen parameters are not sent. On one process this does nothing.

    Args:
        accelerator: the ``Accelerator`` that has prepared the model and its optimizers.
        model: the prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False turns it off, so that gradients are all-reduced in every step.

    Raises:
        SettingError, PrepareError: see ``LocalSGDContext``.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        several = enabled and accelerator.use_distributed
        super().__init__(accelerator, model, local_sgd_steps, several, "local_sgd_steps")
        self.local_sgd_steps = local_sgd_steps

    def _combine_copies(self) -> None:
        self._sync_and_avg_model_params()

    def _sync_and_avg_model_params(self) -> None:
        """Average parameters and buffers now; a collective call."""
        average_in_place(self._trainable_parameters().values())
        self._average_buffers()


class DiLoCo(LocalSGDContext):
    """Every rank takes ``inner_steps`` local steps; then all take one step of an outer optimizer.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"
    (arXiv:2311.08105), algorithm 1, with its outer optimizer: SGD with Nesterov momentum, learning rate 0.7,
    momentum 0.9.

        diloco = DiLoCo(accelerator, model, inner_steps=100)
        accelerator.register_for_checkpointing(diloco)
        with diloco:
            for batch in loader:
                ...
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()

    The outer gradient is the difference between the weights of the last round (the anchor) and the mean of
    the copies now. Anchor and momentum are kept in float32 at least, twice the size of the model. With
    ``outer_lr=1`` and ``outer_momentum=0`` this is LocalSGD. One process also uses the outer optimizer,
    so that a script runs the same algorithm with any world size.

    Buffers are averaged, integer ones become those of rank 0. Frozen parameters are not sent.

    Args:
        accelerator: the ``Accelerator`` that has prepared the model and its (inner) optimizers.
        model: the prepared model.
        inner_steps: optimizer steps between two rounds; hundreds for large models.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum, 0 for none.
        enabled: False turns it off, so that gradients are all-reduced in every step.

    Raises:
        SettingError: a value is out of its range; otherwise see ``LocalSGDContext``.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        inner_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        enabled: bool = True,
    ) -> None:
        if not outer_lr > 0:
            raise SettingError(f"outer_lr is {outer_lr}, but it is greater than 0")
        if not 0 <= outer_momentum < 1:
            raise SettingError(f"outer_momentum is {outer_momentum}, but it is at least 0 and less than 1")
        super().__init__(accelerator, model, inner_steps, enabled, "inner_steps")
        self.inner_steps = inner_steps
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self._start_outer_optimizer(self._trainable_parameters() if enabled else {})

    def _start_outer_optimizer(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Start the outer optimizer at these weights."""
        self._anchor = {name: _make_anchor(each) for name, each in weights.items()}
        group = {"params": list(self._anchor.values())}
        lr, momentum = self.outer_lr, self.outer_momentum
        self._outer = torch.optim.SGD([group], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def __enter__(self) -> Any:
        super().__enter__()
        if self.enabled and not self._steps_since_sync:
            self._refresh_anchor()
        return self

    @torch.no_grad()
    def _refresh_anchor(self) -> None:
        """Copy the weights to the anchor: outside of a block they may have been trained or loaded."""
        for name, parameter in self._trainable_parameters().items():
            anchor = self._anchor.get(name)
            if anchor is not None and not torch.equal(anchor.to(parameter.dtype), parameter):
                anchor.copy_(parameter)

    @torch.no_grad()
    def _combine_copies(self) -> None:
        parameters = self._trainable_parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        for parameter, mean in iterate_means(parameters.values()):
            name = names[id(parameter)]
            if name in self._anchor:
                self._anchor[name].grad = self._anchor[name] - mean
            else:  # it was frozen until now: this mean is where it starts from
                self._anchor[name] = _make_anchor(mean)
                self._outer.param_groups[0]["params"].append(self._anchor[name])
        self._outer.step()
        self._outer.zero_grad()
        for name, parameter in parameters.items():
            parameter.copy_(self._anchor[name])
        self._average_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return also the anchor and the outer optimizer; see ``LocalSGDContext.state_dict``."""
        outer_state = {"anchor": dict(self._anchor), "outer": self._outer.state_dict()}
        return {**super().state_dict(), **outer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load also the anchor and the outer optimizer; see ``LocalSGDContext.load_state_dict``."""
        super().load_state_dict(state_dict)
        if not self.enabled or not state_dict["anchor"]:  # it was not enabled
            return
        devices = {name: parameter.device for name, parameter in self._trainable_parameters().items()}
        self._start_outer_optimizer(
            {name: value.to(devices.get(name)) for name, value in state_dict["anchor"].items()}
        )
        self._outer.load_state_dict(state_dict["outer"])


def _make_anchor(value: torch.Tensor) -> torch.Tensor:
    """Return a copy for the outer optimizer, in float32 at least."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


# --- all-reduced means of many tensors, in few collectives


def iterate_means(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor with its mean over the ranks; the tensors themselves are not changed.

    A mean has the tensor's shape and dtype; for 16-bit floats it is float32, since a sum of 16-bit weights
    loses the progress of a few steps. Integers and booleans have no mean: they get rank 0's value. A
    collective call: all ranks pass tensors of the same shapes and dtypes, in the same order.

    Args:
        tensors: tensors of any shapes, dtypes and devices.
    """
    for bucket in _split_into_buckets(tensors):
        wire = torch.float32 if bucket[0].dtype in _HALVES else bucket[0].dtype
        flat = torch.cat([tensor.detach().reshape(-1).to(_wire_device(tensor), wire) for tensor in bucket])
        has_mean = wire.is_floating_point or wire.is_complex
        flat = collective.reduce(flat, "mean") if has_mean else collective.broadcast(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            yield tensor, part.view(tensor.shape).to(tensor.device)


@torch.no_grad()
def average_in_place(tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors, in place, by their means over the ranks (see ``iterate_means``)."""
    for tensor, mean in iterate_means(tensors):
        tensor.copy_(mean)


def _wire_device(tensor: torch.Tensor) -> torch.device:
    """Return the device of the collective: a process group of devices may not support CPU tensors."""
    world = worlds.current()
    return tensor.device if world is None or world.size == 1 else world.device


def _split_into_buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield buckets of tensors of one dtype; the order depends on shapes and dtypes alone."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    for _, same in groupby(sorted(nonempty, key=lambda each: str(each.dtype)), key=lambda each: each.dtype):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def sync_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make optimizer state (moments, counters) equal on all ranks: averaged, its options from rank 0.

    Copies of a model that step with different moments drift apart even when their gradients are equal. State
    that only some ranks have, because a parameter had no gradient on the others, is dropped on all. State
    with integers (8-bit optimizers) has no mean: all ranks get rank 0's.
    """
    groups = optimizer.param_groups
    # Learning rates and the like: a step skipped on one rank delays its schedule there.
    options = [
        {key: value for key, value in group.items() if key != "params" and not torch.is_tensor(value)}
        for group in groups
    ]
    for group, values in zip(groups, collective.broadcast_object(options), strict=True):
        group.update(values)
    owned = [parameter for group in groups for parameter in group["params"]]
    state: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
    local_shapes = [_describe_state(state.get(parameter, {})) for parameter in owned]
    by_rank = collective.compare_objects(local_shapes, "sync_optimizer_state")
    same = [all(each == own[0] for each in own) for own in zip(*by_rank, strict=True)]
    for parameter, is_same in zip(owned, same, strict=True):
        if not is_same:
            optimizer.state.pop(parameter, None)
    num_dropped = same.count(False)
    if num_dropped and collective.rank() == 0:
        logger.warning(
            "the optimizer's state of %d parameters differs in kind between ranks: dropped", num_dropped
        )
    tables = [state[parameter] for parameter in owned if parameter in state]
    averaged, copied = list[torch.Tensor](), list[torch.Tensor]()
    for table in tables:
        tensors = [value for _, value in sorted(table.items()) if torch.is_tensor(value)]
        # The codes of an 8-bit optimizer go with the scales of their own rank; a step count is one number.
        has_codes = any(
            value.numel() > 1 and not (value.is_floating_point() or value.is_complex()) for value in tensors
        )
        (copied if has_codes else averaged).extend(tensors)
    average_in_place(averaged)
    if copied:
        collective.broadcast(copied)
    plain = [{key: value for key, value in table.items() if not torch.is_tensor(value)} for table in tables]
    if any(plain):
        for table, values in zip(tables, collective.broadcast_object(plain), strict=True):
            table.update(values)


def _describe_state(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (key, tuple(value.shape), str(value.dtype)) if torch.is_tensor(value) else (key,)
        for key, value in sorted(state.items())
    ]
