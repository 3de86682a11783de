"""The strategy of a device mesh: data, tensor, context, sequence and pipeline parallelism combined.

The processes form a mesh of named dimensions. Each dimension other than data parallel is a ``MeshDimension``
beside this file; it changes the models first. Then FSDP2 shards parameters over the remaining ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from accelerate.core.errors import SettingError
from accelerate.core.option_report import OptionStatus, RequestedOption, requested_options
from accelerate.core.setting import load_settings
from accelerate.strategy.base import (
    DataSharding,
    PrepareBundle,
    PrepareStep,
    RankDataShard,
    StrategyRequest,
    StrategySelection,
)
from accelerate.strategy.fsdp import FSDP2Strategy
from accelerate.strategy.launch_settings.parallelism import ParallelismSettings, UseParallelismConfigSetting
from accelerate.strategy.protocol.gradient_sync import ZeroBackward
from accelerate.strategy.sharding.sharded_strategy import watch_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.config import ParallelismConfig
    from accelerate.world.world import World


class MeshDimension:
    """One dimension of a device mesh, with more than one process.

    Attributes:
        name: its name in the mesh.
        strategy: the strategy that shards parameters over the remaining dimensions.
        config: all sizes, and the options of each dimension.
        mesh: the whole mesh; ``mesh[name]`` is this dimension.
        world: the processes.
    """

    name: ClassVar[str]

    def __init__(self, strategy: DeviceMeshStrategy) -> None:
        self.strategy: Any = strategy
        self.config, self.world = strategy.config, strategy.world
        self.mesh: Any = strategy.mesh

    def check(self) -> None:
        """Refuse, with the reason, what cannot work here.

        Raises:
            SettingError, WorldError, FeatureNotBuiltError: by what is wrong.
        """

    def option_statuses(self) -> Iterator[OptionStatus]:
        """Yield the status of the options that only this dimension reads."""
        return iter(())

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Yield the steps that change a bundle before FSDP shards it; they are applied later."""
        return iter(())

    def remap_optimizer_params(self, replaced: Mapping[int, tuple[Any, Any]], optimizers: list[Any]) -> None:
        """Replace parameters in optimizers, also in those that are prepared later.

        Args:
            replaced: (old, new) by ``id`` of the old one.
            optimizers: the optimizers of the bundle.
        """
        self.strategy._remap_optimizers(replaced, optimizers)

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Return what is done with batches of ``loader``, not prepared yet, on this process's device."""
        return None

    def reads_own_data(self, loader: Any) -> bool:
        """Return whether the processes of this dimension read different samples of ``loader``."""
        return False

    def merge_outputs(self, values: Any, *, as_objects: bool) -> Any:
        """Merge the outputs of its processes to what one process would have computed alone.

        Args:
            values: the outputs, in a tree.
            as_objects: nothing in them is rows of a tensor.
        """
        return values

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """See ``Strategy``."""
        return frozenset(), frozenset()

    def original_group_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        """See ``Strategy``."""
        return None

    def duplicate_params(self) -> Iterable[torch.Tensor]:
        """Return the parameters that another process of this dimension holds too, and counts in a norm."""
        return ()

    def gather_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Gather a model's state on the first process of this dimension; the others get nothing.

        Called by the processes that have gathered the sharded parameters, at rank 0 of the other dimensions.
        """
        return state

    def select_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """Select the part of a full state that this process loads."""
        return state

    def gather_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Gather an optimizer's state, as ``gather_state`` does for a model."""
        return state

    def select_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the part of an optimizer's full state that this process loads."""
        return state

    def backward_zero(self, loss: torch.Tensor, run: Callable[[], Any]) -> bool:
        """Run a backward with zero gradients by ``run``, if it needs a way of its own; return whether."""
        return False

    def call_context(self, model: nn.Module, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Return a context around the micro-batches of a call of ``model``, which is split into stages.

        Raises:
            PrepareError: for an error that would otherwise occur in one stage while others wait for it.
        """
        return nullcontext()

    def trace_context(self, model: nn.Module, inside: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context around the tracing forward of ``model``, on fake tensors and without hooks.

        Args:
            model: a model that is split into pipeline stages.
            inside: returns whether a module of a stage runs just now, not the code between the modules.
        """
        return nullcontext()

    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context around forward and backward, in which full sequences are sharded.

        Args:
            buffers: tensors with full sequences, sharded in place.
            dims: the sequence dimension of each.
            kept: buffers that are not restored afterwards.
        """
        return nullcontext()

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader of full sequences as a loader of sequence shards."""
        return loader


# Mesh dimension -> (module, class), in the order in which models are changed.
_DIMENSIONS = {
    "pp": ("pipeline.pipeline_parallel", "PipelineParallel"),
    "tp": ("tensor.tensor_parallel", "TensorParallel"),
    "cp": ("context.context_parallel", "ContextParallel"),
    "sp": ("context.ulysses", "UlyssesSequenceParallel"),
}


class MeshDataSharding(DataSharding):
    """How the ranks of a device mesh share samples and sequences, whichever strategy shards parameters."""

    config: ParallelismConfig
    world: World

    @property
    def _kind(self) -> str:
        # A dry run has no device.
        return "cpu" if self.world.device.type == "meta" else self.world.device.type

    @cached_property
    def mesh(self) -> DeviceMesh | None:  # type: ignore[override]
        """The device mesh, made once by all processes."""
        return self.config.get_device_mesh(self._kind)

    @cached_property
    def dimensions(self) -> list[MeshDimension]:
        """The active dimensions other than data parallel."""
        dimensions: list[MeshDimension] = []
        for name, (file, class_name) in _DIMENSIONS.items():
            if self.config._sizes[name] > 1:
                dimension_class = getattr(
                    import_module(f"accelerate.strategy.parallelism.{file}"), class_name
                )
                dimensions.append(dimension_class(self))
        return dimensions

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Yield the steps of each dimension, then those of the strategy that shards parameters."""
        for dimension in self.dimensions:
            yield from dimension.prepare_steps(bundle)
        yield from super().prepare_steps(bundle)  # type: ignore[misc]

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterator[OptionStatus]:
        """Yield the status of the other strategy's options, of each size, and of the dimensions' own ones."""
        yield from super().option_statuses(models)  # type: ignore[misc]
        named = {option.name: option for option in requested_options(load_settings(ParallelismSettings))}
        for name, size in self.config._sizes.items():
            option = named.pop(f"parallelism_config_{name}_size", None)
            if size > 1:
                option = option or RequestedOption(f"{name}_size", size, "the argument parallelism_config")
                yield option.report_applied() if models else option.report_pending("no model is prepared")
            elif option is not None:
                yield option.report_applied("there is no such dimension then")
        yield from (option.report_applied() for option in named.values())
        for dimension in self.dimensions:
            yield from dimension.option_statuses()

    # --- who has which data

    @cached_property
    def data_shard(self) -> RankDataShard:
        """The data shard of this process: its coordinates along the data parallel dimensions."""
        places = self.config.layout().coordinates(self.world.rank)
        index = places["dp_replicate"] * self.config._sizes["dp_shard"] + places["dp_shard"]
        others = sum(places[name] for name in _DIMENSIONS)
        return RankDataShard(self.config.data_parallel_size, index, others == 0)

    def data_shard_for(self, loader: Any) -> RankDataShard:
        """Return the data shard for a loader, also along dimensions that read different samples of it."""
        count, index, counts_samples = self.data_shard.count, self.data_shard.index, True
        places = self.config.layout().coordinates(self.world.rank)
        for dimension in self.dimensions:
            if dimension.reads_own_data(loader):
                count *= self.config._sizes[dimension.name]
                index = index * self.config._sizes[dimension.name] + places[dimension.name]
            else:
                counts_samples = counts_samples and places[dimension.name] == 0
        return RankDataShard(count, index, counts_samples)

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Return the function that slices the batches of ``loader``; None where they stay full."""
        slicers = [s for dimension in self.dimensions if (s := dimension.batch_slicer_for(loader))]

        def slice_all(batch: Any) -> Any:
            for slicer in slicers:
                batch = slicer(batch)
            return batch

        return slice_all if slicers else None

    def merge_model_parallel(self, values: Any, *, as_objects: bool = False) -> Any:
        """Merge the outputs of the processes along all dimensions."""
        for dimension in self.dimensions:
            values = dimension.merge_outputs(values, as_objects=as_objects)
        return values

    @property
    def model_parallel_size(self) -> int:
        """The tensor parallel size times the pipeline parallel size."""
        return self.config._sizes["tp"] * self.config._sizes["pp"]

    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context around forward and backward, in which full sequences are sharded."""
        stack = ExitStack()
        for dimension in self.dimensions:
            stack.enter_context(dimension.shard_sequences(buffers, dims, kept))
        return stack

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader of full sequences as a loader of sequence shards."""
        for dimension in self.dimensions:
            loader = dimension.adapt_loader(loader, model)
        return loader

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names that this rank lacks, and the buffers that it saves, along all dimensions."""
        names = [dimension.partial_state_names(model) for dimension in self.dimensions]
        return frozenset().union(*(a for a, _ in names)), frozenset().union(*(b for _, b in names))

    def original_group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Return the group names of an optimizer with the parameters of all stages."""
        return next(
            (g for d in self.dimensions if (g := d.original_group_names(optimizer)) is not None), None
        )


class DeviceMeshStrategy(MeshDataSharding, FSDP2Strategy):  # type: ignore[override]
    """The strategy that composes the dimensions of a device mesh with FSDP2."""

    name: ClassVar[str] = "parallelism"
    selection: ClassVar[StrategySelection] = StrategySelection(
        (UseParallelismConfigSetting,),
        "ParallelismConfig",
        unused_reason="one process is no mesh, so it trains as a single process does",
    )
    priority: ClassVar[int] = 20

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self.config: ParallelismConfig = request.parallelism
        self.config.fits(self.world.size)
        self._asked = FSDP2Strategy.selection.is_requested(request)
        if not self._asked:
            # Libraries that save by themselves read this: a model is a full state dict in its own file.
            self.plugin.set_state_dict_type("FULL_STATE_DICT")

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Claim requests with mesh sizes and several processes, and sizes that need more, to refuse them."""
        config = request.parallelism
        return config is not None and (request.world.size > 1 or config.total_size > 1)

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Yield the switch, and the options of sharding."""
        yield from super().requested_options(request)
        if cls.claims(request):
            yield from FSDP2Strategy.requested_options(request)

    @property
    def saves_sharded(self) -> bool:
        """Return whether checkpoints are sharded: unless FSDP is asked for, with full state dicts."""
        return super().saves_sharded or not self._asked

    @property
    def gathers_tensor_subclasses(self) -> bool:
        """Return whether parameters are sharded by FSDP2 alone: other dimensions distribute plain tensors."""
        return all(size == 1 for name, size in self.config._sizes.items() if not name.startswith("dp"))

    def check(self) -> None:
        """Refuse what a dimension or the sharding of parameters cannot do."""
        super().check()
        if self.plugin.fsdp_version != 2:
            raise SettingError(
                "parallelism_config needs FSDP2, and fsdp_version is 1",
                why="only FSDP2 shards over a device mesh of several dimensions",
                fix="fsdp_version=2 (--fsdp_version 2): options of FSDP1 imply version 1 where none is given",
            )
        for dimension in self.dimensions:
            dimension.check()

    def check_compiler(self) -> None:
        """Refuse torch.compile with pipeline parallelism, whose stages are no single graph."""
        if self.config.pp_enabled:
            raise SettingError(
                f"torch.compile goes with no pipeline stages, and pp_size is {self.config.pp_size}",
                why="the model's forward is read on empty tensors, and each process runs its layers only",
                fix="leave dynamo_backend and dynamo_plugin out; compile functions inside of your layers",
            )

    # --- over which processes parameters are sharded

    @cached_property
    def _mesh_shape(self) -> tuple[int, int]:
        """(replicas of the model, processes that shard each replica)."""
        return self.config._sizes["dp_replicate"], self.config.shards

    @cached_property
    def _plane(self) -> DeviceMesh:
        return self.config.plane(self._kind)

    @property
    def _replicated_meshes(self) -> list[DeviceMesh]:  # type: ignore[override]
        """The meshes over which parameters outside the tensor parallel plan are replicated."""
        return [self._plane["tp"]] if self.config.tp_enabled else []

    @property
    def _pipeline_groups(self) -> list[ProcessGroup]:
        """The process groups of the pipeline, whose stages hold different layers."""
        return [self._plane["pp"].get_group()] if self.config.pp_enabled else []

    def _params_counted_elsewhere(self) -> list[torch.Tensor]:
        """Return the parameters that an earlier stage holds too, and counts in a norm."""
        return [parameter for dimension in self.dimensions for parameter in dimension.duplicate_params()]

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards; two dimensions with HSDP, and context parallel ranks shard too.

        A shard dimension of size 1 is possible: gradients are then only reduced over the replicas.
        """
        dim_names, names = self._plane.mesh_dim_names or (), ("dp_replicate", "dp_shard_cp", "dp_shard")
        mesh = self._plane[tuple(name for name in names if name in dim_names)]
        if not self.config.pp_enabled:
            watch_mesh(mesh)
        return mesh

    @property
    def _shard_description(self) -> str:
        """The description of how parameters and gradients are distributed, for a plan."""
        copies, shards = self._mesh_shape
        if shards > 1:
            return super()._shard_description
        return (
            f"gradients are all-reduced over {copies} replicas"
            if copies > 1
            else "one process updates each shard"
        )

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run a backward with zero gradients: collectives of a dimension need all its processes."""
        run = partial(zero.loss.backward, gradient=torch.zeros_like(zero.loss))
        if not any(dimension.backward_zero(zero.loss, run) for dimension in self.dimensions):
            super().backward_zero(zero)

    def flag_reduction(self) -> Callable[[torch.Tensor], Any] | None:
        """Return a max all-reduce over all processes where they hold different weights."""
        # Torch reduces a flag over the mesh of the first gradient, which leaves out stages, and the tensor
        # parallel processes where that gradient is replicated.
        if self.model_parallel_size == 1:
            return super().flag_reduction()
        return partial(torch.distributed.all_reduce, op=torch.distributed.ReduceOp.MAX)

    # --- states

    @property
    def _is_leader(self) -> bool:
        """Return whether this process is the first of its pipeline stage, which gathers states."""
        places = self.config.layout().coordinates(self.world.rank)
        return not any(place for name, place in places.items() if name != "pp")

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full model state on the host of rank 0; other ranks get nothing. A collective."""
        state = super().model_state(model)
        for dimension in self.dimensions:
            state = dimension.gather_state(model, state) if self._is_leader else state
        return state

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state, which every process has; each takes its shard."""
        for dimension in self.dimensions:
            state = dimension.select_state(model, state, strict=strict)
        return super().load_model(model, state, strict=strict)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Gather the full optimizer state on the host of rank 0."""
        state = super().optimizer_state(optimizer, models)
        for dimension in self.dimensions:
            state = dimension.gather_optimizer_state(optimizer, state) if self._is_leader else state
        return state

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state, which every process has; each takes its shard."""
        for dimension in self.dimensions:
            state = dimension.select_optimizer_state(optimizer, state)
        super().load_optimizer(optimizer, models, state)


PLUGIN = DeviceMeshStrategy
