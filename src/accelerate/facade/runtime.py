"""The ``Runtime`` of an ``Accelerator``, made from its arguments: its world, precision and strategy.

Arguments are checked, and merged with environment variables and DeepSpeed's configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.core.argument_checks import KwargsHandler
from accelerate.core.errors import SettingError, warn_user
from accelerate.core.setting import SettingsWithOrigins, load_settings
from accelerate.core.torch_internals import COMMON, require
from accelerate.facade.compilation import TorchDynamoPlugin
from accelerate.facade.gradient_state import GradientAccumulationPlugin, GradientState
from accelerate.facade.launch_settings import GradientAccumulationSettings
from accelerate.facade.state import AcceleratorState
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import EngineStrategy, Strategy, StrategyRequest, SubclassGathering
from accelerate.watch.profile import ProfileKwargs
from accelerate.world import world as worlds
from accelerate.world.preemption import PreemptionKwargs
from accelerate.world.world import InitProcessGroupKwargs, World

if TYPE_CHECKING:
    from accelerate.strategy.parallelism.config import ParallelismConfig


@dataclass(frozen=True)
class Runtime:
    """The values that components of an ``Accelerator`` share; none changes after its constructor.

    Attributes:
        world: the process group and the device of this process.
        precision: the number format of the forward pass.
        strategy: how the training is distributed over the processes.
        handlers: the kwargs handlers that were given, by class.
        gradients: the state of gradient accumulation.
        compiler: the options of ``torch.compile``.
        state: the ``AcceleratorState`` that shows these choices to scripts; components read only what a
            script has assigned to it.
        accumulation: the settings of gradient accumulation, and where each value comes from.
        pid: of the process that made it; a fork of that process, such as a loader's worker, has another.
    """

    world: World
    precision: Precision
    strategy: Strategy
    handlers: dict[type, Any]
    gradients: GradientState
    compiler: TorchDynamoPlugin
    state: Any = None
    accumulation: SettingsWithOrigins[GradientAccumulationSettings] = field(
        default_factory=lambda: load_settings(GradientAccumulationSettings)
    )
    pid: int = field(default_factory=os.getpid)


def build_runtime(
    handlers: dict[type, Any],
    plugins: Iterable[Any],
    *,
    mixed_precision: str | None = None,
    cpu: bool = False,
    parallelism: ParallelismConfig | None = None,
    compiler: TorchDynamoPlugin | None = None,
    compiler_backend: Any = None,
    accumulation_plugin: GradientAccumulationPlugin | None = None,
    accumulation_steps: int = 1,
) -> Runtime:
    """Open the world, and choose the precision and the strategy.

    Where none of these is given, those of the ``Accelerator`` before are taken while it is in use: libraries
    write ``Accelerator()`` for another view of the same training, which 1.15 gives them.

    Args:
        handlers: the kwargs handlers, by class.
        plugins: of strategies; None stands for one that is not given.
        mixed_precision, cpu, accumulation_plugin, accumulation_steps: arguments of the ``Accelerator``.
        parallelism: the sizes of the dimensions of a device mesh.
        compiler, compiler_backend: the options of ``torch.compile``, or its back end.

    Raises:
        SettingError: a value is wrong, or two contradict each other.
        FeatureNotBuiltError: a requested feature is not built yet.
    """
    if compiler is not None and compiler_backend is not None:
        raise SettingError(
            "the compiler is given twice: as dynamo_backend and in dynamo_plugin", fix="keep the second"
        )
    if accumulation_plugin is not None and accumulation_steps != 1:
        raise SettingError(
            "gradient_accumulation_steps is given twice: as an argument and in the plugin",
            fix="keep the second",
        )
    given = tuple(plugin for plugin in plugins if plugin is not None)
    is_stated = any((*given, parallelism, compiler, compiler_backend))
    if not is_stated and (earlier := AcceleratorState.reusable(mixed_precision)):
        mixed_precision, given = earlier.mixed_precision, earlier.strategy_plugins
        parallelism, compiler = earlier.parallelism_config, earlier.dynamo_plugin
    else:
        parallelism = resolve_parallelism(parallelism, given)
    compiler = compiler or TorchDynamoPlugin(backend=compiler_backend)
    group = handlers.get(InitProcessGroupKwargs)
    state = AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=cpu,
        dynamo_plugin=compiler,
        parallelism_config=parallelism,
        _from_accelerator=True,
        **(group.to_kwargs() if group is not None else {}),
    )
    require(*COMMON)
    world = worlds.current()
    assert world is not None, "the state has opened it"
    precision = PRECISIONS.get(state.mixed_precision)(world.hardware, handlers)
    precision.check()
    request = StrategyRequest(
        world,
        given,
        handlers,
        precision=precision.name,
        autocast_format=precision.autocast_format,
        parallelism=parallelism,
    )
    if parallelism is not None and (tp_size := parallelism.tp_size or 1) > 1:
        precision.check_tensor_parallel(tp_size)
    strategy = choose_strategy(request)
    if precision.scales_loss:
        precision.set_overflow_sync(strategy.flag_reduction())
    if isinstance(strategy, SubclassGathering):
        precision.set_gather_extension(strategy.gathers_tensor_subclasses)
    state.show_strategy(strategy)
    state.strategy_plugins = given
    gradients = GradientState.create(accumulation_plugin)
    engine_steps = strategy.accumulation_steps if isinstance(strategy, EngineStrategy) else None
    if accumulation_plugin is None:
        accumulation = resolve_accumulation(accumulation_steps, engine_steps)
        gradients.plugin_kwargs["num_steps"] = accumulation.value.gradient_accumulation_steps
    else:
        accumulation = load_settings(GradientAccumulationSettings)
        # Libraries that count micro-batches by themselves say 1.
        if engine_steps is not None and gradients.num_steps > 1:
            where = "num_steps of the GradientAccumulationPlugin"
            gradients.plugin_kwargs["num_steps"] = take_engine_steps(where, gradients.num_steps, engine_steps)
    return Runtime(world, precision, strategy, handlers, gradients, compiler, state, accumulation)


def choose_strategy(request: StrategyRequest) -> Strategy:
    """Return the strategy for ``request``: of those that claim it, the one with the highest priority.

    Raises:
        SettingError: two of the same priority claim it.
    """
    requested = [s for s in STRATEGIES if s.selection.is_requested(request)]
    claims = sorted((s for s in requested if s.claims(request)), key=lambda s: -s.priority)
    if len(claims) > 1 and claims[0].priority == claims[1].priority:
        raise SettingError(
            f"two strategies are asked for at once: {claims[0].name} and {claims[1].name}",
            fix="keep the plugin, flag or variable of one of them",
        )
    request.passed_over.extend(s for s in requested if s.selection.unused_reason and s not in claims)
    chosen = claims[0](request)
    chosen.check()
    return chosen


def resolve_parallelism(
    config: ParallelismConfig | None, plugins: Iterable[Any] = ()
) -> ParallelismConfig | None:
    """Return the parallelism config: as given, from the older plugin, or from the launcher; None without.

    Raises:
        SettingError: the two differ in ``tp_size``.
    """
    from accelerate.strategy.launch_settings.parallelism import UseParallelismConfigSetting

    tp_size = 1
    for plugin in plugins:
        tp_size = getattr(plugin, "tp_size", tp_size)
    if config is None and (
        tp_size > 1 or load_settings(UseParallelismConfigSetting).value.use_parallelism_config
    ):
        from accelerate.strategy.parallelism.config import ParallelismConfig

        return ParallelismConfig(tp_size=tp_size) if tp_size > 1 else ParallelismConfig()
    if config is not None and tp_size not in (1, config.tp_size):
        raise SettingError(
            f"torch_tp_plugin says tp_size={tp_size}, and parallelism_config tp_size={config.tp_size}",
            fix="leave torch_tp_plugin out",
        )
    return config


def handlers_by_class(handlers: Iterable[KwargsHandler]) -> dict[type, KwargsHandler]:
    """Return the kwargs handlers by the class that is known here, also those of a subclass.

    Raises:
        SettingError: one is of no known class, or two are of the same.
    """
    handler_classes: list[type[KwargsHandler]] = [InitProcessGroupKwargs, PreemptionKwargs, ProfileKwargs]
    handler_classes += [s.handler_class for s in STRATEGIES if s.handler_class is not None]
    handler_classes += [c for p in PRECISIONS for c in p.handler_classes if c not in handler_classes]
    handlers_of: dict[type, KwargsHandler] = {}
    for handler in handlers:
        kind = next((k for k in handler_classes if isinstance(handler, k)), None)
        if kind is None:
            raise SettingError(
                f"{type(handler).__name__} is not a kwargs handler that is known here",
                why=f"known: {', '.join(sorted({k.__name__ for k in handler_classes}))}",
                fix="give an instance of one of them in kwargs_handlers=[...]",
            )
        if kind in handlers_of:
            raise SettingError(f"two {kind.__name__} are given in kwargs_handlers", fix="keep one of them")
        handlers_of[kind] = handler
    return handlers_of


def resolve_accumulation(
    steps: int, engine_steps: int | None = None
) -> SettingsWithOrigins[GradientAccumulationSettings]:
    """Return the micro-batches of an optimizer step, where no plugin says them, and who says so.

    A variable of the environment counts before the argument, as in 1.15: a launch decides for its hardware.

    Args:
        steps: ``gradient_accumulation_steps`` of the ``Accelerator``; 1 means not given.
        engine_steps: those of the DeepSpeed or Megatron-LM config, which win with a warning, if given there.

    Raises:
        SettingError: there are fewer than one.
    """
    name = "gradient_accumulation_steps"
    loaded = load_settings(GradientAccumulationSettings, code={name: None if steps == 1 else steps})
    origins = sorted(loaded.origins[name], key=lambda each: each.source != "environment")
    origin, count = origins[0], origins[0].value
    if engine_steps is not None:
        is_default = origin.source == "default"
        count = take_engine_steps(origin.where, engine_steps if is_default else count, engine_steps)
    return SettingsWithOrigins(GradientAccumulationSettings(count), {name: tuple(origins)})


def take_engine_steps(where: str, steps: int, engine_steps: int) -> int:
    """Return ``engine_steps``; warn if the program says another number, and ``where`` it does.

    Raises:
        SettingError: there are fewer than one.
    """
    name = "gradient_accumulation_steps"
    if engine_steps < 1:
        raise SettingError(f"{name} is {engine_steps}", fix="use 1 or more")
    if engine_steps != steps:
        warn_user(
            f"{where} is {steps}, but the DeepSpeed configuration says {name}: {engine_steps}, "
            f'which counts, as in 1.x: keep one of them, or write "auto" there'
        )
    return engine_steps
