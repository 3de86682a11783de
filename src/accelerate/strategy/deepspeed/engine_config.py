"""The complete DeepSpeed configuration, built from values that each have one owner.

The ``Accelerator`` owns the micro-batches per step and the precision, the loader the batch size, the
optimizer its options. DeepSpeed's own file must agree with them, or say ``"auto"``.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accelerate.core.errors import SettingError, warn_user
from accelerate.strategy.deepspeed import config_tree
from accelerate.strategy.deepspeed.config_tree import AUTO, CONFIG_NAME, DummyOptim, DummyScheduler, is_same
from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin


@dataclass(frozen=True)
class DeepSpeedConfigInputs:
    """The inputs of one engine's configuration.

    Attributes:
        model: the user's.
        steps: micro-batches per step of the ``Accelerator``.
        precision: mixed precision of the ``Accelerator``.
        processes: the world size.
        host: whether the device is the CPU, for which no kernels are compiled.
        batches: samples per rank of the loaders of the same ``prepare`` that tell them.
        optimizer: of torch, or a ``DummyOptim``; None for a model that is not trained.
        scheduler: a ``DummyScheduler``, a schedule of DeepSpeed or of torch, or None.
        schedule_advances: how often an optimizer step advances a schedule of torch; the steps of a
            ``DummyScheduler`` are counted like those, while DeepSpeed advances its own once.
    """

    model: nn.Module
    steps: int
    precision: str
    processes: int
    host: bool
    batches: Sequence[int] = ()
    optimizer: Any = None
    scheduler: Any = None
    schedule_advances: int = 1


@dataclass
class EngineConfig:
    """The configuration that a DeepSpeed engine is made with.

    Attributes:
        config: what DeepSpeed gets.
    """

    config: dict[str, Any]

    def set_owned(self, path: str, value: Any, source: str) -> None:
        """Set the owner's value; a different value in the file is an error.

        Raises:
            SettingError: the file has another value; names both places.
        """
        configured = config_tree.get_key(self.config, path)
        if configured not in (None, AUTO) and not is_same(configured, value):
            shown = json.dumps(value) if isinstance(value, dict | list | bool) else value
            raise config_tree.contradiction(f"{source} says {shown}", path, configured)
        if configured in (None, AUTO):
            config_tree.set_key(self.config, path, value)

    def fill_auto(self, path: str, value: Any) -> None:
        """Fill a value that is ``"auto"``."""
        if config_tree.get_key(self.config, path) == AUTO:
            config_tree.set_key(self.config, path, value)

    def set_default(self, path: str, value: Any) -> None:
        """Set a value that nobody gave."""
        if not config_tree.has_key(self.config, path):
            config_tree.set_key(self.config, path, value)

    def describe(self) -> str:
        """Describe the stage and the configuration, for the prepare plan."""
        shown = {k: v for k, v in self.config.items() if k != "steps_per_print"}
        stage = config_tree.get_key(self.config, "zero_optimization.stage")
        return f"ZeRO stage {stage}; its configuration: {json.dumps(shown)}"


def build_config(plugin: DeepSpeedPlugin, inputs: DeepSpeedConfigInputs) -> EngineConfig:
    """Build the configuration of one engine; the plugin's own stays as it is.

    Raises:
        SettingError: two places have different values, or a value is ``"auto"`` and unknown.
    """
    engine_config = EngineConfig(copy.deepcopy(plugin.config_template()))
    refuse_autotp(engine_config.config)
    _fill_batch(engine_config, plugin, inputs)
    for kind in ("fp16", "bf16"):
        enabled = inputs.precision == kind
        configured = config_tree.get_key(engine_config.config, f"{kind}.enabled")
        if enabled or configured == AUTO or (inputs.precision != "no" and configured is not None):
            engine_config.set_owned(f"{kind}.enabled", enabled, f"mixed_precision={inputs.precision}")
    _fill_optimizer(engine_config, inputs)
    _fill_scheduler(engine_config, inputs)
    _fill_sizes(engine_config, inputs)
    engine_config.fill_auto("gradient_clipping", 0.0)  # clip_grad_norm_ says it when it is called
    gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    engine_config.fill_auto(gathers, plugin.may_gather)
    if inputs.optimizer is None:
        # Partitioned in stage 3, unpartitioned otherwise.
        for name in ("optimizer", "scheduler"):
            engine_config.config.pop(name, None)
        config_tree.delete_key(engine_config.config, "zero_optimization.offload_optimizer")
        if config_tree.get_key(engine_config.config, "zero_optimization.stage") != 3:
            config_tree.set_key(engine_config.config, "zero_optimization", {"stage": 0})
    left = sorted(config_tree.auto_keys(engine_config.config))
    if left:
        raise SettingError(
            f'{CONFIG_NAME} says "auto" for {", ".join(left)}, and nothing here says what they are',
            fix="write these values into the configuration",
        )
    return engine_config


def _fill_batch(engine_config: EngineConfig, plugin: DeepSpeedPlugin, inputs: DeepSpeedConfigInputs) -> None:
    configured = config_tree.get_key(engine_config.config, "gradient_accumulation_steps")
    if plugin.assumes_steps and configured == 1:
        configured = None
        config_tree.delete_key(engine_config.config, "gradient_accumulation_steps")
    # A library that counts micro-batches by itself has written its number there.
    if inputs.steps != 1 or configured in (None, AUTO):
        engine_config.set_owned(
            "gradient_accumulation_steps", inputs.steps, "gradient_accumulation_steps of the Accelerator"
        )
    steps = int(config_tree.get_key(engine_config.config, "gradient_accumulation_steps"))
    micro = "train_micro_batch_size_per_gpu"
    written = config_tree.get_key(engine_config.config, micro)
    if written in (None, AUTO):
        if inputs.batches:
            chosen = (min if plugin.is_train_batch_min else max)(inputs.batches)
            engine_config.set_owned(micro, chosen, "the loader")
        else:
            total = config_tree.get_key(engine_config.config, "train_batch_size")
            chosen = max(1, int(total) // (steps * inputs.processes)) if total not in (None, AUTO) else 1
            engine_config.set_owned(micro, chosen, "nothing: it is only for reports of DeepSpeed")
    elif inputs.batches and int(written) not in inputs.batches:
        # As in 1.x: programs write the number of samples that one item of their data set is a batch of.
        warn_user(
            f"{CONFIG_NAME} says {micro}: {written}, and the loader has batches of {inputs.batches[0]}. "
            "Batches are those of the loader; only DeepSpeed's reports go by the number"
        )
    total = int(config_tree.get_key(engine_config.config, micro)) * steps * inputs.processes
    engine_config.set_owned(
        "train_batch_size", total, f"{micro} x gradient_accumulation_steps x {inputs.processes} processes"
    )


def _fill_optimizer(engine_config: EngineConfig, inputs: DeepSpeedConfigInputs) -> None:
    optimizer, config = inputs.optimizer, engine_config.config
    if isinstance(optimizer, DummyOptim):
        if not config.get("optimizer"):
            raise SettingError(
                f"a DummyOptim was prepared, but {CONFIG_NAME} has no optimizer",
                why="it stands for the one that DeepSpeed makes",
                fix='add "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, or prepare one of torch',
            )
        _fill_dummy(engine_config, optimizer)
        # On the CPU torch's Adam: DeepSpeed would compile its own, with the same results.
        name = str(config_tree.get_key(config, "optimizer.type")).lower()
        if inputs.host and name in ("adam", "adamw"):
            engine_config.set_default("optimizer.params.torch_adam", True)
        return
    if optimizer is None:
        return
    if config.get("optimizer"):
        raise SettingError(
            f"the optimizer is said twice: {type(optimizer).__name__} in prepare, and "
            f"{config_tree.get_key(config, 'optimizer.type')} in {CONFIG_NAME}",
            fix="take optimizer out of the configuration, or prepare a DummyOptim in the place of yours",
        )
    # An optimizer of the user's own computes what it computes in one process.
    engine_config.set_default("zero_allow_untested_optimizer", True)
    engine_config.set_default("zero_force_ds_cpu_optimizer", False)


def _fill_dummy(engine_config: EngineConfig, optimizer: DummyOptim) -> None:
    params = "optimizer.params"
    fields = {"lr": (optimizer.lr, 0.001), "weight_decay": (optimizer.weight_decay, 0)}
    for name, (value, default) in fields.items():
        if value == default or config_tree.get_key(engine_config.config, f"{params}.{name}") == AUTO:
            engine_config.fill_auto(f"{params}.{name}", value)
        elif config_tree.has_key(engine_config.config, f"{params}.{name}"):
            engine_config.set_owned(f"{params}.{name}", value, f"{name} of the DummyOptim")
    for name, value in {"betas": [0.9, 0.999], "eps": 1e-8, **optimizer.kwargs}.items():
        engine_config.fill_auto(f"{params}.{name}", list(value) if isinstance(value, tuple) else value)


def _fill_scheduler(engine_config: EngineConfig, inputs: DeepSpeedConfigInputs) -> None:
    scheduler = inputs.scheduler
    if not isinstance(scheduler, DummyScheduler):
        if scheduler is not None:
            refuse_second_schedule(scheduler, engine_config.config)
        return
    if not engine_config.config.get("scheduler"):
        if scheduler.lr_scheduler_callable is None:
            raise SettingError(
                f"a DummyScheduler was prepared, but {CONFIG_NAME} has no scheduler",
                fix="add one there, give DummyScheduler(lr_scheduler_callable=...), or prepare one of torch",
            )
        return
    if scheduler.lr_scheduler_callable is not None:
        raise SettingError(
            f"the schedule is said twice: by lr_scheduler_callable and in {CONFIG_NAME}",
            fix="keep one of them",
        )
    params = "scheduler.params"
    groups = getattr(inputs.optimizer, "param_groups", None)
    own_rate = groups[0]["lr"] if groups else getattr(inputs.optimizer, "lr", None)
    rate = config_tree.get_key(engine_config.config, "optimizer.params.lr", own_rate)
    engine_config.fill_auto(f"{params}.warmup_min_lr", 0)
    engine_config.fill_auto(f"{params}.warmup_max_lr", rate)
    engine_config.fill_auto(f"{params}.warmup_num_steps", max(1, scheduler.warmup_num_steps))
    if scheduler.total_num_steps is not None:
        total = math.ceil(scheduler.total_num_steps / inputs.schedule_advances)
        engine_config.fill_auto(f"{params}.total_num_steps", total)


def refuse_second_schedule(scheduler: Any, config: Mapping[str, Any]) -> None:
    """Refuse a schedule beside the one of the configuration: each would go on from the other's rates.

    Raises:
        SettingError: the configuration has one.
    """
    if config.get("scheduler"):
        raise SettingError(
            f"the schedule is said twice: {type(scheduler).__name__} in prepare, and "
            f"{config_tree.get_key(config, 'scheduler.type')} in {CONFIG_NAME}",
            why="both would change the learning rate in each step",
            fix="take scheduler out of the configuration, or prepare a DummyScheduler in the place of yours",
        )


def refuse_autotp(config: Mapping[str, Any]) -> None:
    """Refuse DeepSpeed's tensor parallelism (AutoTP).

    Raises:
        SettingError: the configuration asks for it.
    """
    size = config_tree.get_key(config, "tensor_parallel.autotp_size", 0)
    if str(size).isdigit() and int(size) > 1:
        raise SettingError(
            f"{CONFIG_NAME} says tensor_parallel.autotp_size: {size}, which is not supported",
            why="the ranks of a tensor parallel group must read the same batches, and each has a shard of "
            "the weights: here under DeepSpeed every rank is a replica that reads its own",
            fix="leave it out; FSDP2 goes with tensor parallelism: Accelerator(parallelism_config="
            "ParallelismConfig(tp_size=2, dp_shard_size=4))",
        )


def check_nvme(config: Mapping[str, Any]) -> None:
    """Refuse offload to NVMe where DeepSpeed's ``async_io`` is missing.

    Raises:
        SettingError: it is not installed, and cannot be built.
    """
    parts = ("offload_optimizer", "offload_param")
    nvme_parts = [
        part for part in parts if config_tree.get_key(config, f"zero_optimization.{part}.device") == "nvme"
    ]
    if not nvme_parts:
        return
    from deepspeed.git_version_info import installed_ops  # type: ignore[import-not-found]
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    if not installed_ops.get(AsyncIOBuilder.NAME) and not AsyncIOBuilder().is_compatible(verbose=False):
        raise SettingError(
            f"{nvme_parts[0]}: DeepSpeed cannot use NVMe on this machine",
            why="its async_io is compiled when it is used, and libaio or its headers are missing",
            fix="apt install libaio-dev, or offload to the host: device 'cpu'",
        )


_SIZES = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def _fill_sizes(engine_config: EngineConfig, inputs: DeepSpeedConfigInputs) -> None:
    """Fill bucket sizes by the model's hidden size; DeepSpeed's defaults hold where it is unknown."""
    for name, size in _SIZES.items():
        path = f"zero_optimization.{name}"
        if config_tree.get_key(engine_config.config, path) == AUTO:
            hidden = hidden_size(inputs.model)
            if hidden is None:
                config_tree.delete_key(engine_config.config, path)
            else:
                engine_config.fill_auto(path, size(hidden))


def hidden_size(model: nn.Module) -> int | None:
    """Return the hidden size of a model of transformers, the largest of several; None if unknown."""
    config = getattr(model, "config", None)
    widths: list[int] = []
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
            if isinstance(value, int):
                widths.append(value)
            elif isinstance(value, list | tuple):
                widths += map(int, value)
    return max(widths, default=None)
