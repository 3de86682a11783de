"""The engines that one ``prepare`` makes: each with a model, an optimizer and a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import PrepareBundle
from accelerate.strategy.deepspeed import config_tree
from accelerate.strategy.deepspeed.config_tree import DummyOptim, as_param_groups, get_key
from accelerate.strategy.deepspeed.engine_config import (
    DeepSpeedConfigInputs,
    EngineConfig,
    build_config,
    refuse_second_schedule,
)
from accelerate.strategy.protocol.flat_optimizers import check_elementwise

if TYPE_CHECKING:
    from accelerate.strategy.deepspeed.engine_handle import DeepSpeedEngineRegistry
    from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin


@dataclass(frozen=True)
class EngineSpec:
    """One engine that ``prepare`` will make.

    Attributes:
        model: the user's, or the engine over it that has no optimizer yet, or none since ``free_memory``.
        optimizer: of torch, or a ``DummyOptim``; None for a model alone.
        scheduler: one that DeepSpeed advances, or None.
        engine_config: the configuration.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    engine_config: EngineConfig


def engine_specs(
    bundle: PrepareBundle,
    engines: DeepSpeedEngineRegistry,
    plugin: DeepSpeedPlugin,
    precision: str,
    processes: int,
    *,
    data_shards: int,
    host: bool,
    schedule_advances: int,
) -> Iterator[EngineSpec]:
    """Yield the engines that a bundle needs; changes nothing.

    Args:
        bundle: the objects of one ``prepare``.
        engines: the existing engines.
        plugin: the selected plugin.
        precision: mixed precision.
        processes: the world size.
        data_shards: the ranks that read different samples.
        host: whether the device is the CPU.
        schedule_advances: how often an optimizer step advances a schedule of torch.

    Raises:
        PrepareError: an optimizer or a stand-in belongs to no model, or to two, or two to one.
        SettingError: the configuration contradicts what is prepared.
    """
    schedulers = sorted(_unique(bundle.objects_of("scheduler")), key=_is_advanced, reverse=True)
    for model, optimizer in _pair_optimizers(bundle, engines):
        scheduler = next((s for s in schedulers if optimizer is not None and _belongs_to(s, optimizer)), None)
        schedulers = [s for s in schedulers if s is not scheduler]
        is_engine = engines.find(model) is not None or any(model is e for e in engines.released_engines())
        module = model.module if is_engine else model
        inputs = DeepSpeedConfigInputs(
            module,
            bundle.accumulation_steps,
            precision,
            processes,
            host,
            bundle.batch_sizes(data_shards),
            optimizer,
            scheduler,
            schedule_advances,
        )
        engine_config = build_config(plugin, inputs)
        _refuse_unsupported_params(module, optimizer, engine_config.config)
        yield EngineSpec(model, optimizer, scheduler if _is_advanced(scheduler) else None, engine_config)
    for scheduler in schedulers:
        if hasattr(scheduler, "prepared_as"):
            raise _stray_scheduler_error(scheduler)
        handle = engines.find_by_optimizer(_user_optimizer(getattr(scheduler, "optimizer", None)))
        if handle is not None and getattr(scheduler, "scheduler", scheduler) is not handle.scheduler:
            refuse_second_schedule(scheduler, handle.config)


def add_configured_optimizer(
    bundle: PrepareBundle, engines: DeepSpeedEngineRegistry, config: Mapping[str, Any]
) -> None:
    """Add a stand-in for the optimizer of the configuration to a model without one, as 1.x does.

    Not to a model beside one that trains, such as a reference model. Where values of the optimizer are
    ``"auto"``, the program prepares the ``DummyOptim`` that has them.
    """
    section, models = config.get("optimizer"), _unique(bundle.objects_of("model"))
    is_alone = len(models) == 1 and not bundle.objects_of("optimizer") and not engines.trained_engines()
    if section and is_alone and not any(config_tree.auto_keys(section)):
        params = [p for p in models[0].parameters() if p.requires_grad]
        if params:
            bundle.objects.append(DummyOptim(params))
            bundle.kinds.append("optimizer")
            bundle.place_on_device.append(False)


def _pair_optimizers(bundle: PrepareBundle, engines: DeepSpeedEngineRegistry) -> list[tuple[Any, Any]]:
    """Return each model that needs an engine with its optimizer, or None."""
    models = list(dict.fromkeys(bundle.objects_of("model")))
    left = [
        o
        for o in _unique(bundle.objects_of("optimizer"))
        if engines.find_by_optimizer(_user_optimizer(o)) is None
    ]
    pairs: list[tuple[Any, Any]] = []
    for model in models:
        existing_handle = engines.find(model)
        if existing_handle is not None and existing_handle.optimizer is not None:
            continue
        optimizers = [o for o in left if _trains_model(o, model, alone=len(models) == 1)]
        if len(optimizers) > 1:
            raise PrepareError(
                f"{len(optimizers)} optimizers for one {type(model).__name__}",
                why="a DeepSpeed engine steps one optimizer",
                fix="use the groups of one optimizer: torch.optim.AdamW([{'params': ..., 'lr': ...}, ...])",
            )
        for optimizer in optimizers:
            _refuse_shared_optimizer(optimizer, model, [*models, *(handle.module for handle in engines)])
        left = [o for o in left if o not in optimizers]
        if existing_handle is None or optimizers:
            pairs.append((model, optimizers[0] if optimizers else None))
    untrained = [handle.engine for handle in engines if handle.optimizer is None]
    for optimizer in left:
        # transformers' Trainer keeps its DeepSpeedEngine after free_memory, and goes on with it.
        candidates = (*untrained, *engines.released_engines())
        engine = next((each for each in candidates if _trains_model(optimizer, each.module)), None)
        if engine is None:
            raise _stray_optimizer_error(optimizer)
        _refuse_shared_optimizer(optimizer, engine.module, [each.module for each in engines])
        pairs.append((engine, optimizer))
    return pairs


def _refuse_unsupported_params(model: nn.Module, optimizer: Any, config: Mapping[str, Any]) -> None:
    """Refuse parameters that DeepSpeed fails on later, without their names, and optimizers of matrices.

    Raises:
        PrepareError: one has no dimensions, no elements in stage 3, or a dtype that does not go with others;
            or the optimizer cannot step flat vectors.
    """
    stage = get_key(config, "zero_optimization.stage")
    if stage:
        check_elementwise(optimizer, "DeepSpeed")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and not hasattr(parameter, "ds_id"):
            raise PrepareError(
                f"the parameter {name} has 0 dimensions",
                why="DeepSpeed broadcasts parameters as bytes, and needs at least one dimension",
                fix="make it a vector of one element: nn.Parameter(torch.ones(1))",
            )
        if stage == 3 and not getattr(parameter, "ds_numel", parameter.numel()):
            raise PrepareError(
                f"the parameter {name} has no elements",
                why="stage 3 does not all-gather it, and then finds it partitioned in the forward",
                fix="leave it out of the model, make it a buffer, or use stage 2",
            )
    is_cast = any(get_key(config, f"{half}.enabled") is True for half in ("fp16", "bf16"))
    if not is_cast and optimizer is not None:
        _refuse_mixed_dtypes(model, optimizer, config)


def _refuse_mixed_dtypes(model: nn.Module, optimizer: Any, config: Mapping[str, Any]) -> None:
    stage = get_key(config, "zero_optimization.stage")
    # DeepSpeed casts the shards that it keeps on the host.
    is_strict = stage == 3 and get_key(config, "zero_optimization.offload_param.device") in (None, "none")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[p for p in group["params"] if p in names and p.requires_grad] for group in _groups(optimizer)]
    why = "in stages 1 and 2 the parameters of a group become one vector, of one dtype"
    fix = "give them one dtype, such as model.float(), or give each dtype a group of its own"
    if stage == 0:
        groups = [[p] for group in groups for p in group if p.dtype is torch.float64]
        why, fix = "stage 0 does not reduce gradients in float64", "use model.float(), or another stage"
    elif stage == 3:
        groups = [[p for group in groups for p in group]]
        why = "stage 3 keeps the shards of all trained parameters in one vector, of one dtype"
        fix = "give them one dtype, such as model.float()"
    for group in groups:
        first_names = {p.dtype: names[p] for p in reversed(group)}
        if stage == 0 or (len(first_names) > 1 and (is_strict or torch.float64 in first_names)):
            listed = ", ".join(f"{name} in {dtype}" for dtype, name in first_names.items())
            raise PrepareError(f"DeepSpeed cannot train {listed} in stage {stage}", why=why, fix=fix)


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _user_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer of a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _optimizer_params(optimizer: Any) -> set[Any]:
    return {parameter for group in _groups(optimizer) for parameter in group["params"]}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    stands_in = isinstance(optimizer, DummyOptim)
    return as_param_groups(optimizer.params) if stands_in else optimizer.param_groups


def _trains_model(optimizer: Any, model: nn.Module, alone: bool = False) -> bool:
    """Return whether the optimizer has parameters of ``model``."""
    parameters = _optimizer_params(optimizer)
    return not parameters.isdisjoint(model.parameters()) or (alone and not parameters)


def _is_advanced(scheduler: Any) -> bool:
    """Return whether DeepSpeed advances it: a ``DummyScheduler``, and a schedule of a class of its own."""
    is_dummy = getattr(scheduler, "prepared_as", "") == "scheduler"
    return is_dummy or type(scheduler).__module__.startswith("deepspeed.")


def _belongs_to(scheduler: Any, optimizer: Any) -> bool:
    made_for = getattr(scheduler, "optimizer", None)
    return made_for is None or made_for is optimizer or _user_optimizer(made_for) is optimizer


def _refuse_shared_optimizer(optimizer: Any, model: nn.Module, models: list[nn.Module]) -> None:
    """Refuse an optimizer with parameters of two models.

    Raises:
        PrepareError: it has.
    """
    others = _optimizer_params(optimizer) - set(model.parameters())
    shared = [each for each in models if not others.isdisjoint(each.parameters())]
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
