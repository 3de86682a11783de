"""The ``Runtime`` of an ``Accelerator``, made from its arguments: its world, precision and strategy.

Arguments are checked, and merged with environment variables and DeepSpeed's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import SettingError
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.setting import load_settings
from accelerate.core.torch_internals import COMMON, require
from accelerate.data.active_loaders import ActiveLoaders
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.facade.compilation import TorchDynamoPlugin
from accelerate.facade.gradient_state import GradientAccumulationPlugin, GradientState
from accelerate.facade.launch_settings import GradientAccumulationSettings
from accelerate.facade.state import AcceleratorState
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.strategy import STRATEGIES, choose_strategy
from accelerate.strategy.base import Strategy, StrategyRequest
from accelerate.strategy.protocol.engine_strategy import EngineStrategy
from accelerate.watch.profile import ProfileKwargs
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
    """

    world: World
    precision: Precision
    strategy: Strategy
    handlers: dict[type, Any]
    gradients: GradientState
    compiler: TorchDynamoPlugin


def build_runtime(
    state: AcceleratorState,
    handlers: dict[type, Any],
    plugins: Iterable[Any],
    accumulation_plugin: GradientAccumulationPlugin | None = None,
    accumulation_steps: int = 1,
) -> Runtime:
    """Choose the precision and the strategy, and show them in ``state``.

    Args:
        state: of this ``Accelerator``, with its world open.
        handlers: the kwargs handlers, by class.
        plugins: of strategies; None stands for one that is not given.
        accumulation_plugin, accumulation_steps: arguments of the ``Accelerator``.

    Raises:
        SettingError: a value is wrong, or two contradict each other.
        FeatureNotBuiltError: a requested feature is not built yet.
    """
    require(*COMMON)
    world = state.world
    precision = PRECISIONS.get(state.mixed_precision)(world.hardware, handlers)
    precision.check()
    request = StrategyRequest(
        world,
        tuple(plugin for plugin in plugins if plugin is not None),
        handlers,
        precision=precision.name,
        parallelism=state.parallelism_config,
    )
    strategy = choose_strategy(request)
    precision.set_overflow_sync(strategy.flag_reduction())
    state.show_strategy(strategy)
    engine_steps = strategy.accumulation_steps if isinstance(strategy, EngineStrategy) else None
    accumulation = resolve_accumulation(accumulation_plugin, accumulation_steps, engine_steps)
    gradients = GradientState.create(accumulation, ActiveLoaders())
    return Runtime(world, precision, strategy, handlers, gradients, state.dynamo_plugin)


def resolve_parallelism(config: ParallelismConfig | None, tp_plugin: Any) -> ParallelismConfig | None:
    """Return the parallelism config: as given, from the older plugin, or from the launcher; None without.

    Raises:
        SettingError: the two differ in ``tp_size``.
    """
    from accelerate.strategy.launch_settings.parallelism import UseParallelismConfigSetting

    tp_size = getattr(tp_plugin, "tp_size", 1)
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


def resolve_compiler(plugin: TorchDynamoPlugin | None, backend: Any) -> TorchDynamoPlugin:
    """Return the compile options: the plugin, or those of a backend, or those of the launcher."""
    if plugin is not None and backend is not None:
        raise SettingError(
            "the compiler is given twice: as dynamo_backend and in dynamo_plugin", fix="keep the second"
        )
    return plugin or TorchDynamoPlugin(backend=backend)


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


def resolve_data_config(
    config: DataLoaderConfiguration | None, split_batches: Any
) -> DataLoaderConfiguration:
    if split_batches is None:
        return config or DataLoaderConfiguration()
    if config is not None:
        raise SettingError(
            "split_batches is given twice: as an argument and in dataloader_config", fix="keep the second"
        )
    return DataLoaderConfiguration(split_batches=bool(split_batches))


def resolve_accumulation(
    plugin: GradientAccumulationPlugin | None, steps: int, engine_steps: int | None = None
) -> GradientAccumulationPlugin:
    """Return the options of gradient accumulation: as given, else from the DeepSpeed or Megatron-LM config.

    Args:
        plugin: the plugin given to the ``Accelerator``.
        steps: ``gradient_accumulation_steps`` of the ``Accelerator``; 1 means not given.
        engine_steps: micro-batches of a step in the DeepSpeed or Megatron-LM config, if given there.
    """
    if plugin is not None:
        if steps != 1:
            raise SettingError(
                "gradient_accumulation_steps is given twice: as an argument and in the plugin",
                fix="keep the second",
            )
        return plugin
    code_values = {"gradient_accumulation_steps": steps if steps != 1 else None}
    loaded = load_settings(GradientAccumulationSettings, code=code_values)
    count = loaded.value.gradient_accumulation_steps
    origin = loaded.origin("gradient_accumulation_steps")
    if engine_steps is not None and origin.source == "default":
        count = engine_steps
    elif engine_steps not in (None, count):
        raise SettingError(
            f"{origin.where} is {count}, but the DeepSpeed configuration says gradient_accumulation_steps: "
            f"{engine_steps}",
            why="each of the two would train in another way",
            fix='keep one of them, or write "auto" there',
        )
    if count < 1:  # in DeepSpeed's own configuration
        raise SettingError(f"gradient_accumulation_steps is {count}", fix="use 1 or more")
    return GradientAccumulationPlugin(num_steps=count)
