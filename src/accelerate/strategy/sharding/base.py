"""What preparing and the loop are for either version of torch's sharding: around parts, or in place."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.effects import Option, given
from accelerate.core.errors import PrepareError
from accelerate.core.setting import load
from accelerate.strategy.base import NOTHING, Bundle, Request, Step, Strategy
from accelerate.strategy.settings.fsdp import FSDPSwitch
from accelerate.world import together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.sharding.layout import Layout
    from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin


def plugin_of(request: Request) -> Any:
    """The plugin of sharding in ``request``, None without; by its name, for its module is slow to import."""
    names = ((plugin, {kind.__name__ for kind in type(plugin).__mro__}) for plugin in request.plugins)
    return next((plugin for plugin, kinds in names if "FullyShardedDataParallelPlugin" in kinds), None)


def asked(request: Request) -> Iterator[Option]:
    """The switch, and the plugin."""
    yield from given(load(FSDPSwitch))
    plugin = plugin_of(request)
    if plugin is not None:
        yield Option("fsdp_plugin", type(plugin).__name__, "the argument fsdp_plugin")


class ShardedStrategy(Strategy):
    """Parameters, gradients and optimizer state cut over processes.

    Attributes:
        plugin: how.
        models: those that it has sharded, or that another of its kind has sharded before.
    """

    shards: ClassVar[bool] = True

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

        self.plugin: FullyShardedDataParallelPlugin = plugin_of(request) or FullyShardedDataParallelPlugin()
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The parameters that are no more, and what took their place: optimizers may still hold them.
        self._renewed: Any = WeakIdKeyDictionary()
        self._keeps_back = False

    def check(self) -> None:
        """Copies of a model need equally many processes each."""
        super().check()
        _ = self._grid

    @property
    def plugins(self) -> dict[str, Any]:
        """How it shards."""
        return {"fsdp_plugin": self.plugin}

    # --- over which processes

    @property
    def _grid(self) -> tuple[int, int]:
        """(copies of the model, processes that share each copy's parameters); known before any mesh is made.

        Raises:
            SettingError: the processes cannot be shared out so.
        """
        copies = self.plugin.copies(self.world.size, self.world.nodes)
        return copies, self.world.size // copies

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """The processes that share parameters: in one dimension, or copies of shards in two."""
        from torch.distributed.device_mesh import init_device_mesh

        copies, shards = self._grid
        # A rehearsal has no device.
        kind = "cpu" if self.world.device.type == "meta" else self.world.device.type
        if copies == 1:
            return init_device_mesh(kind, (shards,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(kind, (copies, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    @property
    def mesh(self) -> DeviceMesh | None:
        """Copies of shards are a mesh of two dimensions."""
        return self._shard_mesh if self._grid[0] > 1 else None

    def _watch_waits(self) -> None:
        """A rank that waits in one of these groups for a rank that waits elsewhere is noticed."""
        watch = together.current()
        if watch is not None:
            for group in self._shard_mesh.get_all_groups():
                watch.count(group)

    # --- prepare

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Shard every model, part by part, and keep the optimizers on the parameters."""
        models = dict.fromkeys(bundle.of("model"))
        fresh = [model for model in models if not self._known(model)]
        if any(model not in fresh and model not in self.models for model in models):
            yield Step("take over", "the model is sharded already, as another Accelerator said", self._adopt)
        if bundle.training and fresh:
            yield self._shard_step(fresh)
        elif fresh:
            yield Step("place", f"the weights go to {self.world.device}", self._place)
        if bundle.of("optimizer"):
            self._check_optimizers(bundle)
            yield Step("parameters", "optimizers hold the sharded parameters", self._catch_up)

    def _shard_step(self, models: list[nn.Module]) -> Step:
        layouts = [self._layout(model) for model in models]
        here = self.world.device.type
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        before = sum(t.numel() * t.element_size() for t in tensors if t.device.type in (here, "meta"))
        away = self.plugin.offloads and here != "cpu"
        pairs = zip(models, layouts, strict=True)
        after = sum(found.share(model, self._shares, offloaded=away) for model, found in pairs)
        said = "; ".join(dict.fromkeys(found.says() for found in layouts))
        return Step("shard", f"{self._held}; {said}", self._shard, before, after)

    @property
    def _shares(self) -> int:
        """How many processes have a part of a parameter each."""
        return self._grid[1]

    @property
    def _held(self) -> str:
        """What a process has of a model, as a clause."""
        copies, shards = self._grid
        several = f", in {copies} copies" if copies > 1 else ""
        return f"each of {shards} processes holds a part of every parameter{several}"

    @abstractmethod
    def _layout(self, model: nn.Module) -> Layout:
        """How ``model`` will be sharded; changes nothing."""

    @abstractmethod
    def _known(self, model: nn.Module) -> bool:
        """Whether it is sharded already."""

    @abstractmethod
    def _shard(self, bundle: Bundle) -> None:
        """Shards the models of ``bundle`` that are not."""

    def _adopt(self, bundle: Bundle) -> None:
        for model in filter(self._known, bundle.of("model")):
            self._know(model)

    def _know(self, model: nn.Module) -> None:
        """It is sharded now."""
        self.models.add(model)

    def _place(self, bundle: Bundle) -> None:
        for index in bundle.positions("model"):
            if bundle.place[index] and not hasattr(bundle.objects[index], "hf_device_map"):
                bundle.objects[index].to(self.world.device)

    @abstractmethod
    def _catch_up(self, bundle: Bundle) -> None:
        """Makes the optimizers of ``bundle`` hold what took the places of their parameters."""

    def _check_optimizers(self, bundle: Bundle) -> None:
        """Before anything is changed: an optimizer that would train what nobody reduces.

        Raises:
            PrepareError: all of its parameters belong to no model that is prepared.
        """
        known = {p for model in (*bundle.of("model"), *self.models) for p in model.parameters()}
        known |= {p for model in self.models for p in self.parameters(model)}
        for optimizer in bundle.of("optimizer"):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if held and not any(p in known or p in self._renewed for p in held):
                raise PrepareError(
                    f"the {type(optimizer).__name__} holds parameters of no prepared model",
                    why="sharding gives a model new parameters, and its optimizer has to follow them",
                    fix="prepare both in one call: model, optimizer = accelerator.prepare(model, optimizer)",
                )

    # --- the loop

    def accumulating(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Without ``sync`` every process keeps whole gradients: as much memory as unsharded ones take."""
        if sync:
            return NOTHING
        self._keeps_back = True
        return self._quiet(list(models))

    @contextmanager
    def _quiet(self, models: list[nn.Module]) -> Iterator[None]:
        for model in models:
            self._reduce(model, False)
        try:
            yield
        finally:
            for model in models:
                self._reduce(model, True)

    @staticmethod
    @abstractmethod
    def _reduce(model: nn.Module, sync: bool) -> None:
        """Whether backwards through ``model`` reduce gradients from now on; does nothing to another model."""

    @property
    def holds_back(self) -> bool:
        """Since a micro-batch ran without reducing."""
        return self._keeps_back

    # --- states

    @property
    def _leads(self) -> bool:
        """Whether this process gets what is gathered."""
        return self.world.rank == 0
