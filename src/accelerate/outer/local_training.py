"""The common base of LocalSGD and DiLoCo: local steps, and rounds that combine the copies of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import CollectiveError, PrepareError, SettingError
from accelerate.outer.bucketed_averaging import average_in_place, sync_optimizer_state
from accelerate.world import collective
from accelerate.world import world as worlds


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
        """Return the progress of this block and the copies of all ranks, for ``register_for_checkpointing``.

        A collective call. The state is complete on rank 0, which saves it.
        """
        if not self.enabled:
            return {"steps": self.num_steps, "since": 0, "ranks": None}
        local = {
            "model": {name: value.detach() for name, value in self._rank_tensors().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers()],
            # A step that overflowed on one rank has lowered its loss scale and held its schedules only.
            "schedulers": [scheduler.state_dict() for scheduler in self.accelerator._schedulers],
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
        }
        return {
            "steps": self.num_steps,
            "since": self._steps_since_sync,
            "ranks": _gather_on_main(_copy_to_cpu(local)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; the model and its optimizers get this rank's copy.

        With another world size the copies are averaged first, and the optimizer states of the first ranks
        are taken.

        Raises:
            CollectiveError: it was saved on a rank other than 0.
        """
        self.num_steps, self._steps_since_sync = state_dict["steps"], state_dict["since"]
        ranks: list[dict[str, Any]] | None = state_dict["ranks"]
        if ranks is None:  # it was not enabled: all copies were one
            return
        if not ranks:
            raise CollectiveError(
                "this state has no weights in it", why="state_dict() is whole on rank 0 only: save that one"
            )
        own_copy = ranks[collective.rank() % len(ranks)]
        models = (
            [own_copy["model"]]
            if len(ranks) == collective.world_size()
            else [each["model"] for each in ranks]
        )
        with torch.no_grad():
            for name, value in self._rank_tensors().items():
                if models[0][name].is_floating_point():
                    value.copy_(torch.stack([model[name].double() for model in models]).mean(0))
                else:
                    value.copy_(models[0][name])
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


def _copy_to_cpu(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: _copy_to_cpu(value) for key, value in tree.items()}
    return [_copy_to_cpu(value) for value in tree] if isinstance(tree, list) else tree


def _gather_on_main(value: Any) -> list[Any]:
    """Gather the values of all ranks on rank 0, in rank order; return an empty list on the others."""
    if collective.world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * collective.world_size() if collective.rank() == 0 else None
    torch.distributed.gather_object(value, values)
    return values or []
