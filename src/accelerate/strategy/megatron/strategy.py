"""Training by Megatron-LM's engine, the package megatron-core: tensor and pipeline parallel GPTs.

The engine has its own model, gradients and steps. ``prepare`` builds its GPT of the user's model and replaces
the bundle; the user's optimizer goes on, on the engine's parameters and inside the engine's step. The work
stands in ``strategy/megatron``, which is loaded only when the engine is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core import environ
from accelerate.core.effects import Effect, Option, given
from accelerate.core.errors import PrepareError
from accelerate.core.setting import load
from accelerate.strategy.base import Bundle, Request, Share, Step, Strategy
from accelerate.strategy.settings.megatron import MegatronSettings, MegatronSwitch
from accelerate.world.world import World

if TYPE_CHECKING:
    from accelerate.strategy.megatron.engine import MegatronEngine
    from accelerate.strategy.megatron.layout import Layout
    from accelerate.strategy.megatron.optimizer import Stepper
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin
    from accelerate.strategy.megatron.states import Whole


def _given_to(request: Request) -> Any:
    return next((p for p in request.plugins if type(p).__name__ == "MegatronLMPlugin"), None)


class Megatron(Strategy):
    """The engine trains. Tests run it on CPUs, with stand-ins for its devices; on GPUs nobody has."""

    name: ClassVar[str] = "megatron"
    proved: ClassVar[bool] = False
    priority: ClassVar[int] = 10
    owns_step: ClassVar[bool] = True
    owns_precision: ClassVar[bool] = True
    shards: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    wrappers: ClassVar[Mapping[str, str]] = {
        "optimizer": "accelerate.facade.megatron_lm:MegatronLMOptimizerWrapper"
    }

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        from accelerate.strategy.megatron.plugin import MegatronLMPlugin

        self.plugin: MegatronLMPlugin = _given_to(request) or MegatronLMPlugin()
        self._engines: list[MegatronEngine] = []
        self._wholes: dict[int, Whole] = {}
        self._steppers: dict[int, tuple[torch.optim.Optimizer, Stepper]] = {}

    @classmethod
    def claims(cls, request: Request) -> bool:
        """The plugin, or the launcher's variable."""
        return _given_to(request) is not None or environ.flag("ACCELERATE_USE_MEGATRON_LM")

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """The contract's name, on any device."""
        return "MEGATRON_LM"

    @classmethod
    def asked(cls, request: Request) -> Iterator[Option]:
        """The switch, the plugin, and the launcher's options."""
        yield from given(load(MegatronSwitch))
        yield from given(load(MegatronSettings))
        if _given_to(request) is not None:
            yield Option("megatron_lm_plugin", "MegatronLMPlugin", "the argument megatron_lm_plugin")

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """What the engine does not read is said."""
        from accelerate.strategy.megatron.plugin import UNREAD

        for option in self.asked(self.request):
            why = UNREAD.get(option.name.removeprefix("megatron_lm_"))
            yield option.failed(why) if why else option.applied()

    def check(self) -> None:
        """What the engine cannot do, and where it does not run.

        Raises:
            MissingExtraError, DeviceError, SettingError, NotBuiltError: by what is wrong.
        """
        from accelerate.strategy.megatron.layout import check_engine
        from accelerate.strategy.megatron.refused import check

        check(self.plugin, self.request.precision)
        check_engine(self.world)
        assert self.layout

    @property
    def plugins(self) -> Mapping[str, Any]:
        """How it trains."""
        return {"megatron_lm_plugin": self.plugin}

    # --- who has which data

    @cached_property
    def layout(self) -> Layout:
        """The place of this process."""
        from accelerate.strategy.megatron.layout import layout_of

        return layout_of(self.plugin, self.world)

    @property
    def share(self) -> Share:
        """By the copy of the model."""
        return self.layout.share

    @property
    def peers(self) -> int:
        """Those that work on one copy of the model."""
        return self.layout.tp * self.layout.pp

    # --- prepare

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Build the engine's model, with the optimizer on it."""
        models = [model for model in dict.fromkeys(bundle.of("model")) if model not in self._engines]
        if not models:
            return
        from accelerate.strategy.megatron.families import family_of

        if len(models) + len(self._engines) > 1:
            raise PrepareError(
                "several models for Megatron-LM",
                why="one program trains one model by the engine",
                fix="prepare one; a second one that is only evaluated needs no prepare",
            )
        family_of(models[0])
        layout = self.layout
        reason = (
            f"{layout.tp} processes share each layer, {layout.pp} the layers, "
            f"and {layout.dp} copies average their gradients"
        )
        yield Step("engine", reason, self._build)

    def _build(self, bundle: Bundle) -> None:
        from accelerate.strategy.megatron.prepared import engine_of, scheduled, stepper_of

        (model,) = dict.fromkeys(bundle.of("model"))
        optimizers = list(dict.fromkeys(bundle.of("optimizer")))
        engine, whole, groups = engine_of(self, model, optimizers)
        for optimizer in optimizers:
            engine.stepper = stepper_of(engine, whole, groups, optimizer)
            self._steppers[id(optimizer)] = optimizer, engine.stepper
        self._engines.append(engine)
        self._wholes[id(engine)] = whole
        bundle.replace("model", lambda _: engine)
        bundle.replace("scheduler", lambda scheduler: scheduled(scheduler, self.plugin, self.layout.dp))

    def forget(self) -> None:
        """Lets the engine go."""
        self._engines, self._wholes, self._steppers = [], {}, {}

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module, without values: names, shapes, configuration."""
        return getattr(model, "base_model", model) if model in self._engines else model

    def _engine(self, model: nn.Module) -> MegatronEngine:
        for engine in self._engines:
            if model is engine or model is engine.base_model:
                return engine
        raise PrepareError(
            f"this {type(model).__name__} was not prepared by this Accelerator",
            fix="give the model that prepare returned",
        )

    # --- the loop

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The engine has done it; a loss that is another one is refused."""
        loss.backward(**kwargs)

    def synchronises(self, model: nn.Module) -> bool:
        """Gradients are reduced when the optimizer steps."""
        return True

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Where the engine adds them up."""
        found = (getattr(parameter, "main_grad", None) for parameter in parameters)
        return [grad for grad in found if grad is not None]

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """By the norm of all gradients of all processes; the plugin's own limit then does not count."""
        return torch.tensor(self._clipper(parameters).clip(max_norm, norm_type), device=self.world.device)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Each element of the complete gradients."""
        stepper = self._clipper(parameters)
        stepper.prepare()
        for parameter in stepper.engine.get_parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-limit, limit)

    def _clipper(self, parameters: Iterable[torch.Tensor]) -> Stepper:
        """The stepper of exactly these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for engine in self._engines:
            own = {id(p) for p in engine.parameters()}
            if engine.stepper is not None and wanted and wanted <= own:
                trained = {id(p) for p in engine.parameters() if p.requires_grad}
                if trained <= wanted:
                    return engine.stepper
        raise PrepareError(
            "clipping of other gradients than all those of the prepared model",
            why="Megatron-LM clips by the norm of the whole model, over all processes",
            fix="accelerator.clip_grad_norm_(model.parameters(), ...) with the model that prepare returned",
        )

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        """The engine's step around the user's optimizer."""
        self._stepper(optimizer).step()

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clears the engine's gradients."""
        self._stepper(optimizer).clear()

    def _stepper(self, optimizer: Any) -> Stepper:
        known = self._steppers.get(id(optimizer))
        if known is None:
            raise PrepareError(
                f"the {type(optimizer).__name__} was not prepared together with its model",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        return known[1]

    # --- states

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Gathered, by the names of the user's model, on the host of process 0; others get nothing."""
        return self._wholes[id(self._engine(model))].weights()

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """A full state on every process; each takes its part."""
        return self._wholes[id(self._engine(model))].load_weights(state, strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gathered, as that of one process would be, on process 0."""
        stepper = self._stepper(optimizer)
        state = self._wholes[id(stepper.model)].optimizer(stepper)
        return state if not self.plugin.no_save_optim else {**state, "state": {}}

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """A full state on every process; each takes its part."""
        if not self.plugin.no_load_optim:
            stepper = self._stepper(optimizer)
            self._wholes[id(stepper.model)].load_optimizer(stepper, state)


PLUGIN = Megatron
