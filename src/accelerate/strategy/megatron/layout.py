"""The parallel layout of the processes: degrees, ranks, and Megatron-LM's process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate import device as devices
from accelerate.core import packages
from accelerate.core.errors import DeviceError, MissingExtraError, SettingError
from accelerate.core.value_types import frozen_dataclass
from accelerate.strategy.base import RankDataShard
from accelerate.world import rng
from accelerate.world.world import World

if TYPE_CHECKING:
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin

PACKAGE = "megatron-core"
# Megatron-LM asks torch.cuda for its device by name, whatever its tensors are on.
DEVICE_TYPE = "cuda"


@frozen_dataclass
class MegatronLayout:
    """The ranks of a process in Megatron-LM's order: tensor parallel first, then data, then pipeline.

    Attributes:
        size, rank: of the world.
        tp, pp: tensor parallel and pipeline parallel size.
        micro_batches: of a step.
    """

    size: int
    rank: int
    tp: int
    pp: int
    micro_batches: int = 1

    @property
    def dp(self) -> int:
        """The data parallel size: model replicas."""
        return self.size // (self.tp * self.pp)

    @property
    def tp_rank(self) -> int:
        """The tensor parallel rank."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """The data parallel rank."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """The pipeline parallel rank."""
        return self.rank // (self.tp * self.dp)

    @property
    def share(self) -> RankDataShard:
        """The data shard: processes of one model replica read the same samples."""
        counts_samples = self.tp_rank == 0 and self.pp_rank == 0
        return RankDataShard(self.dp, self.dp_rank, counts_samples, self.micro_batches)


def megatron_layout(plugin: MegatronLMPlugin, world: World) -> MegatronLayout:
    """Return the layout of this process.

    Raises:
        SettingError: the degrees do not divide the world.
    """
    tp, pp = plugin.tp_degree, plugin.pp_degree
    if tp < 1 or pp < 1:
        raise SettingError(f"tp_degree is {tp} and pp_degree {pp}", fix="use 1 or more for each")
    if world.size % (tp * pp):
        fits = [n for n in range(1, world.size + 1) if world.size % n == 0]
        raise SettingError(
            f"tp_degree={tp} times pp_degree={pp} is {tp * pp}, which does not divide {world.size} processes",
            why="every copy of the model takes as many processes as the two multiply to",
            fix=f"start {tp * pp} processes or a multiple, or use degrees whose product is one of {fits}",
        )
    return MegatronLayout(world.size, world.rank, tp, pp, plugin.num_micro_batches)


def check_supported(world: World) -> None:
    """Refuse to run where Megatron-LM is not installed or cannot run.

    Raises:
        MissingExtraError: the package is missing.
        DeviceError: the device is not a CUDA device.
    """
    if not packages.is_installed("megatron.core"):
        raise MissingExtraError(PACKAGE, "training by Megatron-LM")
    if world.device.type != DEVICE_TYPE:
        raise DeviceError(
            f"Megatron-LM trains on {DEVICE_TYPE} devices only, and this process has {world.device}",
            why=f"{PACKAGE} calls torch.{DEVICE_TYPE} for devices, streams and random states, whatever its "
            "tensors are on",
            fix="run on such devices, or leave --use_megatron_lm out; ParallelismConfig(tp_size=..., "
            "pp_size=...) is tensor and pipeline parallel on any device",
        )


def open_groups(layout: MegatronLayout, backend: str) -> None:
    """Initialize Megatron-LM's process groups, once for a world; all processes must call it.

    Args:
        layout: of this process.
        backend: how a process that is alone would talk to others; Megatron-LM wants a group also then.

    Raises:
        SettingError: groups of other degrees are there.
    """
    from megatron.core import parallel_state

    if layout.size == 1 and not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        # They may belong to a world that is closed.
        if not _groups_world or _groups_world[0] is not dist.group.WORLD:
            parallel_state.destroy_model_parallel()
        else:
            _check_same(layout)
            return
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, create_gloo_process_groups=dist.get_backend() != "gloo"
    )
    _groups_world[:] = [dist.group.WORLD]


# The world whose groups Megatron-LM keeps in its module.
_groups_world: list[Any] = []


def _check_same(layout: MegatronLayout) -> None:
    from megatron.core import parallel_state

    degrees = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if degrees != (layout.tp, layout.pp):
        raise SettingError(
            f"degrees tp={layout.tp}, pp={layout.pp} after tp={degrees[0]}, pp={degrees[1]} in one process",
            why=f"{PACKAGE} keeps its groups of processes in a module, one set for a program",
            fix="use the same degrees for every Accelerator of a program",
        )


def _broadcast_first(value: Any, group: Any) -> Any:
    """Return the value of the first rank of a group."""
    values = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group)
    return values[0]


def seed_dropout(device: torch.device, layout: MegatronLayout) -> None:
    """Seed the dropout of attention, whose states checkpoints hold then; the program's RNG state stays."""
    from megatron.core import parallel_state, tensor_parallel

    seed = _broadcast_first(torch.initial_seed(), parallel_state.get_tensor_model_parallel_group())
    # As Megatron-LM's training script does: with equal seeds, stages drop the same elements in their layers.
    seed = (seed + 100 * layout.pp_rank) % 2**31
    if device.type != "cpu":
        hardware = devices.get(device.type)
        before = hardware.get_rng_state(device.index)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        hardware.set_rng_state(before, device.index)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    rng.register_library_states("megatron_rng_tracker", tracker.get_states, tracker.set_states)


def share_rng_state(device: torch.device, layout: MegatronLayout) -> None:
    """Give all ranks of a tensor parallel group the RNG state of the first one, and each stage its own.

    Other dropout draws from the program's own stream, on replicated activations: with other numbers the
    replicas would drift apart. All draw equally often: once, before the first training step, is enough.
    Resumed stages have states of their own already.
    """
    from megatron.core import parallel_state

    hardware = devices.get(device.type)
    state = hardware.get_rng_state(device.index)
    first_stage = _broadcast_first(state, parallel_state.get_pipeline_model_parallel_group())
    if layout.pp_rank and torch.equal(state, first_stage):
        hardware.seed(int(torch.randint(2**31, (), device=device)) + 100 * layout.pp_rank)
        state = hardware.get_rng_state(device.index)
    state = _broadcast_first(state, parallel_state.get_tensor_model_parallel_group())
    hardware.set_rng_state(state, device.index)
