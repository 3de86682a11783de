"""ZeRO by DeepSpeed, which owns the optimizer, the step and the mixed precision of a model.

The ZeRO stage says what is partitioned over the ranks: 1 optimizer state, 2 gradients too, 3 parameters too.
The configuration is built from the ``Accelerator``, the loader and the optimizer (``engine_config.py``).
Gradients are complete after the last backward of a window; the step is taken in ``optimizer.step()``, so the
norm can be read, and clipping set, between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core.errors import MissingExtraError, PrepareError, SettingError, warn_user
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.core.packages import is_installed
from accelerate.strategy.base import (
    EarlyPartitioning,
    EngineCheckpoint,
    ModuleWrapping,
    PrepareBundle,
    PrepareStep,
    StrategyRequest,
    StrategySelection,
)
from accelerate.strategy.deepspeed.backward import DeepSpeedBackward
from accelerate.strategy.deepspeed.open_gradients import DeepSpeedOpenGradients
from accelerate.strategy.launch_settings import deepspeed as deepspeed_settings
from accelerate.strategy.protocol.flat_optimizers import warn_of_statistics
from accelerate.strategy.protocol.gradient_sync import (
    NO_CONTEXT,
    ZeroBackward,
    run_with_zero_gradients,
)

if TYPE_CHECKING:
    from accelerate.strategy.deepspeed.engine_handle import DeepSpeedEngineRegistry, EngineHandle
    from accelerate.strategy.deepspeed.engine_specs import EngineSpec
    from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin
    from accelerate.world.world import World


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's own name for it
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Generator[None]:
    """A context in which parameters that DeepSpeed has partitioned are gathered; others always are.

    Args:
        params: one parameter, or several.
        modifier_rank: the rank whose changes are broadcast at the end; None forbids changes.
        fwd_module: the module whose forward uses them, so that DeepSpeed prefetches them.
        enabled: False leaves them partitioned.
    """
    parameters = list(params) if isinstance(params, Iterable) and not hasattr(params, "grad") else [params]
    # DeepSpeed marks what it has partitioned.
    if not (enabled and any(hasattr(parameter, "ds_id") for parameter in parameters)):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


class DeepSpeed(DeepSpeedOpenGradients, EarlyPartitioning, DeepSpeedBackward, ModuleWrapping):
    """Training by DeepSpeed, with one engine for each model."""

    name: ClassVar[str] = "deepspeed"
    selection: ClassVar[StrategySelection] = StrategySelection(
        (deepspeed_settings.UseDeepSpeedSetting, deepspeed_settings.DeepSpeedSettings),
        "DeepSpeedPlugin",
        "deepspeed_plugin",
    )
    priority: ClassVar[int] = 10
    shards_params: ClassVar[bool] = True
    _wrapper_classes: ClassVar[Mapping[str, str]] = {
        "optimizer": "accelerate.facade.engine_wrappers:DeepSpeedOptimizerWrapper",
        "scheduler": "accelerate.facade.engine_wrappers:DeepSpeedSchedulerWrapper",
        "engine": "accelerate.facade.engine_wrappers:DeepSpeedEngineWrapper",
    }

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        from accelerate.strategy.deepspeed.engine_handle import DeepSpeedEngineRegistry
        from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin, plugin_table

        given = [each for each in request.plugins if isinstance(each, Mapping | DeepSpeedPlugin)]
        self.table: dict[str, DeepSpeedPlugin] = plugin_table(*given)
        self.engines: DeepSpeedEngineRegistry = DeepSpeedEngineRegistry()
        self._no_sync_engines: set[int] = set()

    # --- the request

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Yield the switch, the launcher's options, the plugins and their arguments."""
        yield from super().requested_options(request)
        for plugin in cls.selection.plugins(request):
            yield from plugin.given_options()

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterator[OptionStatus]:
        """Return the status of each option, read from the engines' configuration."""
        from accelerate.strategy.deepspeed import config_tree

        handles = self.engines.trained_engines()
        for option in self._requested_options:
            if option.name not in deepspeed_settings.COUNTERPARTS:
                yield option.report_applied()
            elif not handles:
                yield option.report_pending("no model is prepared with its optimizer")
            else:
                key, absent = deepspeed_settings.COUNTERPARTS[option.name]
                value = config_tree.get_key(handles[-1].config, key, absent)
                is_applied = option.value in ("auto", None) or config_tree.is_same(option.value, value)
                other = "" if is_applied else f"the DeepSpeed configuration says {key}: {value}"
                yield option.report_unless(other)

    @classmethod
    def join_world(cls, world: World) -> None:
        """Initialize DeepSpeed, if it is installed: ``deepspeed.zero.Init`` asks it for the world size."""
        if is_installed("deepspeed"):
            from accelerate.strategy.deepspeed.engine_handle import init_deepspeed

            init_deepspeed(world)

    def check(self) -> None:
        """Refuse a machine without DeepSpeed, a precision that the device cannot compute in, and AutoTP.

        Raises:
            MissingExtraError: DeepSpeed is not installed.
            SettingError: the precision is not supported, or the configuration asks for tensor parallelism.
        """
        if not is_installed("deepspeed"):
            raise MissingExtraError("deepspeed", "training by the strategy 'deepspeed'")
        from accelerate.strategy.deepspeed.engine_config import refuse_autotp

        for plugin in self.table.values():
            refuse_autotp(plugin.deepspeed_config)
            # Of several plugins, each may have a precision of its own, such as a teacher's.
            plugin.adopt_mixed_precision(self.request.precision, must_match=len(self.table) == 1)
            if plugin.precision == "fp16" and self.world.device.type == "cpu":
                raise SettingError(
                    "DeepSpeed cannot compute in fp16 on the CPU",
                    fix="use mixed_precision='bf16', or 'no'",
                )
        devices = {(p.offload_optimizer_device, p.offload_param_device) for p in self.table.values()}
        if any("nvme" in pair for pair in devices) and self.world.device.type == "cpu":
            warn_user(
                "offload to NVMe on a machine without an accelerator: DeepSpeed compiles a reader that "
                "needs libaio, and has been seen to abort when the program ends (SIGABRT)"
            )
        if self.request.precision not in ("no", "fp16", "bf16"):
            raise SettingError(
                f"mixed_precision={self.request.precision!r} does not go with DeepSpeed",
                fix="use 'bf16', 'fp16' or 'no'",
            )
        next(iter(self.table.values())).select(_from_accelerator_state=True)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        return next(plugin for plugin in self.table.values() if plugin.selected)

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins, and the mixed precision where DeepSpeed's own file sets it."""
        attributes: dict[str, Any] = {"deepspeed_plugins": self.table}
        if self.plugin.precision is not None:
            attributes["_mixed_precision"] = self.plugin.precision
        return attributes

    @property
    def accumulation_steps(self) -> int | None:
        """The micro-batches per step of the plugin or DeepSpeed's file."""
        steps = self.plugin.get_value("gradient_accumulation_steps")
        return None if steps in (None, "auto", *((1,) if self.plugin.assumes_steps else ())) else int(steps)

    @property
    def configured_kinds(self) -> Sequence[str]:
        """The kinds of objects that have a section in DeepSpeed's configuration."""
        return [kind for kind in ("optimizer", "scheduler") if self.plugin.config_template().get(kind)]

    # --- prepare

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return a step for each engine: a model with its optimizer and DeepSpeed's own schedule."""
        from accelerate.strategy.deepspeed.engine_specs import add_configured_optimizer, engine_specs

        if bundle.training:
            add_configured_optimizer(bundle, self.engines, self.plugin.config_template())
        host, data_shards = self.world.device.type == "cpu", self.data_shard.count
        precision = self.request.precision if len(self.table) == 1 else self.plugin.precision or "no"
        specs = engine_specs(
            bundle,
            self.engines,
            self.plugin,
            precision,
            self.world.size,
            data_shards=data_shards,
            host=host,
            schedule_advances=bundle.schedule_advances(data_shards),
        )
        jobs = list(specs) if bundle.training else []
        for job in jobs:
            reason = f"{self.world.size} process(es), {job.engine_config.describe()}"
            yield PrepareStep("engine", reason, lambda b, job=job: self._make_engine(b, job))
        if not bundle.training and any(self.engines.find(m) is None for m in bundle.objects_of("model")):
            yield PrepareStep("place", f"the weights go to {self.world.device}", self._move_to_device)

    def _make_engine(self, bundle: PrepareBundle, job: EngineSpec) -> None:
        from accelerate.strategy.deepspeed import engine_config, engine_handle

        engine_handle.init_deepspeed(self.world)
        engine_config.check_nvme(job.engine_config.config)
        before = self.engines.find(job.model)
        module = self.unwrap(job.model)
        if before is not None:
            engine_handle.release_engine(before)
        self.plugin.set_moe_leaf_modules(module)
        handle = engine_handle.make_engine(module, job.engine_config.config, job.optimizer, job.scheduler)
        if before is not None:
            handle = engine_handle.replace_engine(before.engine, handle)
        elif any(job.model is released for released in self.engines.released_engines()):
            handle = engine_handle.replace_engine(job.model, handle)
            if not any(job.model is model for model in bundle.objects_of("model")):
                bundle.objects.append(job.model)
                bundle.kinds.append("model")
        handle.is_strict = bundle.strict
        if handle.has_fp32_copies:
            warn_of_statistics(handle.optimizer, "DeepSpeed")
        self.engines.add(handle)
        if job.optimizer is not None:  # the configuration of others lacks optimizer, schedule and ZeRO stage
            self.plugin.publish_config(job.engine_config.config)
        bundle.replace("model", lambda m: handle.engine if m is job.model or m is module else m)
        if job.optimizer is not None:
            bundle.replace("optimizer", lambda o: handle.optimizer if o is job.optimizer else o)
        if job.scheduler is not None:
            bundle.replace("scheduler", lambda s: handle.scheduler if s is job.scheduler else s)

    def _move_to_device(self, bundle: PrepareBundle) -> None:
        for index in bundle.positions("model"):
            if bundle.place_on_device[index] and self.engines.find(bundle.objects[index]) is None:
                bundle.objects[index].to(self.world.device)

    def forget(self) -> None:
        """Release the engines; a model may be prepared again."""
        del self.deepspeed_engine_wrapped
        self.engines.clear()

    def advances_scheduler(self, scheduler: Any) -> bool:
        """Return whether DeepSpeed has made or was given this schedule."""
        return any(handle.scheduler is scheduler for handle in self.engines if handle.scheduler is not None)

    # --- the loop

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Return a context in which backwards do not complete the window where ``sync`` is False."""
        return NO_CONTEXT if sync else self._no_sync(models)

    @contextmanager
    def _no_sync(self, models: Iterable[nn.Module]) -> Generator[None]:
        handles = (self.engines.find(model) for model in models)
        quiet = {id(handle.engine) for handle in handles if handle is not None} - self._no_sync_engines
        self._no_sync_engines |= quiet
        try:
            yield
        finally:
            self._no_sync_engines -= quiet

    def rescale_short_window(self, factor: float) -> None:
        """Multiply accumulated gradients by ``factor`` in the next step: the window ends early."""
        for handle in self.engines.trained_engines():
            if handle.has_gradients and not handle.window_complete:
                handle.grad_factor = factor

    def optimizer_params(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """Return the user's parameters: DeepSpeed's optimizer has flat vectors of its own."""
        handle = self.engines.find_by_optimizer(optimizer)
        if handle is None:
            return super().optimizer_params(optimizer)
        return [p for group in handle.groups for p in group]

    def has_nonzero_grads(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether a backward has run since gradients were used or cleared."""
        return any(handle.has_gradients for handle in self.trained_engines(models))

    def rescale_gradients(self, models: Iterable[nn.Module], factor: float) -> bool:
        """Multiply gradients by ``factor`` in DeepSpeed's norm, clipping and step."""
        for handle in self.trained_engines(models):
            handle.grad_factor *= factor
        return True

    def trained_engines(self, models: Iterable[nn.Module]) -> list[EngineHandle]:
        """Return the handles of those of ``models`` that have an optimizer."""
        handles = (self.engines.find(model) for model in models)
        return [handle for handle in handles if handle is not None and handle.optimizer is not None]

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether no ``no_sync`` is active for the model's engine."""
        handle = self.engines.find(model)
        return handle is None or id(handle.engine) not in self._no_sync_engines

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run the whole backward with zero gradients: ranks reduce gradients in the order of the backward.

        The loss may be NaN: each gradient is replaced by zeros before it is used.

        Raises:
            PrepareError: the loss has no graph.
        """
        if zero.loss.grad_fn is None:
            raise PrepareError(
                "backward(loss, num_items=0) of a loss that was not computed by the model",
                why="other processes wait for this one's gradients, in the order of the model's layers",
                fix="compute the loss from the model's outputs also when there are no items",
            )
        run_with_zero_gradients(
            zero.parameters, lambda: self.backward(zero.loss, sync_gradients=zero.sync_gradients)
        )

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Return the norm over all ranks; DeepSpeed's next step clips by ``max_norm``.

        As in 1.x, a limit in the configuration counts instead; there is one warning where the two differ.

        Raises:
            PrepareError: another norm than the Euclidean.
            SettingError: the run is strict, and the configuration has another limit.
        """
        clipped = set(parameters)
        handle = self._engine_to_clip(clipped)
        trained = handle.trained_params
        if not trained <= clipped:
            warn_user(
                f"clip_grad_norm_ was given {len(trained & clipped)} of {len(trained)} trained parameters, "
                "but DeepSpeed clips all of them by their common norm, which is returned: call it once, with "
                "model.parameters()"
            )
        if norm_type != 2:
            raise PrepareError(
                f"clip_grad_norm_ with norm_type={norm_type}", why="DeepSpeed clips by the Euclidean norm"
            )
        handle.clip_next_step(max_norm)
        return handle.global_norm().to(self.world.device)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Refuse: DeepSpeed has no clipping by value."""
        raise PrepareError(
            "clip_grad_value_ does not go with DeepSpeed",
            why="gradients are partitioned, and DeepSpeed clips by their norm",
            fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
        )

    def _engine_to_clip(self, param_set: set[torch.Tensor]) -> EngineHandle:
        trained = self.engines.trained_engines()
        if len(trained) == 1:
            return trained[0]
        matches = [handle for handle in trained if not param_set.isdisjoint(handle.module.parameters())]
        if len(matches) != 1:
            raise PrepareError(
                f"clip_grad_norm_ of parameters of {len(matches)} of {len(trained)} prepared models",
                why="each DeepSpeed engine clips the gradients of its own model",
                fix="call it once for each model: accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        return matches[0]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Run DeepSpeed's step: it clips, steps, clears gradients and advances its own schedule."""
        handle = self.engines.find_by_optimizer(optimizer)
        if handle is not None:
            handle.step()
        return None

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear gradients that no step has used; after a step there are none."""
        handle = self.engines.find_by_optimizer(optimizer)
        if handle is not None:
            handle.clear_gradients()

    def change_weights(self, optimizer: torch.optim.Optimizer, change: Callable[[], None]) -> None:
        """Call what changes weights in the optimizer, as one with modes does it; collective."""
        handle = self.engines.find_by_optimizer(optimizer)
        if handle is None:
            change()
        else:
            handle.change_weights(change)

    def skipped_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last step was skipped because a gradient was not finite."""
        handle = self.engines.find_by_optimizer(optimizer)
        return handle is not None and handle.skipped_step

    def skipped_steps(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many steps were skipped so."""
        handle = self.engines.find_by_optimizer(optimizer)
        return 0 if handle is None else handle.skipped_steps

    # --- states

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return copies of the state on the host, in the compute dtype; in stage 3 on rank 0, collective.

        Below stage 3 parameters are views of flat buffers: ``torch.save`` of one writes the whole buffer.

        Raises:
            PrepareError: it is partitioned, and gathering was forbidden; or ranks have different experts.
        """
        from accelerate.strategy.deepspeed.full_state import model_state, refuse_experts

        if (handle := self.engines.find(model)) is not None:
            refuse_experts(handle)
        module = self.unwrap(model)
        is_partitioned = any(hasattr(p, "ds_id") for p in module.parameters())
        if is_partitioned and not self.plugin.may_gather:
            raise PrepareError(
                "the weights are partitioned, and zero3_save_16bit_model is False",
                why="so they are not gathered on one rank",
                fix="DeepSpeedPlugin(zero3_save_16bit_model=True), or in the DeepSpeed configuration "
                '"stage3_gather_16bit_weights_on_model_save": true; accelerator.save_state writes shards',
            )
        return model_state(module, self.world.rank == 0 or not is_partitioned)

    def master_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the float32 master weights of the optimizer, on rank 0."""
        from accelerate.strategy.deepspeed.full_state import model_state

        handle = self.engines.find(model)
        if handle is None:
            return self.unwrap(model).state_dict()
        return model_state(handle.module, self.world.rank == 0, handle)

    def state_template(self, model: nn.Module) -> Mapping[str, Any]:
        """Return a template with the unpartitioned shapes."""
        from accelerate.strategy.deepspeed.full_state import shape_template

        return shape_template(self.unwrap(model))

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state that every rank passes; each keeps its shard."""
        from accelerate.strategy.deepspeed.full_state import load_model

        handle = self.engines.find(model)
        if handle is None:
            return self.unwrap(model).load_state_dict(state, strict=strict)
        return load_model(handle, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Return the optimizer's state as in one process, on rank 0."""
        from accelerate.strategy.deepspeed.full_state import optimizer_state

        handle = self.engines.find_by_optimizer(optimizer)
        return optimizer.state_dict() if handle is None else optimizer_state(handle, self.world.rank == 0)

    def optimizer_checkpoint_view(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the groups of the user's parameters: DeepSpeed's optimizer has flat vectors of its own."""
        from accelerate.strategy.deepspeed.full_state import optimizer_view

        handle = self.engines.find_by_optimizer(optimizer)
        return optimizer if handle is None else optimizer_view(handle)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state that every rank passes; each keeps its shard."""
        from accelerate.strategy.deepspeed.full_state import load_optimizer

        handle = self.engines.find_by_optimizer(optimizer)
        if handle is None:
            optimizer.load_state_dict(dict(state))
        else:
            load_optimizer(handle, state)

    def engine_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """Return the DeepSpeed checkpoint of each model that is trained."""
        from accelerate.strategy.deepspeed.engine_checkpoint import DeepSpeedEngineCheckpointer

        return [
            DeepSpeedEngineCheckpointer(handle, index, self.world, dict(options))
            for index, model in enumerate(models)
            for handle in self.trained_engines([model])
        ]

    @classmethod
    def read_engine_checkpoints(cls, folder: Path) -> Sequence[EngineCheckpoint]:
        """Return the DeepSpeed checkpoints in ``folder`` as full states; DeepSpeed need not be installed."""
        from accelerate.strategy.deepspeed.engine_checkpoint import find_engine_checkpoints

        return find_engine_checkpoints(folder)

    @staticmethod
    def inner_module(model: Any) -> Any:
        """Return the module inside a ``DeepSpeedEngine``, also one that the user made."""
        kinds = {kind.__name__ for kind in type(model).__mro__}
        return model.module if "DeepSpeedEngine" in kinds else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self.inner_module(model)


PLUGIN = DeepSpeed
