"""ZeRO by the DeepSpeed engine: it owns the optimizer, the step and the number format of a model.

Its stage says what is partitioned over the processes: 1 the optimizer's state, 2 gradients too, 3 parameters
too. The configuration that the engine gets is made from what the ``Accelerator``, the loader and the
optimizer say (``zero/fill.py``). Gradients are complete after the last backward of a window; the step is
taken in ``optimizer.step()``, so the norm is known, and clipping chosen, between the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core.effects import Effect, Option, given
from accelerate.core.errors import MissingExtraError, PrepareError, SettingError
from accelerate.core.packages import installed
from accelerate.core.setting import load
from accelerate.strategy.base import NOTHING, Bundle, Request, Step, Strategy, Written, leaves
from accelerate.strategy.settings.deepspeed import COUNTERPARTS, DeepSpeedSettings, DeepSpeedSwitch, same
from accelerate.world.world import World

if TYPE_CHECKING:
    from accelerate.strategy.deepspeed.engine import Engines, Made
    from accelerate.strategy.deepspeed.jobs import Asked, Job
    from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin


@contextmanager
def GatheredParameters(  # noqa: N802 - the engine's own name for it
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Generator[None]:
    """Inside the block, parameters that the engine has partitioned are whole; others always are.

    Args:
        params: one parameter, or several.
        modifier_rank: the rank whose changes all take over at the end; None forbids changes.
        fwd_module: the module whose forward uses them, so that the engine fetches them in time.
        enabled: false leaves them partitioned.
    """
    every = list(params) if isinstance(params, Iterable) and not hasattr(params, "grad") else [params]
    # The engine marks what it has partitioned.
    if not (enabled and any(hasattr(parameter, "ds_id") for parameter in every)):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


def _given(request: Request) -> list[Any]:
    """The plugins that were given, also as a table of several."""
    every = [p for plugin in request.plugins for p in _flat(plugin)]
    return [plugin for plugin in every if type(plugin).__name__ == "DeepSpeedPlugin"]


def _flat(plugin: Any) -> Iterable[Any]:
    return plugin.values() if isinstance(plugin, Mapping) else [plugin]


class DeepSpeed(Strategy):
    """Trains by DeepSpeed's engines, one for each model."""

    name: ClassVar[str] = "deepspeed"
    priority: ClassVar[int] = 10
    owns_step: ClassVar[bool] = True
    owns_precision: ClassVar[bool] = True
    shards: ClassVar[bool] = True
    spreads: ClassVar[bool] = False
    wrappers: ClassVar[Mapping[str, str]] = {
        "optimizer": "accelerate.facade.deepspeed:DeepSpeedOptimizerWrapper",
        "scheduler": "accelerate.facade.deepspeed:DeepSpeedSchedulerWrapper",
    }

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        from accelerate.strategy.deepspeed.engine import Engines
        from accelerate.strategy.deepspeed.plugin import DeepSpeedPlugin, plugins_of

        found = _given(request)
        tables = [dict(p) for p in request.plugins if isinstance(p, Mapping)]
        self.table: dict[str, DeepSpeedPlugin] = plugins_of(
            tables[0] if tables else found[0] if found else DeepSpeedPlugin()
        )
        self.engines: Engines = Engines()
        self._quiet: set[int] = set()

    # --- how it is asked for

    @classmethod
    def claims(cls, request: Request) -> bool:
        """The plugin was given, or the launcher's variable says so; one process may offload by it."""
        return bool(_given(request)) or load(DeepSpeedSwitch).value.use_deepspeed

    @classmethod
    def asked(cls, request: Request) -> Iterator[Option]:
        """The switch and the launcher's options, or the plugin."""
        yield from given(load(DeepSpeedSwitch))
        yield from given(load(DeepSpeedSettings))
        for plugin in _given(request):
            yield Option("deepspeed_plugin", type(plugin).__name__, "the argument deepspeed_plugin")
            yield from plugin.asked()

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """What the engines were made with."""
        made = self.engines.trained()
        for option in self.asked(self.request):
            if option.name not in COUNTERPARTS:
                yield option.applied()
            elif not made:
                yield option.pending("no model is prepared with its optimizer")
            else:
                yield self._seen(option, made[-1])

    def _seen(self, option: Option, made: Made) -> Effect:
        from accelerate.strategy.deepspeed import tree

        keys, absent = COUNTERPARTS[option.name]
        here = tree.get(made.config, ".".join(keys), absent)
        ours = option.value in ("auto", None) or same(option.value, here)
        return option.seen("" if ours else f"the engine's configuration says {'.'.join(keys)}: {here}")

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """The contract's name, on any device."""
        return "DEEPSPEED"

    def check(self) -> None:
        """Refuses a machine without the package, and number formats that a host cannot compute in.

        Raises:
            MissingExtraError, SettingError: it is so.
        """
        if not installed("deepspeed"):
            raise MissingExtraError("deepspeed", "training by the strategy 'deepspeed'")
        for plugin in self.table.values():
            plugin.set_mixed_precision(self.request.precision)
            if plugin.precision == "fp16" and self.world.device.type == "cpu":
                raise SettingError(
                    "the engine cannot compute in fp16 on the CPU",
                    fix="use mixed_precision='bf16', or 'no'",
                )
        self._warn_of_drive()
        if self.request.precision not in ("no", "fp16", "bf16"):
            raise SettingError(
                f"mixed_precision={self.request.precision!r} does not go with this engine",
                fix="use 'bf16', 'fp16' or 'no'",
            )
        next(iter(self.table.values())).select(_from_accelerator_state=True)

    def _warn_of_drive(self) -> None:
        devices = {(p.offload_optimizer_device, p.offload_param_device) for p in self.table.values()}
        if any("nvme" in pair for pair in devices) and self.world.device.type == "cpu":
            warnings.warn(
                "offload to a drive on a machine without an accelerator: the engine compiles a reader that "
                "needs libaio, and has been seen to abort when the program ends (SIGABRT)",
                stacklevel=5,
            )

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The one that is selected."""
        return next(plugin for plugin in self.table.values() if plugin.selected)

    @property
    def plugins(self) -> dict[str, Any]:
        """All of them, and the number format where the engine's own file says it."""
        found: dict[str, Any] = {"deepspeed_plugins": self.table}
        if self.plugin.precision is not None:
            found["_mixed_precision"] = self.plugin.precision
        return found

    @property
    def accumulation(self) -> int | None:
        """As the plugin or the engine's file says."""
        steps = self.plugin.get_value("gradient_accumulation_steps")
        return None if steps in (None, "auto") else int(steps)

    # --- prepare

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """An engine for each model; the optimizer and the engine's own schedule go into it."""
        from accelerate.strategy.deepspeed.jobs import jobs_of

        jobs = list(jobs_of(self._asks(), bundle)) if bundle.training else []
        for job in jobs:
            reason = f"{self.world.size} process(es), {job.filled.says()}"
            yield Step("engine", reason, lambda b, job=job: self._make(b, job))
        if not bundle.training and any(self.engines.of(m) is None for m in bundle.of("model")):
            yield Step("place", f"the weights go to {self.world.device}", self._place)

    def _asks(self) -> Asked:
        from accelerate.strategy.deepspeed.jobs import Asked

        owner, host = self.owner, self.world.device.type == "cpu"
        steps = 1 if owner is None else owner.gradient_accumulation_steps
        shared = owner is not None and owner.split_batches
        size, precision = self.world.size, self.request.precision
        return Asked(self.engines, self.plugin, steps, precision, size, host, shared)

    def _make(self, bundle: Bundle, job: Job) -> None:
        from accelerate.strategy.deepspeed import engine

        engine.begin(self.world)
        engine.check_drive(job.filled.config)
        before = self.engines.of(job.model)
        module = self.unwrap(job.model)
        if before is not None:
            engine.release(before)
        self.plugin.set_moe_leaf_modules(module)
        made = engine.make(module, job.filled.config, job.optimizer, job.scheduler)
        if before is not None:
            made = engine.adopt(before, made)
        self.engines.add(made)
        self.plugin.show(job.filled.config)
        bundle.replace("model", lambda m: made.engine if m is job.model or m is module else m)
        if job.optimizer is not None:
            bundle.replace("optimizer", lambda o: made.optimizer if o is job.optimizer else o)
        if job.scheduler is not None:
            bundle.replace("scheduler", lambda s: made.scheduler if s is job.scheduler else s)

    def _place(self, bundle: Bundle) -> None:
        for index in bundle.positions("model"):
            if bundle.place[index] and self.engines.of(bundle.objects[index]) is None:
                bundle.objects[index].to(self.world.device)

    def forget(self) -> None:
        """The engines; a model may be prepared again."""
        self.engines.clear()

    def advances(self, scheduler: Any) -> bool:
        """Those that the engine has made or was given."""
        return any(made.scheduler is scheduler for made in self.engines if made.scheduler is not None)

    # --- the loop

    def divides(self, kwargs: dict[str, Any]) -> bool:
        """Unless ``scale_wrt_gas=False`` says that the loss is divided already."""
        return bool(kwargs.pop("scale_wrt_gas", True))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Through the engine whose model the loss comes from.

        Raises:
            PrepareError: it comes from no trained engine, or from several.
        """
        made = self._reached(loss)
        complete = self.owner.gradient_state.sync_gradients if self.owner is not None else True
        made.backward(loss, complete=complete and id(made.engine) not in self._quiet, **kwargs)

    def _reached(self, loss: torch.Tensor) -> Made:
        trained = self.engines.trained()
        if len(trained) == 1:
            return trained[0]
        if not trained:
            raise PrepareError(
                "backward before a model was prepared with its optimizer",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        below = leaves(loss)
        found = [made for made in trained if not below.isdisjoint(made.module.parameters())]
        if len(found) == 1:
            return found[0]
        names = ", ".join(type(made.module).__name__ for made in found) or "none of them"
        raise PrepareError(
            f"backward of a loss that comes from {len(found)} of {len(trained)} prepared models",
            why=f"each engine runs the backward of its own model; this loss reaches {names}",
            fix="detach() what comes from the other models, or prepare one module that contains them",
        )

    def accumulating(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Without ``sync`` a backward does not complete the window."""
        return NOTHING if sync else self._quietly(models)

    @contextmanager
    def _quietly(self, models: Iterable[nn.Module]) -> Generator[None]:
        made = (self.engines.of(model) for model in models)
        quiet = {id(found.engine) for found in made if found is not None} - self._quiet
        self._quiet |= quiet
        try:
            yield
        finally:
            self._quiet -= quiet

    def shortened(self, factor: float) -> None:
        """The window ends early: what was accumulated counts more."""
        for made in self.engines.trained():
            if made.pending and not made.complete:
                made.stretch = factor

    def held(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """The user's parameters: the engine's optimizer has vectors of its own."""
        made = self.engines.stepping(optimizer)
        return super().held(optimizer) if made is None else [p for group in made.groups for p in group]

    def holds(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """A backward has run since gradients were used or dropped."""
        return any(made.pending for made in self._trained(models))

    def rescale(self, models: Iterable[nn.Module], factor: float) -> bool:
        """The engine's norm, its clipping and its step take gradients for as large as they are meant."""
        for made in self._trained(models):
            made.stretch *= factor
        return True

    def _trained(self, models: Iterable[nn.Module]) -> list[Made]:
        found = (self.engines.of(model) for model in models)
        return [made for made in found if made is not None and made.optimizer is not None]

    def synchronises(self, model: nn.Module) -> bool:
        """Whether a backward now is the last of its window."""
        made = self.engines.of(model)
        return made is None or id(made.engine) not in self._quiet

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """Through the whole graph, for processes exchange gradients in the order in which they come.

        The loss may be NaN: what comes is replaced by zeros before it is used.

        Raises:
            PrepareError: the loss has no graph.
        """
        if loss.grad_fn is None:
            raise PrepareError(
                "backward(loss, num_items=0) of a loss that was not computed by the model",
                why="other processes wait for this one's gradients, in the order of the model's layers",
                fix="compute the loss from the model's outputs also when there are no items",
            )
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
        try:
            self.backward(loss)
        finally:
            for hook in hooks:
                hook.remove()

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """The norm over all processes; the engine's step, which comes next, clips by ``max_norm``.

        Raises:
            PrepareError: another norm than the Euclidean, or another limit than the configuration's.
        """
        made = self._clipped(parameters)
        if norm_type != 2:
            raise PrepareError(
                f"clip_grad_norm_ with norm_type={norm_type}", why="the engine clips by the Euclidean norm"
            )
        if made.clip and max_norm not in (made.clip, float("inf")):
            raise SettingError(
                f"clip_grad_norm_ was given {max_norm}, but the engine's configuration says "
                f"gradient_clipping: {made.clip}",
                why="each of the two would train in another way",
                fix='keep one of them, or write "auto" for gradient_clipping',
            )
        norm = made.norm()
        if max_norm != float("inf"):
            made.limit(max_norm)
        return norm.to(self.world.device)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """The engine has no such clipping."""
        raise PrepareError(
            "clip_grad_value_ does not go with this engine",
            why="gradients are partitioned, and the engine clips by their norm",
            fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
        )

    def _clipped(self, parameters: Iterable[torch.Tensor]) -> Made:
        trained, wanted = self.engines.trained(), set(parameters)
        if len(trained) == 1:
            return trained[0]
        found = [made for made in trained if not wanted.isdisjoint(made.module.parameters())]
        if len(found) != 1:
            raise PrepareError(
                f"clip_grad_norm_ of parameters of {len(found)} of {len(trained)} prepared models",
                why="each engine clips the gradients of its own model",
                fix="call it once for each model: accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        return found[0]

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are on this process whole; the engine's own are not shown."""
        return [p.grad for p in parameters if p.grad is not None]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """The engine's step: it clips, steps, clears gradients and advances its own schedule."""
        made = self.engines.stepping(optimizer)
        if made is not None:
            made.step()
        return None

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Drops gradients that no step has used; after a step there are none."""
        made = self.engines.stepping(optimizer)
        if made is not None:
            made.drop()

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last step was not taken, because a gradient was not finite."""
        made = self.engines.stepping(optimizer)
        return made is not None and made.skipped

    # --- states

    def state(self, model: nn.Module) -> dict[str, Any]:
        """As the model computes with it; on process 0 alone in stage 3. All processes must call it.

        Raises:
            PrepareError: it is partitioned, and gathering was forbidden.
        """
        from accelerate.strategy.deepspeed.whole import model_state

        made = self.engines.of(model)
        if made is None or made.stage < 3:
            return self.unwrap(model).state_dict()
        if not self.plugin.gathers:
            raise PrepareError(
                "the weights are partitioned, and zero3_save_16bit_model is False",
                why="so they are not gathered on one process",
                fix="DeepSpeedPlugin(zero3_save_16bit_model=True), or in the engine's configuration "
                '"stage3_gather_16bit_weights_on_model_save": true; accelerator.save_state writes parts',
            )
        return model_state(made, self.world.rank == 0, exact=False)

    def exact_state(self, model: nn.Module) -> dict[str, Any]:
        """In float32, as the optimizer has it; on process 0."""
        from accelerate.strategy.deepspeed.whole import model_state

        made = self.engines.of(model)
        if made is None:
            return self.unwrap(model).state_dict()
        return model_state(made, self.world.rank == 0, exact=True)

    def like(self, model: nn.Module) -> Mapping[str, Any]:
        """By the shapes that partitioned parameters have as a whole."""
        from accelerate.strategy.deepspeed.whole import shapes

        return shapes(self.unwrap(model))

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """A full state on every process; each takes its part."""
        from accelerate.strategy.deepspeed.whole import load_model

        made = self.engines.of(model)
        if made is None:
            return self.unwrap(model).load_state_dict(state, strict=strict)
        return load_model(made, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """As one process would have it; on process 0."""
        from accelerate.strategy.deepspeed.whole import optimizer_state

        made = self.engines.stepping(optimizer)
        return optimizer.state_dict() if made is None else optimizer_state(made, self.world.rank == 0)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """A full state on every process; each takes its part."""
        from accelerate.strategy.deepspeed.whole import load_optimizer

        made = self.engines.stepping(optimizer)
        if made is None:
            optimizer.load_state_dict(dict(state))
        else:
            load_optimizer(made, state)

    def own_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """An engine's checkpoint for each model that is trained."""
        from accelerate.strategy.deepspeed.files import EngineFiles

        found = [(index, self.engines.of(model)) for index, model in enumerate(models)]
        trained = [(index, made) for index, made in found if made is not None and made.optimizer is not None]
        return [EngineFiles(made, index, self.world, dict(options)) for index, made in trained]

    @classmethod
    def written(cls, folder: Path) -> Sequence[Written]:
        """The whole states out of an engine's parts; the engine is not needed."""
        from accelerate.strategy.deepspeed.files import written

        return written(folder)

    @staticmethod
    def inner(model: Any) -> Any:
        """The module inside of an engine, also of one that was made by hand."""
        kinds = {kind.__name__ for kind in type(model).__mro__}
        return model.module if "DeepSpeedEngine" in kinds else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        return self.inner(model)


PLUGIN = DeepSpeed
