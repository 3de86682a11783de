"""Build the Megatron-LM engine, optimizer and schedule that ``prepare`` returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from accelerate.core.errors import PrepareError, UnknownNameError
from accelerate.strategy.megatron.engine import MegatronEngine
from accelerate.strategy.megatron.full_state import MegatronFullStateConverter
from accelerate.strategy.megatron.gpt_model import (
    build_gpt,
    drop_values,
    is_trainable,
    load_weights,
    params_with_rules,
    rank_zero_weights,
    trainable_names,
    transformer_config,
)
from accelerate.strategy.megatron.layout import open_groups, seed_dropout
from accelerate.strategy.megatron.model_families import model_family
from accelerate.strategy.megatron.user_optimizer_adapter import MegatronOptimizerStepper, ParamGroupMap

if TYPE_CHECKING:
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin


_FORMATS = {"no": torch.float32, "bf16": torch.bfloat16}


def build_engine(
    strategy: Any, model: Any, optimizers: list[torch.optim.Optimizer]
) -> tuple[MegatronEngine, MegatronFullStateConverter, ParamGroupMap | None]:
    """Build Megatron-LM's model with the weights of ``model``, which is left without values.

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
    family, config = model_family(model), model.config
    rules = family.rules(config)
    groups = ParamGroupMap(optimizers[0], model) if optimizers else None
    trainable_params = trainable_names(model)
    trainable = {id(rule): is_trainable(rule, trainable_params) for rule in rules.values()}
    if groups is not None:
        for rule in rules.values():
            groups.group_index(rule)
    settings = transformer_config(
        family, config, plugin, layout, _FORMATS[strategy.request.precision], device
    )
    open_groups(layout, strategy.world.hardware.backend)
    seed_dropout(device, layout)
    gpt = build_gpt(family, config, settings, layout)
    load_weights(gpt, rules, rank_zero_weights(model, device), layout)
    for rule, parameter in params_with_rules(gpt, rules):
        parameter.requires_grad_(trainable[id(rule)])
    gpt.to(device)
    engine = MegatronEngine(strategy, _wrap_model(gpt, settings, plugin))
    arguments = family.model(config)
    rotary = arguments["position_embedding_type"] == "rope"
    drop_values(model)
    engine._set_base_model(model, arguments["vocab_size"], rotary)
    engine.train(model.training)
    return engine, MegatronFullStateConverter(engine, rules), groups


def _wrap_model(gpt: nn.Module, settings: Any, plugin: MegatronLMPlugin) -> nn.Module:
    """Wrap a GPT in ``Float16Module`` for 16-bit weights, and in ``DistributedDataParallel``."""
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


def build_stepper(
    engine: MegatronEngine,
    converter: MegatronFullStateConverter,
    groups: ParamGroupMap | None,
    optimizer: torch.optim.Optimizer,
) -> MegatronOptimizerStepper:
    """Build Megatron-LM's optimizer around the user's, which gets Megatron-LM's parameters."""
    assert groups is not None
    pairs = [(rule, p) for rule, p in (*converter.params, *converter.copies) if p is not None]
    groups.replace_params(optimizer, pairs)
    return MegatronOptimizerStepper(optimizer, engine, groups)


def replace_dummy_scheduler(scheduler: Any, plugin: MegatronLMPlugin, advances: int) -> Any:
    """Return a torch schedule in place of a ``MegatronLMDummyScheduler``; others stay."""
    if isinstance(scheduler, MegatronLMDummyScheduler):
        return build_lr_schedule(scheduler, plugin, advances)
    return scheduler


STYLES = ("constant", "linear", "cosine", "inverse-square-root")


class MegatronLMDummyScheduler:
    """The placeholder of a schedule that ``prepare`` builds: warm-up, then ``lr_decay_style``.

    Args:
        optimizer: whose learning rates.
        total_num_steps: steps until the end of the decay, counted as for a schedule of torch, which an
            optimizer step advances once for each data parallel rank.
        warmup_num_steps: steps from 0 to the full rate, counted alike.
        kwargs: kept.
    """

    prepared_as: ClassVar[str] = "scheduler"
    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int
    kwargs: dict[str, Any]

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer, self.total_num_steps = optimizer, total_num_steps
        self.warmup_num_steps, self.kwargs = warmup_num_steps, kwargs

    def step(self, *args: Any) -> None:
        """Refused before ``prepare``."""
        raise _not_prepared_error()

    def state_dict(self) -> dict[str, Any]:
        """Refused before ``prepare``."""
        raise _not_prepared_error()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refused before ``prepare``."""
        raise _not_prepared_error()


def _not_prepared_error() -> PrepareError:
    return PrepareError(
        "a MegatronLMDummyScheduler only stands for a schedule",
        fix="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
    )


def build_lr_schedule(dummy: MegatronLMDummyScheduler, plugin: MegatronLMPlugin, advances: int) -> LambdaLR:
    """Build the schedule that a ``MegatronLMDummyScheduler`` stands for.

    Args:
        dummy: the placeholder.
        plugin: its ``lr_decay_style``, ``min_lr``, and lengths in optimizer steps.
        advances: how often an optimizer step advances the schedule.

    Raises:
        UnknownNameError: there is no such style.
    """
    style = plugin.lr_decay_style
    if style not in STYLES:
        raise UnknownNameError("lr_decay_style", str(style), STYLES)
    total = dummy.total_num_steps or advances * (plugin.lr_decay_iters or plugin.train_iters or 0)
    warmup = dummy.warmup_num_steps or advances * (plugin.lr_warmup_iters or 0)
    warmup = warmup or int((plugin.lr_warmup_fraction or 0) * total)
    optimizer: Any = getattr(dummy.optimizer, "optimizer", dummy.optimizer)
    peak = max(group["lr"] for group in optimizer.param_groups)
    floor = plugin.min_lr / peak if peak else 0.0

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return floor + (1.0 - floor) * _decay_factor(style, step, warmup, total)

    return LambdaLR(optimizer, factor)


def _decay_factor(style: str, step: int, warmup: int, total: int) -> float:
    """Return the fraction of the way from the lowest rate to the full one after ``step`` steps, 0 to 1."""
    if style == "constant" or total <= warmup:
        return 1.0
    if style == "inverse-square-root":
        return math.sqrt(max(warmup, 1) / max(step, 1.0))
    done = min((step - warmup) / (total - warmup), 1.0)
    return 1.0 - done if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
