"""Several dimensions at once: processes that see different data, share parameters, layers, sequences, stages.

The processes are one mesh of named dimensions. Each dimension that shares more than parameters is a file of
the folder ``parallel``; it changes the models first. Then parameters are sharded over the processes that are
left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate.core.effects import Effect, Option, given
from accelerate.core.errors import SettingError
from accelerate.core.setting import load
from accelerate.strategy.base import Bundle, Request, Share, Step
from accelerate.strategy.settings.parallelism import ParallelismSettings, ParallelismSwitch
from accelerate.strategy.sharding.base import asked
from accelerate.strategy.sharding.fsdp2 import Sharding

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.base import Dimension
    from accelerate.strategy.parallelism.config import ParallelismConfig

# Dimension of the mesh -> the file and class that do it, in the order in which models are changed.
_DIMENSIONS = {
    "pp": ("pipeline", "Pipeline"),
    "tp": ("tensor", "Tensor"),
    "cp": ("context", "Context"),
    "sp": ("ulysses", "Ulysses"),
}


class Parallelism(Sharding):
    """A mesh of processes."""

    name: ClassVar[str] = "parallelism"
    priority: ClassVar[int] = 20

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.config: ParallelismConfig = request.parallelism
        self.config.fits(self.world.size)
        self._asked = any(plugin is self.plugin for plugin in request.plugins)
        if not self._asked:
            # Libraries that save by themselves ask the plugin what to save: a model is whole in its own file.
            self.plugin.set_state_dict_type("FULL_STATE_DICT")

    @classmethod
    def claims(cls, request: Request) -> bool:
        """Sizes of dimensions, and several processes; sizes that need more than there are, to refuse them."""
        config = request.parallelism
        return config is not None and (request.world.size > 1 or config.total_size > 1)

    @classmethod
    def idle(cls, request: Request) -> str:
        """In a world of one."""
        if request.parallelism is None or cls.claims(request):
            return ""
        return "one process is no mesh, so it trains as a single process does"

    @classmethod
    def asked(cls, request: Request) -> Iterator[Option]:
        """The switch, and what says how its shards are made."""
        yield from given(load(ParallelismSwitch))
        if cls.claims(request):
            yield from asked(request)

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """How parameters are sharded, each size, and what dimensions say of their options."""
        yield from super().effects(models)
        named = {option.name: option for option in given(load(ParallelismSettings))}
        for name, size in self.config._sizes.items():
            option = named.pop(f"parallelism_config_{name}_size", None)
            if size > 1:
                option = option or Option(f"{name}_size", size, "the argument parallelism_config")
                yield option.applied() if models else option.pending("no model is prepared")
            elif option is not None:
                yield option.applied("there is no such dimension then")
        yield from (option.applied() for option in named.values())
        for dimension in self.dimensions:
            yield from dimension.effects()

    @property
    def saves_sharded(self) -> bool:
        """Unless a plugin asks for whole states."""
        return super().saves_sharded or not self._asked

    @property
    def _kind(self) -> str:
        # A rehearsal has no device.
        return "cpu" if self.world.device.type == "meta" else self.world.device.type

    @cached_property
    def mesh(self) -> DeviceMesh | None:  # type: ignore[override]
        """Made once, by all processes."""
        return self.config.get_device_mesh(self._kind)

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """Those that do more than share parameters."""
        found: list[Dimension] = []
        for name, (file, kind) in _DIMENSIONS.items():
            if self.config._sizes[name] > 1:
                made = getattr(import_module(f"accelerate.strategy.parallelism.{file}"), kind)
                found.append(made(self.config, self.mesh, self.world))
                found[-1].strategy = self
        return found

    def check(self) -> None:
        """What each dimension refuses, and sharding around the model."""
        super().check()
        if self.plugin.fsdp_version != 2:
            raise SettingError(
                "parallelism_config goes with version 2 of sharding, and fsdp_version is 1",
                why="only version 2 shards over a mesh of several dimensions",
                fix="leave fsdp_version out, or make it 2",
            )
        for dimension in self.dimensions:
            dimension.check()

    def check_compiler(self) -> None:
        """Stages are made by what stands around the layers, and no graph has that."""
        if self.config.pp_enabled:
            raise SettingError(
                f"pp_size={self.config.pp_size} cuts models into stages, and torch.compile is asked for",
                why="the model's forward is read on empty tensors, and each process runs its layers only",
                fix="leave dynamo_backend and dynamo_plugin out; compile functions inside of your layers",
            )

    # --- who has which data

    @cached_property
    def share(self) -> Share:  # type: ignore[override]
        """By the place along the dimensions of the data."""
        places = self.config.layout().coordinates(self.world.rank)
        index = places["dp_replicate"] * self.config._sizes["dp_shard"] + places["dp_shard"]
        others = sum(places[name] for name in _DIMENSIONS)
        return Share(self.config.data_parallel_size, index, others == 0)

    def share_of(self, loader: Any) -> Share:
        """Also along dimensions that read other data of this loader."""
        count, index, speaks = self.share.count, self.share.index, True
        places = self.config.layout().coordinates(self.world.rank)
        for dimension in self.dimensions:
            if dimension.apart(loader):
                count *= self.config._sizes[dimension.name]
                index = index * self.config._sizes[dimension.name] + places[dimension.name]
            else:
                speaks = speaks and places[dimension.name] == 0
        return Share(count, index, speaks)

    def part_of(self, loader: Any) -> Callable[[Any], Any] | None:
        """As the dimensions say."""
        found = [dimension.own_part for dimension in self.dimensions if dimension.cuts(loader)]

        def part(batch: Any) -> Any:
            for own in found:
                batch = own(batch)
            return batch

        return part if found else None

    def joined(self, values: Any) -> Any:
        """Along all dimensions."""
        for dimension in self.dimensions:
            values = dimension.joined(values)
        return values

    @property
    def peers(self) -> int:
        """Along the dimensions of layers and stages."""
        return self.config._sizes["tp"] * self.config._sizes["pp"]

    def own_part(self, batch: Any) -> Any:
        """Its part of each sequence."""
        for dimension in self.dimensions:
            batch = dimension.own_part(batch)
        return batch

    def sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Around forward and backward of whole sequences."""
        stack = ExitStack()
        for dimension in self.dimensions:
            stack.enter_context(dimension.sequences(buffers, dims, kept))
        return stack

    def adapted(self, loader: Any, model: nn.Module) -> Any:
        """A loader of whole sequences as one of parts."""
        for dimension in self.dimensions:
            loader = dimension.adapted(loader, model)
        return loader

    # --- over which processes parameters are sharded

    @property
    def _grid(self) -> tuple[int, int]:
        """(copies of the model, processes that share each copy's parameters)."""
        return self.config._sizes["dp_replicate"], self.config.shards

    @cached_property
    def _plane(self) -> DeviceMesh:
        return self.config.plane(self._kind)

    @property
    def _alike(self) -> list[DeviceMesh]:
        """Processes that share layers have the same of what is not in the plan."""
        return [self._plane["tp"]] if self.config.tp_enabled else []

    @property
    def _stages(self) -> list[ProcessGroup]:
        """Stages have other layers."""
        return [self._plane["pp"].get_group()] if self.config.pp_enabled else []

    def _counted(self) -> list[torch.Tensor]:
        """What several stages hold counts on the first of them."""
        return [parameter for dimension in self.dimensions for parameter in dimension.counted()]

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """Copies of shards in two dimensions; processes that share a sequence share parameters too.

        One process may be all that shares a copy: it is reduced over the copies, or stays alone.
        """
        known, names = self._plane.mesh_dim_names or (), ("dp_replicate", "dp_shard_cp", "dp_shard")
        return self._plane[tuple(name for name in names if name in known)]

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """One process of a dimension may have nothing, and others something that goes through it."""
        if not any(dimension.backward_zero(loss) for dimension in self.dimensions):
            super().backward_zero(models, parameters, reached, loss)

    # --- states

    @property
    def _leads(self) -> bool:
        """The first process of each stage: the stages are put together then."""
        places = self.config.layout().coordinates(self.world.rank)
        return not any(place for name, place in places.items() if name != "pp")

    def elsewhere(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Stages have other layers."""
        found = [dimension.elsewhere(model) for dimension in self.dimensions]
        return frozenset().union(*(a for a, _ in found)), frozenset().union(*(b for _, b in found))

    def made_for(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """With the parameters of all stages."""
        return next((g for d in self.dimensions if (g := d.made_for(optimizer)) is not None), None)

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Gathered, on the host of rank 0; other ranks get nothing. All processes must call it."""
        found = super().state(model)
        for dimension in self.dimensions:
            found = dimension.whole(model, found) if self._leads else found
        return found

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """A full state on every process; each takes its part."""
        for dimension in self.dimensions:
            state = dimension.own(model, state, strict=strict)
        return super().load(model, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gathered, on the host of rank 0."""
        found = super().optimizer_state(optimizer, models)
        for dimension in self.dimensions:
            found = dimension.whole_optimizer(optimizer, found) if self._leads else found
        return found

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """A full state on every process; each takes its part."""
        for dimension in self.dimensions:
            state = dimension.own_optimizer(optimizer, state)
        super().load_optimizer(optimizer, models, state)

    # --- prepare

    @property
    def _held(self) -> str:
        """Where nobody shares a copy there are only its gradients to reduce."""
        copies, shards = self._grid
        if shards > 1:
            return super()._held
        return (
            f"gradients are reduced over {copies} copies" if copies > 1 else "one process updates each part"
        )

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Each dimension's, then sharding over the rest."""
        for dimension in self.dimensions:
            yield from dimension.steps(bundle)
        yield from super().steps(bundle)


PLUGIN = Parallelism
