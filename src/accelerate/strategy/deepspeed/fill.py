"""The engine's configuration, made from what is known elsewhere: every number has one owner.

The ``Accelerator`` owns how many micro-batches a step has and the number format, the loader the batch, the
optimizer its options. What the engine's own file says too must agree; ``"auto"`` there leaves it to them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from accelerate.core.errors import SettingError
from accelerate.strategy.deepspeed import tree
from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin
from accelerate.strategy.deepspeed.tree import AUTO, DummyOptim, DummyScheduler
from accelerate.strategy.settings.deepspeed import same

_OWN = "the engine's configuration"


@dataclass(frozen=True)
class Wanted:
    """What one engine is made for.

    Attributes:
        model: the user's.
        steps: micro-batches per step, and
        precision: the number format, as the ``Accelerator`` has them.
        processes: how many train together.
        host: whether the device is the CPU, for which no kernels are compiled.
        batches: of the loaders of the same ``prepare``: samples per process, None where it cannot be told.
        optimizer: of torch, or a ``DummyOptim``; None for a model that is not trained.
        scheduler: a ``DummyScheduler``, or None.
    """

    model: nn.Module
    steps: int
    precision: str
    processes: int
    host: bool
    batches: Sequence[int | None] = ()
    optimizer: Any = None
    scheduler: Any = None


@dataclass
class Filled:
    """The configuration that an engine is made with.

    Attributes:
        config: what DeepSpeed gets.
        sources: where each value that was filled in comes from, by dotted path.
    """

    config: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)

    def own(self, path: str, value: Any, source: str, *, must: bool = True) -> None:
        """The owner's value; what the file says otherwise is an error.

        Raises:
            SettingError: the file says something else, naming both places.
        """
        there = tree.get(self.config, path)
        if must and there not in (None, AUTO) and not same(there, value):
            raise SettingError(
                f"{source} says {_short(value)}, but {_OWN} says {path}: {json.dumps(there)}",
                why="each of the two would train in another way",
                fix=f'keep one of them, or write "auto" for {path}',
            )
        if there in (None, AUTO):
            tree.put(self.config, path, value)
            self.sources[path] = source

    def auto(self, path: str, value: Any, source: str) -> None:
        """Fills a value that is ``"auto"``."""
        if tree.get(self.config, path) == AUTO:
            tree.put(self.config, path, value)
            self.sources[path] = source

    def default(self, path: str, value: Any) -> None:
        """A value that nobody gave."""
        if not tree.has(self.config, path):
            tree.put(self.config, path, value)

    def says(self) -> str:
        """For the plan: the stage, and what is in the configuration."""
        shown = {k: v for k, v in self.config.items() if k != "steps_per_print"}
        stage = tree.get(self.config, "zero_optimization.stage")
        return f"ZeRO stage {stage}; its configuration: {json.dumps(shown)}"


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def fill(plugin: DeepSpeedPlugin, wanted: Wanted) -> Filled:
    """The configuration of one engine; the plugin's own stays as it is.

    Raises:
        SettingError: a value is said in two places that differ, or is ``"auto"`` and cannot be known.
    """
    made = Filled(copy.deepcopy(plugin.template()))
    _fill_batch(made, plugin, wanted)
    _fill_precision(made, wanted)
    _fill_optimizer(made, wanted)
    _fill_scheduler(made, wanted)
    _fill_sizes(made, wanted)
    made.auto("gradient_clipping", 0.0, "clip_grad_norm_, which says it when it is called")
    made.auto("zero_optimization.stage3_gather_16bit_weights_on_model_save", plugin.gathers, "the plugin")
    made.default("steps_per_print", float("inf"))
    if wanted.optimizer is None:
        _without_optimizer(made)
    left = sorted(tree.autos(made.config))
    if left:
        raise SettingError(
            f'{_OWN} says "auto" for {", ".join(left)}, and nothing here says what they are',
            fix="write these values into the configuration",
        )
    return made


def _fill_batch(made: Filled, plugin: DeepSpeedPlugin, wanted: Wanted) -> None:
    there = tree.get(made.config, "gradient_accumulation_steps")
    # A library that counts micro-batches by itself has written its number there.
    if wanted.steps != 1 or there in (None, AUTO):
        made.own(
            "gradient_accumulation_steps", wanted.steps, "gradient_accumulation_steps of the Accelerator"
        )
    micro = "train_micro_batch_size_per_gpu"
    known = [size for size in wanted.batches if size]
    written = tree.get(made.config, micro)
    if written in (None, AUTO):
        chosen = (
            (min(known) if plugin.is_train_batch_min else max(known)) if known else _from_total(made, wanted)
        )
        made.own(micro, chosen, "the loader" if known else "nothing: it is only for reports of the engine")
    elif known and int(written) not in known:
        made.own(micro, known[0], "the batch size of the loader")
    steps = int(tree.get(made.config, "gradient_accumulation_steps"))
    total = int(tree.get(made.config, micro)) * steps * wanted.processes
    made.own(
        "train_batch_size", total, f"{micro} x gradient_accumulation_steps x {wanted.processes} processes"
    )


def _from_total(made: Filled, wanted: Wanted) -> int:
    total = tree.get(made.config, "train_batch_size")
    steps = int(tree.get(made.config, "gradient_accumulation_steps"))
    return max(1, int(total) // (steps * wanted.processes)) if total not in (None, AUTO) else 1


def _fill_precision(made: Filled, wanted: Wanted) -> None:
    for kind in ("fp16", "bf16"):
        enabled = wanted.precision == kind
        there = tree.get(made.config, f"{kind}.enabled")
        if enabled or there == AUTO or (wanted.precision != "no" and there is not None):
            made.own(f"{kind}.enabled", enabled, f"mixed_precision={wanted.precision}")


def _fill_optimizer(made: Filled, wanted: Wanted) -> None:
    optimizer, config = wanted.optimizer, made.config
    if isinstance(optimizer, DummyOptim):
        if not config.get("optimizer"):
            raise SettingError(
                f"a DummyOptim was prepared, but {_OWN} has no optimizer",
                why="it stands for the one that the engine makes",
                fix='add "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, or prepare one of torch',
            )
        _fill_dummy(made, optimizer)
        _plain_kernels(made, wanted)
        return
    if optimizer is None:
        return
    if config.get("optimizer"):
        raise SettingError(
            f"the optimizer is said twice: {type(optimizer).__name__} in prepare, and "
            f"{tree.get(config, 'optimizer.type')} in {_OWN}",
            fix="take optimizer out of the configuration, or prepare a DummyOptim in the place of yours",
        )
    # An optimizer of the user's own computes what it computes in one process.
    made.default("zero_allow_untested_optimizer", True)
    made.default("zero_force_ds_cpu_optimizer", False)


def _fill_dummy(made: Filled, optimizer: DummyOptim) -> None:
    params = "optimizer.params"
    given = {"lr": (optimizer.lr, 0.001), "weight_decay": (optimizer.weight_decay, 0)}
    for name, (value, default) in given.items():
        if value == default or tree.get(made.config, f"{params}.{name}") == AUTO:
            made.auto(f"{params}.{name}", value, "the DummyOptim")
        elif tree.has(made.config, f"{params}.{name}"):
            made.own(f"{params}.{name}", value, f"{name} of the DummyOptim")
    defaults = {"betas": [0.9, 0.999], "eps": 1e-8}
    for name, default in defaults.items():
        value = optimizer.kwargs.get(name, default)
        made.auto(f"{params}.{name}", list(value) if isinstance(value, tuple) else value, "the DummyOptim")


def _plain_kernels(made: Filled, wanted: Wanted) -> None:
    """On a host Adam is torch's own: the engine would compile one, to the same numbers."""
    adam = str(tree.get(made.config, "optimizer.type")).lower() in ("adam", "adamw")
    if wanted.host and adam:
        made.default("optimizer.params.torch_adam", True)


def _fill_scheduler(made: Filled, wanted: Wanted) -> None:
    scheduler = wanted.scheduler
    if not isinstance(scheduler, DummyScheduler):
        return
    if not made.config.get("scheduler"):
        if scheduler.lr_scheduler_callable is None:
            raise SettingError(
                f"a DummyScheduler was prepared, but {_OWN} has no scheduler",
                fix="add one there, give DummyScheduler(lr_scheduler_callable=...), or prepare one of torch",
            )
        return
    if scheduler.lr_scheduler_callable is not None:
        raise SettingError(
            f"the schedule is said twice: by lr_scheduler_callable and in {_OWN}", fix="keep one of them"
        )
    params, source = "scheduler.params", "the DummyScheduler"
    rate = tree.get(made.config, "optimizer.params.lr", _rate(wanted.optimizer))
    made.auto(f"{params}.warmup_min_lr", 0, source)
    made.auto(f"{params}.warmup_max_lr", rate, "the optimizer's lr")
    made.auto(f"{params}.warmup_num_steps", max(1, scheduler.warmup_num_steps), source)
    if scheduler.total_num_steps is not None:
        made.auto(f"{params}.total_num_steps", scheduler.total_num_steps, source)


def _rate(optimizer: Any) -> Any:
    groups = getattr(optimizer, "param_groups", None)
    return groups[0]["lr"] if groups else getattr(optimizer, "lr", None)


_SIZES = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def _fill_sizes(made: Filled, wanted: Wanted) -> None:
    """Sizes of buckets go by the model's width; where it does not tell, the engine's defaults hold."""
    for name, size in _SIZES.items():
        path = f"zero_optimization.{name}"
        if tree.get(made.config, path) == AUTO:
            hidden = hidden_size(wanted.model)
            if hidden is None:
                tree.drop(made.config, path)
            else:
                made.auto(path, size(hidden), f"hidden_size={hidden} of the model")


def hidden_size(model: nn.Module) -> int | None:
    """The width of a model of transformers, the largest if it has several; None if it does not tell."""
    config = getattr(model, "config", None)
    return max(_widths(config), default=None)


def _widths(config: Any) -> Iterator[int]:
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
            if isinstance(value, int):
                yield value
            elif isinstance(value, list | tuple):
                yield from (int(each) for each in value)


def _without_optimizer(made: Filled) -> None:
    """A model alone: partitioned in stage 3, whole otherwise; the engine makes no optimizer."""
    for name in ("optimizer", "scheduler"):
        made.config.pop(name, None)
    tree.drop(made.config, "zero_optimization.offload_optimizer")
    if tree.get(made.config, "zero_optimization.stage") != 3:
        tree.put(made.config, "zero_optimization", {"stage": 0})
