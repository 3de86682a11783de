"""DeepSpeed beside a ``ParallelismConfig``: ZeRO over all ranks, and Ulysses sequence parallelism.

ZeRO averages gradients over data parallel and sequence parallel ranks alike, as FSDP2 does on a device mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from accelerate.core.errors import SettingError
from accelerate.core.option_report import RequestedOption
from accelerate.strategy.base import EngineCheckpoint, StrategyRequest
from accelerate.strategy.deepspeed.strategy import DeepSpeed
from accelerate.strategy.parallelism.strategy import DeviceMeshStrategy, MeshDataSharding
from accelerate.strategy.protocol.gradient_sync import ZeroBackward


class DeepSpeedMesh(MeshDataSharding, DeepSpeed):  # type: ignore[override]
    """DeepSpeed on a device mesh of data parallel and sequence parallel dimensions."""

    name: ClassVar[str] = "deepspeed_mesh"
    priority: ClassVar[int] = DeviceMeshStrategy.priority + 1

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self.config = request.parallelism
        self.config.fits(self.world.size)

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Claim what the device mesh would take, and train without DeepSpeed."""
        return DeviceMeshStrategy.claims(request)

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Yield the options of DeepSpeed, and the switch of the mesh."""
        yield from super().requested_options(request)
        if cls.claims(request):
            yield from DeviceMeshStrategy.selection.options(request)

    def check(self) -> None:
        """Refuse the dimensions that split a model, which DeepSpeed would take for a replica.

        Raises:
            SettingError: there is one.
        """
        super().check()
        split = [name for name in ("tp", "cp", "pp") if self.config._sizes[name] > 1]
        if split:
            raise SettingError(
                f"DeepSpeed does not go with {split[0]}_size={self.config._sizes[split[0]]}",
                why="beside it a parallelism_config may have data parallel sizes and sp_size; FSDP2 goes "
                "with all of them",
                fix="leave DeepSpeed out, and take fsdp_plugin (--use_fsdp) for its options of sharding and "
                f"offload; or set {split[0]}_size=1",
            )
        for dimension in self.dimensions:
            dimension.check()

    def check_compiler(self) -> None:
        """Nothing: no model is split into stages."""

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run a backward with zero gradients: attention of other ranks waits for this one's."""
        run = partial(self.backward, zero.loss, sync_gradients=zero.sync_gradients)
        if not any(dimension.backward_zero(zero.loss, run) for dimension in self.dimensions):
            super().backward_zero(zero)

    @classmethod
    def read_engine_checkpoints(cls, folder: Path) -> Sequence[EngineCheckpoint]:
        """Return none: all strategies are asked, and ``DeepSpeed`` returns them."""
        return ()


PLUGIN = DeepSpeedMesh
