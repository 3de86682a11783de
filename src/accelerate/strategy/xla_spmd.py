"""SPMD on PyTorch/XLA: one process drives all devices of the machine, and XLA partitions each tensor.

A tensor is whole for the program; an annotation says along which dimension its values are sharded over the
devices, and XLA inserts the all-gathers and reduce-scatters (GSPMD, Xu et al. 2021). Batches are always
sharded by samples. With FSDP's plugin or switch, parameters and optimizer state are sharded too (FSDPv2).
Losses, norms, state dicts and checkpoints are those of one process.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.core import tree
from accelerate.core.errors import SettingError, WorldError
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.strategy.base import PrepareBundle, PrepareStep, StrategyRequest
from accelerate.strategy.sharding.sharded_strategy import FSDP_SELECTION
from accelerate.strategy.xla import XLADataParallel

if TYPE_CHECKING:
    from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

AXIS = "fsdp"
# The options of FSDP that have a meaning here; XLA decides about the rest itself.
_USED = {
    "use_fsdp",
    "fsdp_plugin",
    "fsdp_version",
    "auto_wrap_policy",
    "transformer_cls_names_to_wrap",
    "min_num_params",
    "ignored_modules",
}


class XLASPMDStrategy(XLADataParallel):
    """Batches sharded over the devices of one process, and with FSDP's plugin parameters too.

    Run on four virtual devices of the CPU client of torch_xla 2.9. Source: PyTorch/XLA documentation,
    "PyTorch/XLA SPMD User Guide" and "Fully Sharded Data Parallel using SPMD".
    """

    name: ClassVar[str] = "xla_spmd"
    priority: ClassVar[int] = 12

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self.shards_weights = FSDP_SELECTION.is_requested(request)
        self._plugins = FSDP_SELECTION.plugins(request)
        if request.world.size > 1:
            return  # `check` refuses it
        runtime, self._spmd = _modules()
        if not runtime.is_spmd():
            _refuse_started_runtime()
            runtime.use_spmd()
        if self._mesh is None:
            count = runtime.global_runtime_device_count()
            self._spmd.set_global_mesh(self._spmd.Mesh(list(range(count)), (count,), (AXIS,)))

    @property
    def _mesh(self) -> Any:
        """The global mesh; programs may replace it after the ``Accelerator`` was made."""
        return self._spmd.get_global_mesh()

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Claim requests that ask for FSDP, or in a program that has called ``use_spmd``."""
        return FSDP_SELECTION.is_requested(request) or bool(_modules()[0].is_spmd())

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Yield the options of FSDP."""
        yield from FSDP_SELECTION.options(request)

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterable[OptionStatus]:
        """Return the status of each option of FSDP."""
        for option in self._requested_options:
            if option.name in _USED:
                yield option.report_applied()
            else:
                yield option.report_not_applied("XLA partitions the graph, and decides about it itself")

    def check(self) -> None:
        """Refuse several processes and machines, a mesh without the axis of FSDP, and offloading.

        Raises:
            WorldError, SettingError: by what is wrong.
        """
        if self.world.size > 1:
            raise WorldError(
                f"FSDP on PyTorch/XLA in {self.world.size} processes",
                why="SPMD drives all devices of a machine from one process",
                fix="start one process: --num_processes 1, without --tpu and without a distributed_type",
            )
        if (machines := _modules()[0].process_count()) > 1:
            raise WorldError(
                f"SPMD of PyTorch/XLA over {machines} machines",
                why="each of them would take itself for the main process, and read and save everything",
                fix="use the devices of one machine, or a process for each device: accelerate launch --tpu",
            )
        if AXIS not in self._mesh.axis_names:
            raise SettingError(
                f"the global mesh of PyTorch/XLA has no axis {AXIS!r}, but {self._mesh.axis_names}",
                why="batches and parameters are sharded along it",
                fix=f"name an axis {AXIS!r}, or leave set_global_mesh() to the Accelerator",
            )
        if self.shards_weights and self.plugin.offloads_params:
            raise SettingError(
                "FSDP on PyTorch/XLA cannot offload parameters to the host", fix="leave cpu_offload out"
            )

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """The options of FSDP."""
        from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

        if not self._plugins:
            self._plugins = [FullyShardedDataParallelPlugin()]
        return self._plugins[0]

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The FSDP plugin, where parameters are sharded."""
        return {"fsdp_plugin": self.plugin} if self.shards_weights else {}

    @property
    def device_count(self) -> int:
        """The number of devices along the axis."""
        return self._mesh.shape()[AXIS]

    # --- prepare

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return the step that shards parameters, where FSDP is asked for."""
        models = dict.fromkeys(bundle.objects_of("model"))
        if models and self.shards_weights:
            reason = f"{self.device_count} devices hold a shard of each parameter"
            yield PrepareStep("shard", reason, self._shard_models)

    def batch_placer_for(self, loader: Any) -> Callable[[Any], Any]:
        """Make a prepared loader torch_xla's too, and shard its batches as its ``input_sharding`` says."""
        super().batch_placer_for(loader)
        return functools.partial(self._place_batch, loader)

    def _place_batch(self, loader: Any, batch: Any) -> Any:
        spec = loader._parallel_loader_kwargs.get("input_sharding")
        if not isinstance(spec, Mapping):
            return tree.map_tree(functools.partial(self._shard_input, spec), batch)
        return {
            name: tree.map_tree(functools.partial(self._shard_input, spec.get(name)), value)
            for name, value in batch.items()
        }

    def _shard_input(self, spec: Any, value: Any) -> Any:
        """Shard a tensor by a ``ShardingSpec`` that fits its dimensions, else by samples."""
        if spec is None or not isinstance(value, torch.Tensor) or not spec.can_apply(value):
            return self._shard_samples(value)
        spec.apply(value)
        return value

    def _shard_models(self, bundle: PrepareBundle) -> None:
        from accelerate.strategy.sharding.sharding_layout import plan_layout

        for model in dict.fromkeys(bundle.objects_of("model")):
            layout = plan_layout(model, self.plugin, "no")
            for parameter in model.parameters():
                if parameter not in layout.ignored:
                    self._shard_tensor(parameter)
            for unit in (*layout.blocks, model):
                # The compiler gathers parameters, not activations, where activations are sharded by samples.
                unit.register_forward_hook(self._shard_output)
            for unit in layout.blocks:
                # Gradients of each unit are reduced before those of the next are computed.
                self._spmd.apply_backward_optimization_barrier(unit)
        for optimizer in bundle.objects_of("optimizer"):
            self._shard_optimizer_state(optimizer)
            optimizer.register_step_post_hook(lambda stepped, *_: self._shard_optimizer_state(stepped))

    def _shard_output(self, module: nn.Module, args: Any, output: Any) -> None:
        tree.map_tree(self._shard_samples, output)

    def _shard_samples(self, value: Any) -> Any:
        """Shard a tensor along dimension 0, where the devices divide it; return it."""
        is_shardable = isinstance(value, torch.Tensor) and value.device.type == "xla" and value.dim()
        if is_shardable and value.shape[0] % self.device_count == 0:
            self._spmd.mark_sharding(value, self._mesh, (AXIS, *[None] * (value.dim() - 1)))
        return value

    def _shard_tensor(self, tensor: torch.Tensor) -> None:
        """Shard a parameter or a state of its shape along the longest dimension that the devices divide."""
        shape, count = tensor.shape, self.device_count
        divisible = [dim for dim in range(tensor.dim()) if shape[dim] % count == 0 and shape[dim]]
        if divisible:
            longest = max(divisible, key=lambda dim: shape[dim])
            axes = [AXIS if dim == longest else None for dim in range(tensor.dim())]
            self._spmd.mark_sharding(tensor, self._mesh, tuple(axes))

    def _shard_optimizer_state(self, optimizer: Any) -> None:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.device == parameter.device and value.dim():
                    self._shard_tensor(value)

    # --- states

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state, and shard its values."""
        result = super().load_model(model, state, strict=strict)
        if self.shards_weights:
            for parameter in model.parameters():
                self._shard_tensor(parameter)
        return result

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state, and shard its values."""
        super().load_optimizer(optimizer, models, state)
        if self.shards_weights:
            self._shard_optimizer_state(optimizer)


def _refuse_started_runtime() -> None:
    """Refuse to choose SPMD once the runtime has started: torch_xla 2.9 then ends in a segmentation fault.

    Raises:
        SettingError: it has.
    """
    core = importlib.import_module("torch_xla")._XLAC
    if core._xla_get_spmd_config_is_locked():
        raise SettingError(
            "FSDP on PyTorch/XLA, but this program has used the device already",
            why="FSDP partitions by SPMD, which has to be chosen before the runtime starts",
            fix="create the Accelerator first, or begin with torch_xla.runtime.use_spmd()",
        )


def _modules() -> tuple[Any, Any]:
    """Return the modules of PyTorch/XLA for its runtime and for sharding."""
    return importlib.import_module("torch_xla.runtime"), importlib.import_module("torch_xla.distributed.spmd")


PLUGIN = XLASPMDStrategy
