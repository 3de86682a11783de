"""What ``prepare`` makes of a model, its optimizer and its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.strategy.megatron.build import (
    build,
    config_of,
    emptied,
    fill,
    from_rank_zero,
    ruled,
    trained,
    wanted_of,
)
from accelerate.strategy.megatron.engine import MegatronEngine
from accelerate.strategy.megatron.families import family_of
from accelerate.strategy.megatron.layout import open_groups, seed_engine
from accelerate.strategy.megatron.optimizer import Groups, Stepper
from accelerate.strategy.megatron.schedule import MegatronLMDummyScheduler, schedule_of
from accelerate.strategy.megatron.states import Whole

if TYPE_CHECKING:
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin

_FORMATS = {"no": torch.float32, "bf16": torch.bfloat16}


def engine_of(
    strategy: Any, model: Any, optimizers: list[torch.optim.Optimizer]
) -> tuple[MegatronEngine, Whole, Groups | None]:
    """The engine's model with the weights of ``model``, which is left without values.

    Raises:
        PrepareError: the model or the optimizer does not fit; nothing has changed then.
    """
    if len(optimizers) > 1:
        raise PrepareError(
            f"{len(optimizers)} optimizers for one model",
            why="Megatron-LM steps one optimizer for a model",
            fix="make one optimizer with several groups of parameters",
        )
    layout, plugin, device = strategy.layout, strategy.plugin, strategy.world.device
    family, config = family_of(model), model.config
    rules = family.rules(config)
    groups = Groups(optimizers[0], model) if optimizers else None
    wanted = wanted_of(model)
    asks = {id(rule): trained(rule, wanted) for rule in rules.values()}
    if groups is not None:
        for rule in rules.values():
            groups.place(rule)
    settings = config_of(family, config, plugin, layout, _FORMATS[strategy.request.precision], device)
    open_groups(layout, strategy.world.hardware.backend)
    seed_engine(device)
    gpt = build(family, config, settings, layout)
    fill(gpt, rules, from_rank_zero(model, device), layout)
    for rule, parameter in ruled(gpt, rules):
        parameter.requires_grad_(asks[id(rule)])
    gpt.to(device)
    engine = MegatronEngine(strategy, _wrapped(gpt, settings, plugin))
    arguments = family.model(config)
    rotary = arguments["position_embedding_type"] == "rope"
    emptied(model)
    engine._own(model, arguments["vocab_size"], rotary)
    engine.train(model.training)
    return engine, Whole(engine, rules), groups


def _wrapped(gpt: nn.Module, settings: Any, plugin: MegatronLMPlugin) -> nn.Module:
    """In the engine's own wrappers: of 16-bit weights, and of replicas that average gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if plugin.custom_prepare_model_function is not None:
        gpt = plugin.custom_prepare_model_function(gpt)
    if settings.bf16:
        gpt = Float16Module(settings, gpt)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=bool(plugin.use_distributed_optimizer)
    )
    return DistributedDataParallel(settings, options, gpt)


def stepper_of(
    engine: MegatronEngine, whole: Whole, groups: Groups | None, optimizer: torch.optim.Optimizer
) -> Stepper:
    """The engine's optimizer around the user's, which gets the engine's parameters."""
    assert groups is not None
    pairs = [(rule, p) for rule, p in (*whole.parts, *whole.copies) if p is not None]
    groups.follow(optimizer, pairs)
    return Stepper(optimizer, engine, groups)


def scheduled(scheduler: Any, plugin: MegatronLMPlugin, copies: int) -> Any:
    """A schedule of torch in place of the engine's stand-in; others stay."""
    if isinstance(scheduler, MegatronLMDummyScheduler):
        return schedule_of(scheduler, plugin, copies)
    return scheduler
