"""Parallel layouts of a training: the memory of a rank under each, which fit, and which to take.

The layouts are listed from the one that communicates least to the one that communicates most. For a model of
``m`` parameters, each rank sends in a step (Rajbhandari et al. 2020, "ZeRO", section 7):

- DDP, and ZeRO 1 and 2: ``2 m``, of which half are weights;
- FSDP without reshard after forward: ``2 m``; with a second all-gather in the backward: ``3 m``;
- HSDP, sharded within each machine: ``3 m`` inside, and ``m`` divided by its devices between machines;
- tensor parallelism: four times the activations of each block in every micro-batch, so within a machine;
- activation checkpointing sends nothing and computes a third more;
- CPU offload copies everything over the host's bus in every step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from accelerate.core.errors import SettingError
from accelerate.core.units import parse_bytes
from accelerate.core.units import show_decimal_bytes as show_bytes
from accelerate.facade.estimate.memory_estimate import (
    MemoryEstimateConfig,
    ModelSizes,
    RankMemoryEstimate,
    estimate_training,
)

# The fraction of a device for its context, temporary memory of kernels, and fragmentation.
SPARE = 0.1
_SHAPE = re.compile(r"(?:(\d+)x)?(\d+)x(\d[\w.]*)", re.IGNORECASE)


# Bytes of the smallest memory that is meant: below it a unit was left out.
_LEAST = 1000


@dataclass(frozen=True)
class ClusterDeviceMemory:
    """The devices of a training: machines, devices of each, and their memory.

    Attributes:
        nodes: machines.
        each: devices of a machine.
        memory: bytes of a device.
    """

    nodes: int
    each: int
    memory: int

    @property
    def count(self) -> int:
        """The number of all devices."""
        return self.nodes * self.each

    @property
    def usable(self) -> int:
        """The bytes of a device without the spare fraction."""
        return int(self.memory * (1 - SPARE))

    def __str__(self) -> str:
        arrangement = f"{self.nodes} machines of {self.each}" if self.nodes > 1 else f"{self.each}"
        return f"{arrangement} device{'s' * (self.count > 1)} with {show_bytes(self.memory)}"


def parse_cluster(text: str) -> ClusterDeviceMemory:
    """Parse a cluster: ``8x80GB`` is one machine with eight devices, ``4x8x80GB`` four such machines.

    Raises:
        SettingError: it is neither, or a number without a unit.
    """
    match = _SHAPE.fullmatch(text.replace(" ", ""))
    if match is None or "0" in (match.group(1), match.group(2)):
        raise SettingError(
            f"{text!r} does not say how many devices there are",
            fix="write 8x80GB for a machine with eight devices of 80 GB, or 4x8x80GB for four machines",
        )
    cluster = ClusterDeviceMemory(int(match.group(1) or 1), int(match.group(2)), parse_bytes(match.group(3)))
    if cluster.memory < _LEAST:
        raise SettingError(
            f"{text!r} are devices of {cluster.memory} bytes",
            why="a number without a unit counts bytes",
            fix=f"write {text}GB" if text[-1:].isdigit() else "write 8x80GB",
        )
    return cluster


@dataclass(frozen=True)
class ParallelLayoutEstimate:
    """One parallel layout of a training.

    Attributes:
        name: for tables.
        estimate: the memory of a rank.
        why: an argument for it, or against it, as a clause.
        settings: of a launch.
        needs_library: it needs DeepSpeed.
    """

    name: str
    estimate: RankMemoryEstimate
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs_library: bool = False

    def fits(self, on: ClusterDeviceMemory) -> bool:
        """Return True when a rank's memory fits a device."""
        return self.estimate.total <= on.usable


# A layout before it is estimated: its name, what it changes in the training, why, the settings of a launch.
LayoutRow: TypeAlias = "tuple[str, dict[str, Any], str, dict[str, Any]]"
_FSDP2 = {"distributed_type": "FSDP", "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
_FSDP2_RECOMPUTED = {**_FSDP2, "fsdp_activation_checkpointing": True}


def list_layouts(
    facts: ModelSizes,
    how: MemoryEstimateConfig,
    on: ClusterDeviceMemory,
    kept: Callable[[MemoryEstimateConfig], Any] = lambda how: None,
) -> list[ParallelLayoutEstimate]:
    """List the layouts that make sense on these devices, the one that communicates least first.

    Args:
        facts: the model.
        how: its training; strategy and number of processes are filled in.
        on: the devices.
        kept: returns the saved activations of a training; see ``estimate_training``.
    """
    rows = [("one device", {"strategy": "single"}, "nothing is exchanged", {})]
    if on.count > 1:
        tensor_parallel = _tensor_parallel_layouts(facts, on)
        rows = [*_data_parallel_layouts(), *_sharded_layouts(on), *tensor_parallel, _HOST_OFFLOAD]
    layouts: list[ParallelLayoutEstimate] = []
    for name, changes, why, settings in rows:
        setup = replace(how, num_processes=on.count, **changes)
        estimate = estimate_training(facts, setup, kept(setup))
        needs_library = setup.strategy.startswith("zero")
        layouts.append(ParallelLayoutEstimate(name, estimate, why, settings, needs_library))
    return layouts


def _data_parallel_layouts() -> Iterator[LayoutRow]:
    """List DDP and ZeRO 1 and 2, where every rank has all weights."""
    settings = {"distributed_type": "MULTI_GPU"}
    yield "DDP", {"strategy": "ddp"}, "only gradients are all-reduced", settings
    for stage, reason in (
        (1, "optimizer state is sharded"),
        (2, "optimizer state and gradients are sharded"),
    ):
        settings = {"distributed_type": "DEEPSPEED", "zero_stage": stage}
        yield f"ZeRO {stage}", {"strategy": f"zero{stage}"}, reason, settings


def _sharded_layouts(on: ClusterDeviceMemory) -> Iterator[LayoutRow]:
    """List FSDP, HSDP and ZeRO 3, which shard weights too."""
    settings: dict[str, Any] = {**_FSDP2, "fsdp_reshard_after_forward": False}
    once, again = "weights are all-gathered once per step", "weights are all-gathered twice per step"
    yield "FSDP2, reshard_after_forward=false", {"strategy": "fsdp", "keeps": True}, once, settings
    if on.nodes > 1:
        settings = {**_FSDP2, **_mesh_settings(dp_replicate=on.nodes, dp_shard=on.each)}
        reason = "only gradients are all-reduced between machines"
        yield "FSDP2, HSDP", {"strategy": "fsdp", "shard": on.each}, reason, settings
    yield "FSDP2", {"strategy": "fsdp"}, again, _FSDP2
    yield "ZeRO 3", {"strategy": "zero3"}, again, {"distributed_type": "DEEPSPEED", "zero_stage": 3}
    reason = "activations are recomputed: a third more to compute"
    changes = {"strategy": "fsdp", "recompute": "full"}
    yield "FSDP2, activation checkpointing", changes, reason, _FSDP2_RECOMPUTED


def _tensor_parallel_layouts(facts: ModelSizes, on: ClusterDeviceMemory) -> Iterator[LayoutRow]:
    """List FSDP with tensor parallelism within a machine."""
    heads = facts.shape.kv_heads if facts.shape is not None else 0
    for tensor in (2, 4, 8):
        if not facts.tensor_parallel_numbers or on.each % tensor or heads % tensor or on.count == tensor:
            continue
        yield (
            f"FSDP2 x TP {tensor}, activation checkpointing",
            {"strategy": "fsdp", "tensor": tensor, "recompute": "full"},
            f"tensor parallel over {tensor} devices: activations are all-reduced in every block",
            {**_FSDP2_RECOMPUTED, **_mesh_settings(dp_shard=on.count // tensor, tp=tensor)},
        )


# FSDP with CPU offload of weights, gradients and optimizer state.
_HOST_OFFLOAD: LayoutRow = (
    "FSDP2, activation checkpointing, CPU offload",
    {"strategy": "fsdp", "recompute": "full", "offload": True},
    "everything crosses the bus in every step, and the host runs the optimizer",
    {**_FSDP2_RECOMPUTED, "fsdp_offload_params": True},
)


def _mesh_settings(**sizes: int) -> dict[str, Any]:
    """Return the sizes of a device mesh as settings."""
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def recommend_layout(
    layouts: list[ParallelLayoutEstimate], on: ClusterDeviceMemory
) -> ParallelLayoutEstimate | None:
    """Return the first layout that fits and needs no other library; None if none does."""
    return next((layout for layout in layouts if layout.fits(on) and not layout.needs_library), None)


def explain_choice(
    chosen: ParallelLayoutEstimate | None, layouts: list[ParallelLayoutEstimate], on: ClusterDeviceMemory
) -> str:
    """Explain the choice in a sentence."""
    if chosen is None:
        least = min(layouts, key=lambda each: each.estimate.total)
        missing = least.estimate.total - on.usable
        return (
            f"Nothing fits: the leanest, {least.name}, needs {show_bytes(least.estimate.total)} a device, "
            f"{show_bytes(missing)} more than there is. Take more devices, or a smaller batch or length."
        )
    before = layouts[: layouts.index(chosen)]
    left = on.usable - chosen.estimate.total
    if not before or all(each.needs_library for each in before):
        reason = "no way exchanges less"
    else:
        tight = next(each for each in reversed(before) if not each.needs_library)
        reason = f"{tight.name} would exchange less, but needs {show_bytes(tight.estimate.total)}"
    engines = [each.name for each in before if each.needs_library and each.fits(on)]
    reason += f"; {engines[0]} fits too, and needs another library" if engines else ""
    return (
        f"Take: {chosen.name}. It fits with {show_bytes(left)} to spare; {reason}. {chosen.why.capitalize()}."
    )
