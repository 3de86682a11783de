"""What LocalSGD and DiLoCo have in common: steps taken apart, rounds in which all processes meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import CollectiveError, PrepareError, SettingError
from accelerate.outer.average import average, settle
from accelerate.world import collective
from accelerate.world import world as worlds


class UnsuitedStrategyError(PrepareError, NotImplementedError):
    """Processes cannot train apart under this strategy."""


class Rounds(ABC):
    """A ``with`` block in which every process trains its own copy of a model, and rounds in which they meet.

    Gradients are not exchanged inside. After every ``every`` optimizer steps, and at the end of the block,
    all processes meet. A process that leaves the block earlier than others (its data ended, it broke out)
    takes part in their rounds with what it has until all have left. After an exception there is no last
    round: the copies stay as they are.

    At the end all processes have the same weights, and also the same state of optimizers, schedulers and loss
    scale, so that training may go on in the usual way.

    Args:
        accelerator: the ``Accelerator`` that has prepared the model and its optimizers.
        model: the prepared model.
        every: optimizer steps of each process from round to round; micro-batches of an accumulation that do
            not step do not count.
        enabled: False makes all of this do nothing.

    Attributes:
        num_steps: optimizer steps of this process inside such blocks so far.

    Raises:
        SettingError: ``every`` is not a positive number.
        PrepareError: the model is not prepared by this accelerator, or its strategy does not keep a whole
            copy of the model on every process.
    """

    def __init__(self, accelerator: Any, model: nn.Module, every: int, enabled: bool, option: str) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise SettingError(f"{option} is {every!r}, but it is a number of steps and at least 1")
        self.accelerator, self.model, self.enabled = accelerator, model, enabled
        self.num_steps = 0
        self.model_sync_obj: Any = None
        self._every, self._since = every, 0
        if enabled:
            self.model = self._prepared(model)

    def _prepared(self, model: nn.Module) -> nn.Module:
        """The prepared object, also when the user's own is given, whose gradients would not stay here."""
        strategy = self.accelerator.strategy
        if strategy.owns_step or not strategy.replicates:
            raise UnsuitedStrategyError(
                f"{type(self).__name__} does not work with the strategy {strategy.name!r}",
                why="every process must hold a whole copy of the model and step by itself",
                fix="use it with plain data parallel training, or pass enabled=False",
            )

        def own(module: nn.Module) -> nn.Module:
            return self.accelerator.unwrap_model(module, keep_torch_compile=False)

        for known in self.accelerator._models:
            if known is model or own(known) is own(model):
                return known
        raise PrepareError(
            f"{type(self).__name__} was given a model that this accelerator has not prepared",
            fix="model, optimizer = accelerator.prepare(model, optimizer), and then pass that model",
        )

    def __enter__(self) -> Any:
        if self.enabled:
            if self.model_sync_obj is not None:
                raise PrepareError(f"this {type(self).__name__} block is entered already")
            self.model_sync_obj = self.accelerator.strategy.apart(self.model)
            self.model_sync_obj.__enter__()
            self.accelerator.strategy.trains_apart = True
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
        self.accelerator.strategy.trains_apart = False
        # After an error the others may be anywhere: a collective call would wait for them, or they for it.
        if type is None:
            while not self._meet(leaving=True):
                pass
            self._settle()

    def step(self) -> None:
        """To be called after every ``optimizer.step()``; begins a round when it is time.

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
            self._since += 1
            if self._since >= self._every:
                self._meet()

    def _meet(self, *, leaving: bool = False) -> bool:
        """One round of all processes; whether all of them are leaving."""
        world = worlds.current()
        device = None if world is None else world.device
        said = torch.tensor([leaving, self._since > 0], dtype=torch.int64, device=device)
        gone, stepped = collective.reduce(said, "sum").tolist()
        if stepped:
            self._round()
            self._since = 0
        return gone == collective.size()

    @abstractmethod
    def _round(self) -> None:
        """Brings the copies together; a collective call."""

    def _settle(self) -> None:
        """Makes all equal that a usual step would have kept equal."""
        if collective.size() == 1:
            return
        for optimizer in self._optimizers():
            settle(optimizer)
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.load_state_dict(collective.agree(scaler.state_dict()))
        for scheduler in self.accelerator._schedulers:
            scheduler.load_state_dict(collective.agree(scheduler.state_dict()))

    # --- what is trained

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by the user's names; a tied one once."""
        module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return {name: each for name, each in module.named_parameters() if each.requires_grad}

    def _buffers(self) -> list[torch.Tensor]:
        """Buffers that belong to the state of the model, such as running statistics."""
        module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        saved = module.state_dict(keep_vars=True)
        return [saved[name] for name, _ in module.named_buffers() if name in saved]

    def _average_buffers(self) -> None:
        average(self._buffers())

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """The user's optimizers of this model."""
        mine = {id(parameter) for parameter in self.model.parameters()}
        for wrapped in self.accelerator._optimizers:
            if any(id(each) in mine for group in wrapped.param_groups for each in group["params"]):
                yield wrapped.optimizer

    # --- saving in the middle

    def state_dict(self) -> dict[str, Any]:
        """Where this block is, with the copies of all processes; for ``register_for_checkpointing``.

        A collective call. The state is whole on rank 0, which saves it.
        """
        if not self.enabled:
            return {"steps": self.num_steps, "since": 0, "ranks": None}
        local = {
            "model": {name: value.detach() for name, value in self._own().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers()],
        }
        return {"steps": self.num_steps, "since": self._since, "ranks": _on_main(_on_host(local))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state back; the model and its optimizers get this process's part of it.

        On another number of processes the copies are averaged first, and the optimizers of the first ones
        are taken.

        Raises:
            CollectiveError: it was saved on a rank other than 0.
        """
        self.num_steps, self._since = state_dict["steps"], state_dict["since"]
        ranks: list[dict[str, Any]] | None = state_dict["ranks"]
        if ranks is None:  # it was not enabled: all copies were one
            return
        if not ranks:
            raise CollectiveError(
                "this state has no weights in it", why="state_dict() is whole on rank 0 only: save that one"
            )
        mine = ranks[collective.rank() % len(ranks)]
        models = [mine["model"]] if len(ranks) == collective.size() else [each["model"] for each in ranks]
        with torch.no_grad():
            for name, value in self._own().items():
                if models[0][name].is_floating_point():
                    value.copy_(torch.stack([model[name].double() for model in models]).mean(0))
                else:
                    value.copy_(models[0][name])
        for optimizer, state in zip(self._optimizers(), mine["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def _own(self) -> dict[str, torch.Tensor]:
        """What differs between processes: parameters that train, and buffers."""
        buffers = {f"buffer {index}": value for index, value in enumerate(self._buffers())}
        return {**self._parameters(), **buffers}


def _on_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {key: _on_host(value) for key, value in tree.items()}
    return [_on_host(value) for value in tree] if isinstance(tree, list) else tree


def _on_main(value: Any) -> list[Any]:
    """Every rank's value on rank 0, in rank order; nothing on the others."""
    if collective.size() == 1:
        return [value]
    every: list[Any] | None = [None] * collective.size() if collective.rank() == 0 else None
    torch.distributed.gather_object(value, every)
    return every or []
