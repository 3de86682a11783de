"""The constructor's arguments, checked and joined with the other sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.core.errors import SettingError
from accelerate.core.handler import KwargsHandler
from accelerate.core.setting import load
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.facade.accumulation import GradientSettings
from accelerate.facade.compile import TorchDynamoPlugin
from accelerate.facade.gradient import GradientAccumulationPlugin
from accelerate.precision import PRECISIONS
from accelerate.strategy import STRATEGIES
from accelerate.watch.profile import ProfileKwargs
from accelerate.world.stop import PreemptionKwargs
from accelerate.world.world import InitProcessGroupKwargs

if TYPE_CHECKING:
    from accelerate.strategy.parallelism.config import ParallelismConfig


def of_layout(config: ParallelismConfig | None, tp_plugin: Any) -> ParallelismConfig | None:
    """The dimensions of the mesh: as given, by the older plugin, or as the launcher says; None without.

    Raises:
        SettingError: ``config`` is something else, or both say how many processes share a layer.
    """
    from accelerate.strategy.settings.parallelism import ParallelismSwitch

    if config is not None and not hasattr(config, "total_size"):
        raise SettingError(
            f"parallelism_config is a {type(config).__name__}", fix="give a ParallelismConfig, or None"
        )
    wanted = getattr(tp_plugin, "tp_size", 1)
    if config is None and (wanted > 1 or load(ParallelismSwitch).value.use_parallelism_config):
        from accelerate.strategy.parallelism.config import ParallelismConfig

        return ParallelismConfig(tp_size=wanted) if wanted > 1 else ParallelismConfig()
    if config is not None and wanted not in (1, config.tp_size):
        raise SettingError(
            f"torch_tp_plugin says tp_size={wanted}, and parallelism_config tp_size={config.tp_size}",
            fix="leave torch_tp_plugin out",
        )
    return config


def of_compiler(plugin: TorchDynamoPlugin | None, backend: Any) -> TorchDynamoPlugin:
    """How models are compiled: by the plugin, or by a backend's name, or as the launcher says."""
    if plugin is not None and backend is not None:
        raise SettingError(
            "the compiler is given twice: as dynamo_backend and in dynamo_plugin", fix="keep the second"
        )
    return plugin or TorchDynamoPlugin(backend=backend)


def by_class(handlers: list[KwargsHandler]) -> dict[type, KwargsHandler]:
    known: list[type[KwargsHandler]] = [InitProcessGroupKwargs, PreemptionKwargs, ProfileKwargs]
    known += [s.handler_class for s in STRATEGIES if s.handler_class is not None]
    known += [c for p in PRECISIONS for c in p.handler_classes if c not in known]
    found: dict[type, KwargsHandler] = {}
    for handler in handlers:
        kind = next((k for k in known if isinstance(handler, k)), None)
        if kind is None:
            raise SettingError(
                f"{type(handler).__name__} is not a kwargs handler that is known here",
                why=f"known: {', '.join(sorted({k.__name__ for k in known}))}",
                fix="give an instance of one of them in kwargs_handlers=[...]",
            )
        if kind in found:
            raise SettingError(f"two {kind.__name__} are given in kwargs_handlers", fix="keep one of them")
        found[kind] = handler
    return found


def of_data(config: DataLoaderConfiguration | None, split_batches: Any) -> DataLoaderConfiguration:
    if split_batches is None:
        return config or DataLoaderConfiguration()
    if config is not None:
        raise SettingError(
            "split_batches is given twice: as an argument and in dataloader_config", fix="keep the second"
        )
    return DataLoaderConfiguration(split_batches=bool(split_batches))


def of_accumulation(
    plugin: GradientAccumulationPlugin | None, steps: int, engine: int | None = None
) -> GradientAccumulationPlugin:
    """How gradients accumulate: as given, else as an engine's own configuration says.

    Args:
        plugin: given in code.
        steps: the same; 1 asks for nothing.
        engine: micro-batches of a step by the configuration of an engine, if it says so.
    """
    if plugin is not None:
        if steps != 1:
            raise SettingError(
                "gradient_accumulation_steps is given twice: as an argument and in the plugin",
                fix="keep the second",
            )
        _check_steps(1 if plugin.num_steps is None else plugin.num_steps)
        return plugin
    given = {"gradient_accumulation_steps": steps if steps != 1 else None}
    loaded = load(GradientSettings, code=given)
    count = loaded.value.gradient_accumulation_steps
    origin = loaded.origin("gradient_accumulation_steps")
    if engine is not None and origin.source == "default":
        count = engine
    elif engine not in (None, count):
        raise SettingError(
            f"{origin.where} is {count}, but the engine's configuration says gradient_accumulation_steps: "
            f"{engine}",
            why="each of the two would train in another way",
            fix='keep one of them, or write "auto" there',
        )
    _check_steps(count)
    return GradientAccumulationPlugin(num_steps=count)


def _check_steps(count: int) -> None:
    if count < 1:
        raise SettingError(f"gradient_accumulation_steps is {count}", fix="use 1 or more")
