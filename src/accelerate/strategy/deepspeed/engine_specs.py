"""The engines that one ``prepare`` makes: each with a model, an optimizer and a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import PrepareBundle
from accelerate.strategy.deepspeed.config_tree import DummyOptim, as_param_groups
from accelerate.strategy.deepspeed.engine_config import DeepSpeedConfigInputs, EngineConfig, build_config

if TYPE_CHECKING:
    from accelerate.strategy.deepspeed.engine_handle import DeepSpeedEngineRegistry
    from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin


@dataclass(frozen=True)
class EngineSpec:
    """One engine that ``prepare`` will make.

    Attributes:
        model: the user's, or the engine over it that has no optimizer yet.
        optimizer: of torch, or a ``DummyOptim``; None for a model alone.
        scheduler: one that DeepSpeed advances, or None.
        engine_config: the configuration.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    engine_config: EngineConfig


@dataclass(frozen=True)
class DeepSpeedPrepareContext:
    """The context of one ``prepare``.

    Attributes:
        engines: the existing engines.
        plugin: the selected plugin.
        steps: micro-batches per step.
        precision: mixed precision.
        processes: the world size.
        host: whether the device is the CPU.
        shared: whether a loader's batch is that of all ranks (``split_batches``).
    """

    engines: DeepSpeedEngineRegistry
    plugin: DeepSpeedPlugin
    steps: int
    precision: str
    processes: int
    host: bool
    shared: bool


def engine_specs(context: DeepSpeedPrepareContext, bundle: PrepareBundle) -> Iterator[EngineSpec]:
    """Yield the engines that a bundle needs; changes nothing.

    Raises:
        PrepareError: an optimizer or a stand-in belongs to no model, or to two, or two to one.
        SettingError: the configuration contradicts what is prepared.
    """
    models = list(dict.fromkeys(bundle.objects_of("model")))
    engines = context.engines
    left = [
        o
        for o in _unique(bundle.objects_of("optimizer"))
        if engines.find_by_optimizer(_user_optimizer(o)) is None
    ]
    schedulers = [s for s in _unique(bundle.objects_of("scheduler")) if _runs_in_engine(s)]
    pairs: list[tuple[Any, Any]] = []
    for model in models:
        existing_handle = engines.find(model)
        if existing_handle is not None and existing_handle.optimizer is not None:
            continue
        optimizers = [o for o in left if _trains_model(o, model, alone=len(models) == 1)]
        if len(optimizers) > 1:
            raise _several_optimizers_error(f"{len(optimizers)} optimizers for one {type(model).__name__}")
        for optimizer in optimizers:
            _refuse_shared_optimizer(optimizer, model, models)
        left = [o for o in left if o not in optimizers]
        if existing_handle is None or optimizers:
            pairs.append((model, optimizers[0] if optimizers else None))
    for optimizer in left:
        handle = next(
            (m for m in engines if m.optimizer is None and _trains_model(optimizer, m.module)), None
        )
        if handle is None:
            raise _stray_optimizer_error(optimizer)
        pairs.append((handle.engine, optimizer))
    for model, optimizer in pairs:
        engine_scheduler = next(
            (s for s in schedulers if optimizer is not None and _belongs_to(s, optimizer)), None
        )
        schedulers = [s for s in schedulers if s is not engine_scheduler]
        yield _make_spec(context, bundle, model, optimizer, engine_scheduler)
    for scheduler in schedulers:
        if hasattr(scheduler, "prepared_as"):
            raise _stray_scheduler_error(scheduler)


def _make_spec(
    context: DeepSpeedPrepareContext, bundle: PrepareBundle, model: Any, optimizer: Any, scheduler: Any
) -> EngineSpec:
    handle = context.engines.find(model)
    inputs = DeepSpeedConfigInputs(
        model if handle is None else handle.module,
        context.steps,
        context.precision,
        context.processes,
        context.host,
        [_micro_batch_size(context, loader) for loader in bundle.objects_of("loader")],
        optimizer,
        scheduler,
    )
    return EngineSpec(model, optimizer, scheduler, build_config(context.plugin, inputs))


def _micro_batch_size(context: DeepSpeedPrepareContext, loader: Any) -> int | None:
    """Return the samples per rank and micro-batch, None where the loader does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int):
        return None
    return max(1, size // context.processes) if context.shared else size


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _user_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer of a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _optimizer_params(optimizer: Any) -> set[Any]:
    dummy = isinstance(optimizer, DummyOptim)
    groups = as_param_groups(optimizer.params) if dummy else optimizer.param_groups
    return {parameter for group in groups for parameter in group["params"]}


def _trains_model(optimizer: Any, model: nn.Module, alone: bool = False) -> bool:
    """Return whether the optimizer has parameters of ``model``."""
    parameters = _optimizer_params(optimizer)
    return not parameters.isdisjoint(model.parameters()) or (alone and not parameters)


def _runs_in_engine(scheduler: Any) -> bool:
    """Return whether DeepSpeed advances the schedule: a ``DummyScheduler`` or a class of DeepSpeed."""
    stands_in = getattr(scheduler, "prepared_as", "") == "scheduler"
    return stands_in or type(scheduler).__module__.startswith("deepspeed.")


def _belongs_to(scheduler: Any, optimizer: Any) -> bool:
    made_for = getattr(scheduler, "optimizer", None)
    return made_for is None or made_for is optimizer or _user_optimizer(made_for) is optimizer


def _several_optimizers_error(what: str) -> PrepareError:
    return PrepareError(
        what,
        why="a DeepSpeed engine steps one optimizer",
        fix="use the groups of one optimizer: torch.optim.AdamW([{'params': ..., 'lr': ...}, ...])",
    )


def _refuse_shared_optimizer(optimizer: Any, model: nn.Module, models: list[nn.Module]) -> None:
    """Refuse an optimizer with parameters of two models.

    Raises:
        PrepareError: it has.
    """
    others = _optimizer_params(optimizer) - set(model.parameters())
    shared = [each for each in models if each is not model and not others.isdisjoint(each.parameters())]
    if shared:
        raise PrepareError(
            f"one {type(optimizer).__name__} has parameters of two models, a {type(model).__name__} and a "
            f"{type(shared[0]).__name__}",
            why="each model gets a DeepSpeed engine of its own, which steps the parameters of its model",
            fix="give each model an optimizer, or make one model of both: "
            "torch.nn.ModuleDict({'policy': policy, 'value': value})",
        )


def _stray_optimizer_error(optimizer: Any) -> PrepareError:
    return PrepareError(
        f"the {type(optimizer).__name__} holds parameters of no model that is prepared with it",
        why="DeepSpeed takes a model and its optimizer together",
        fix="model, optimizer = accelerator.prepare(model, optimizer)",
    )


def _stray_scheduler_error(scheduler: Any) -> PrepareError:
    return PrepareError(
        f"the {type(scheduler).__name__} belongs to no optimizer that is prepared with it",
        why="DeepSpeed makes its schedule when it is made itself",
        fix="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
    )
