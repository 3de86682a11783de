"""Training by Megatron-LM (the package megatron-core): tensor and pipeline parallel GPTs.

Megatron-LM has its own model, gradients and steps. ``prepare`` builds its GPT from the user's model and
replaces the bundle; the user's optimizer continues on Megatron-LM's parameters, inside its optimizer step.
The other files of this folder are loaded only when Megatron-LM is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.core.option_report import OptionStatus
from accelerate.core.setting import declared_settings
from accelerate.strategy.base import (
    EngineStrategy,
    PrepareBundle,
    PrepareStep,
    RankDataShard,
    StrategyRequest,
    StrategySelection,
)
from accelerate.strategy.launch_settings.megatron import MegatronSettings, UseMegatronSetting
from accelerate.strategy.megatron.open_gradients import MegatronOpenGradients

if TYPE_CHECKING:
    from accelerate.strategy.megatron.engine import MegatronEngine
    from accelerate.strategy.megatron.full_state import MegatronFullStateConverter
    from accelerate.strategy.megatron.layout import MegatronLayout
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin
    from accelerate.strategy.megatron.user_optimizer_adapter import MegatronOptimizerStepper


class Megatron(MegatronOpenGradients, EngineStrategy):
    """The strategy that trains by Megatron-LM.

    Tests run it on CPUs, with stand-ins for its devices; it has never run on GPUs.
    """

    name: ClassVar[str] = "megatron"
    selection: ClassVar[StrategySelection] = StrategySelection(
        (UseMegatronSetting, MegatronSettings), "MegatronLMPlugin", "megatron_lm_plugin"
    )
    hardware_tested: ClassVar[bool] = False
    priority: ClassVar[int] = 10
    shards_params: ClassVar[bool] = True
    supports_loss_weighting: ClassVar[bool] = False
    _wrapper_classes: ClassVar[Mapping[str, str]] = {
        "optimizer": "accelerate.facade.engine_wrappers:MegatronLMOptimizerWrapper"
    }

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        from accelerate.strategy.megatron.plugin import MegatronLMPlugin

        plugins = self.selection.plugins(request)
        self.plugin: MegatronLMPlugin = plugins[0] if plugins else MegatronLMPlugin()
        # Of the one model that is prepared.
        self._engine: MegatronEngine | None = None
        self._full_state: MegatronFullStateConverter | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterator[OptionStatus]:
        """Report each requested option as applied, or say why Megatron-LM ignores it."""
        unread = {row.name: row.details["unread"] for row in declared_settings(MegatronSettings)}
        for option in self._requested_options:
            yield option.report_unless(unread.get(option.name, ""))

    def check(self) -> None:
        """Refuse options that Megatron-LM cannot do, and devices on which it does not run.

        Raises:
            MissingExtraError, DeviceError, SettingError, FeatureNotBuiltError: by what is wrong.
        """
        from accelerate.strategy.megatron.layout import check_supported
        from accelerate.strategy.megatron.plugin import check_options

        check_options(self.plugin, self.request.precision)
        check_supported(self.world)
        assert self.layout

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The plugins by the names under which scripts look for them."""
        return {"megatron_lm_plugin": self.plugin}

    # --- who has which data

    @cached_property
    def layout(self) -> MegatronLayout:
        """The ranks of this process in the tensor, data and pipeline parallel groups."""
        from accelerate.strategy.megatron.layout import megatron_layout

        return megatron_layout(self.plugin, self.world)

    @property
    def data_shard(self) -> RankDataShard:
        """The data shard of this process: one for each model replica."""
        return self.layout.share

    @property
    def model_parallel_size(self) -> int:
        """The number of processes that share one model replica: tensor times pipeline parallel."""
        return self.layout.tp * self.layout.pp

    # --- prepare

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Build Megatron-LM's model, with the optimizer on it."""
        models = [model for model in dict.fromkeys(bundle.objects_of("model")) if model is not self._engine]
        sizes = bundle.batch_sizes(self.layout.dp)
        if sizes and (models or not hasattr(self.plugin, "global_batch_size")):
            micro_batch = (min if self.plugin.is_train_batch_min else max)(sizes)
            yield PrepareStep(
                "batch",
                f"the {self.layout.micro_batches} micro-batches of a step have {micro_batch} samples each",
                lambda _: self.plugin.set_training_args(micro_batch, self.layout.dp),
            )
        if not models:
            return
        from accelerate.strategy.megatron.model_families import model_family

        if len(models) > 1 or self._engine is not None:
            raise PrepareError(
                "several models for Megatron-LM",
                why="one program trains one model by Megatron-LM",
                fix="prepare one; a second one that is only evaluated needs no prepare",
            )
        model_family(models[0])
        layout = self.layout
        reason = f"tensor parallel {layout.tp}, pipeline parallel {layout.pp}, data parallel {layout.dp}"
        yield PrepareStep("engine", reason, self._build)

    def _build(self, bundle: PrepareBundle) -> None:
        from accelerate.strategy.megatron.engine_factory import (
            build_engine,
            build_stepper,
            replace_dummy_scheduler,
        )

        (model,) = dict.fromkeys(bundle.objects_of("model"))
        optimizers = list(dict.fromkeys(bundle.objects_of("optimizer")))
        engine, whole, groups = build_engine(self, model, optimizers)
        for optimizer in optimizers:
            engine.stepper = build_stepper(engine, whole, groups, optimizer)
            self._optimizer = optimizer
        self._engine, self._full_state = engine, whole
        bundle.replace("model", lambda _: engine)
        advances = bundle.schedule_advances(self.data_shard.count)
        bundle.replace(
            "scheduler", lambda scheduler: replace_dummy_scheduler(scheduler, self.plugin, advances)
        )

    def forget(self) -> None:
        """Drop the prepared models and their optimizers."""
        self._engine = self._full_state = self._optimizer = None

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module, on the meta device: names, shapes, configuration."""
        return self._engine.base_model if self._engine is not None and model is self._engine else model

    def _converter(self, model: nn.Module) -> MegatronFullStateConverter:
        converter = self._full_state
        if converter is None or (model is not converter.engine and model is not converter.engine.base_model):
            raise PrepareError(
                f"this {type(model).__name__} was not prepared by this Accelerator",
                fix="give the model that prepare returned",
            )
        return converter

    # --- the loop

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the ``main_grad`` buffers in which Megatron-LM accumulates gradients."""
        grads = (getattr(parameter, "main_grad", None) for parameter in parameters)
        return [grad for grad in grads if grad is not None]

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the global gradient norm; the plugin's own limit then does not count."""
        return torch.tensor(
            self._clipper(parameters).clip_norm(max_norm, norm_type), device=self.world.device
        )

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clip each element of the reduced gradients."""
        stepper = self._clipper(parameters)
        stepper.finish_gradients()
        for parameter in stepper.megatron_optimizer.get_parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-limit, limit)

    def _clipper(self, parameters: Iterable[torch.Tensor]) -> MegatronOptimizerStepper:
        """Return the stepper whose trainable parameters are exactly ``parameters``."""
        param_ids, engine = {id(parameter) for parameter in parameters}, self._engine
        if param_ids and engine is not None and engine.stepper is not None:
            trained = {id(p) for p in engine.parameters() if p.requires_grad}
            if trained <= param_ids <= {id(p) for p in engine.parameters()}:
                return engine.stepper
        raise PrepareError(
            "clipping of other gradients than all those of the prepared model",
            why="Megatron-LM clips by the norm of the whole model, over all processes",
            fix="accelerator.clip_grad_norm_(model.parameters(), ...) with the model that prepare returned",
        )

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        """Run Megatron-LM's optimizer step, which wraps the user's optimizer."""
        self._stepper(optimizer).step()

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear Megatron-LM's gradients."""
        self._stepper(optimizer).clear()

    def _stepper(self, optimizer: Any) -> MegatronOptimizerStepper:
        stepper = None if self._engine is None or optimizer is not self._optimizer else self._engine.stepper
        if stepper is None:
            raise PrepareError(
                f"the {type(optimizer).__name__} was not prepared together with its model",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        return stepper

    # --- states

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full model state by the user's names on the host of rank 0; other ranks get nothing."""
        return self._converter(model).model_state()

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state, which every process has; each takes its shard."""
        return self._converter(model).load_weights(state, strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gather the full optimizer state on rank 0, as a single process would have it."""
        stepper = self._stepper(optimizer)
        state = self._converter(stepper.engine).optimizer_state(stepper)
        return state if not self.plugin.no_save_optim else {**state, "state": {}}

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state, which every process has; each takes its shard."""
        if not self.plugin.no_load_optim:
            stepper = self._stepper(optimizer)
            self._converter(stepper.engine).load_optimizer(stepper, state)


PLUGIN = Megatron
