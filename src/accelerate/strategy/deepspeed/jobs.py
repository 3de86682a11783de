"""Which engines one ``prepare`` makes: models, and the optimizers and schedules that go into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import Bundle
from accelerate.strategy.deepspeed.fill import Filled, Wanted, fill
from accelerate.strategy.deepspeed.tree import DummyOptim, parameter_groups

if TYPE_CHECKING:
    from accelerate.strategy.deepspeed.engine import Engines
    from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin


@dataclass(frozen=True)
class Job:
    """One engine that is to be made.

    Attributes:
        model: the user's, or the engine over it that has no optimizer yet.
        optimizer: of torch, or a stand-in; None for a model alone.
        scheduler: one that the engine advances, or None.
        filled: the configuration.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    filled: Filled


@dataclass(frozen=True)
class Asked:
    """What jobs are made by.

    Attributes:
        engines: those that there are.
        plugin: the one that is selected.
        steps: micro-batches per step.
        precision: the number format.
        processes: how many train together.
        host: whether the device is the CPU.
        shared: a loader's batch is that of all processes.
    """

    engines: Engines
    plugin: DeepSpeedPlugin
    steps: int
    precision: str
    processes: int
    host: bool
    shared: bool


def jobs_of(asked: Asked, bundle: Bundle) -> Iterator[Job]:
    """The engines that a bundle needs. Changes nothing.

    Raises:
        PrepareError: an optimizer or a stand-in belongs to no model, or two to one.
        SettingError: the configuration contradicts what is prepared.
    """
    models = list(dict.fromkeys(bundle.of("model")))
    engines = asked.engines
    left = [o for o in _distinct(bundle.of("optimizer")) if engines.stepping(_plain(o)) is None]
    schedulers = [s for s in _distinct(bundle.of("scheduler")) if _engines_own(s)]
    pairs: list[tuple[Any, Any]] = []
    for model in models:
        known = engines.of(model)
        if known is not None and known.optimizer is not None:
            continue
        mine = [o for o in left if _for(o, model, alone=len(models) == 1)]
        if len(mine) > 1:
            raise _several(f"{len(mine)} optimizers for one {type(model).__name__}")
        left = [o for o in left if o not in mine]
        if known is None or mine:
            pairs.append((model, mine[0] if mine else None))
    for optimizer in left:
        made = next((m for m in engines if m.optimizer is None and _for(optimizer, m.module)), None)
        if made is None:
            raise _stray(optimizer)
        pairs.append((made.engine, optimizer))
    for model, optimizer in pairs:
        own = next((s for s in schedulers if optimizer is not None and _belongs(s, optimizer)), None)
        schedulers = [s for s in schedulers if s is not own]
        yield _job(asked, bundle, model, optimizer, own)
    for scheduler in schedulers:
        if hasattr(scheduler, "prepared_as"):
            raise _late(scheduler)


def _job(asked: Asked, bundle: Bundle, model: Any, optimizer: Any, scheduler: Any) -> Job:
    known = asked.engines.of(model)
    wanted = Wanted(
        model if known is None else known.module,
        asked.steps,
        asked.precision,
        asked.processes,
        asked.host,
        [_batch(asked, loader) for loader in bundle.of("loader")],
        optimizer,
        scheduler,
    )
    return Job(model, optimizer, scheduler, fill(asked.plugin, wanted))


def _batch(asked: Asked, loader: Any) -> int | None:
    """Samples per process and batch, None where the loader does not tell."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int):
        return None
    return max(1, size // asked.processes) if asked.shared else size


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _plain(optimizer: Any) -> Any:
    """The user's optimizer of a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _members(optimizer: Any) -> set[Any]:
    dummy = isinstance(optimizer, DummyOptim)
    groups = parameter_groups(optimizer.params) if dummy else optimizer.param_groups
    return {parameter for group in groups for parameter in group["params"]}


def _for(optimizer: Any, model: nn.Module, alone: bool = False) -> bool:
    """Whether the optimizer is of parameters of ``model``."""
    held = _members(optimizer)
    return not held.isdisjoint(model.parameters()) or (alone and not held)


def _engines_own(scheduler: Any) -> bool:
    """A stand-in, or one of the engine's classes; schedules of torch stay outside."""
    stands_in = getattr(scheduler, "prepared_as", "") == "scheduler"
    return stands_in or type(scheduler).__module__.startswith("deepspeed.")


def _belongs(scheduler: Any, optimizer: Any) -> bool:
    made_for = getattr(scheduler, "optimizer", None)
    return made_for is None or made_for is optimizer or _plain(made_for) is optimizer


def _several(what: str) -> PrepareError:
    return PrepareError(
        what,
        why="an engine steps one optimizer",
        fix="use the groups of one optimizer: torch.optim.AdamW([{'params': ..., 'lr': ...}, ...])",
    )


def _stray(optimizer: Any) -> PrepareError:
    return PrepareError(
        f"the {type(optimizer).__name__} holds parameters of no model that is prepared with it",
        why="the engine takes a model and its optimizer together",
        fix="model, optimizer = accelerator.prepare(model, optimizer)",
    )


def _late(scheduler: Any) -> PrepareError:
    return PrepareError(
        f"the {type(scheduler).__name__} belongs to no optimizer that is prepared with it",
        why="the engine makes its schedule when it is made itself",
        fix="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
    )
