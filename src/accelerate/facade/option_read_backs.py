"""The read-backs of the option report: what the run shows of an option that was requested.

``READ_BACKS`` has the function of each option, by its name, and ``added_field_status`` that of a field which
the program has added to a class of options. A strategy and a compiler read back their own options:
``Strategy.option_statuses``, ``compilation.option_statuses``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler

from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.core.units import show_bytes
from accelerate.data.batch_source import find_shard
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.epoch_order import get_sampler
from accelerate.data.iterable_dataset import IterableDatasetShard
from accelerate.data.sample_order import SeedableRandomSampler
from accelerate.device import DeviceProbeHost
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.runtime import Runtime
from accelerate.facade.tracker_set import TrackerSet
from accelerate.world.affinity import near_cores
from accelerate.world.process_group import backend_timeouts, group_backends


@dataclass
class ReportedRun:
    """The run whose options are read back.

    Attributes:
        runtime: its world, precision and strategy.
        prepared: its models and loaders.
        tracker_set: its trackers.
        has_stepped: an optimizer has begun its first step.
        stepped_early: that was after one batch that is not the last, without accumulation.
    """

    runtime: Runtime
    prepared: PreparedObjects
    tracker_set: TrackerSet
    has_stepped: bool = False
    stepped_early: bool = False


ReadBack = Callable[[RequestedOption, ReportedRun], OptionStatus]

# --- the process


def _device_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    device = run.runtime.world.device
    return option.report_unless("" if device.type == "cpu" else f"the world was open already, on {device}")


def _debug_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    return option.report_unless("" if run.runtime.world.debug else "the world was open already, without it")


def _affinity_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    world = run.runtime.world
    allowed = getattr(os, "sched_getaffinity", None)
    if allowed is None:
        return option.report_not_applied("this system cannot bind a process to cores")
    index = world.device.index or world.local_rank
    near = set(near_cores(world.hardware, index, world.local_size, DeviceProbeHost()))
    if not near:
        if world.device.type == "cpu":
            reason = "this machine has one NUMA node: no core is nearer than another"
            return option.report_not_applied(reason, matters=False)
        return option.report_not_applied(f"this system does not say which cores are near {world.device}")
    far = len(allowed(0) - near)
    return option.report_unless(
        f"the process may run on {far} cores that are not near {world.device}" if far else ""
    )


def _process_count_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    size = run.runtime.world.size
    return option.report_unless("" if size == option.value else f"this is one of {size} processes")


def _thread_count_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    count = torch.get_num_threads()
    return option.report_unless("" if count == option.value else f"torch uses {count}")


def _gpu_ids_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    requested, visible = len(str(option.value).split(",")), run.runtime.world.hardware.count()
    return option.report_unless("" if requested == visible else f"{visible} devices are visible")


def _group_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    world = run.runtime.world
    if not world.has_group:
        return option.report_not_applied("one process has no group", matters=False)
    if option.name == "timeout":
        limits = backend_timeouts(group_backends(dist.group.WORLD))
        other = sorted({limit for limit in limits if limit != option.value})
        if not limits:
            return option.report_pending(f"the back end {world.backend} does not tell its timeout")
        return option.report_unless(
            f"the group of processes has {other[0]}; it was open already" if other else ""
        )
    if option.name == "backend":
        joined = dist.get_backend_config().lower()
        named = str(option.value).rpartition(":")[2].lower()
        return option.report_unless(
            "" if named in joined else f"the group of processes has {joined}; it was open already"
        )
    return option.report_unless("" if world.owns_group else "the group of processes was open already")


# --- the precision


def _precision_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    """Check the precision on the prepared models, or on the user's models inside of wrappers."""
    strategy, precision, models = run.runtime.strategy, run.runtime.precision, run.prepared.models
    if strategy.owns_step:
        return option.report_applied(f"by the strategy {strategy.name}")
    if not models:
        return option.report_pending("no model is prepared")
    inside = [strategy.unwrap(model) if precision.explain_missing(model) else model for model in models]
    return precision.report_option(option, inside)


# --- the loop


def _accumulation_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    gradients = run.runtime.gradients
    if gradients.num_steps != option.value:
        return option.report_not_applied(f"it is {gradients.num_steps} now")
    # One micro-batch per step needs no accumulation.
    if run.stepped_early and gradients.num_steps != 1:
        return option.report_not_applied(
            "the first optimizer.step() came after the first batch: the loop needs "
            "'with accelerator.accumulate(model):' or accelerator.windows(loader)"
        )
    # The memory that accumulation takes where gradients are sharded otherwise.
    more = run.runtime.strategy.accumulation_bytes(run.prepared.models)
    if not more or gradients.num_steps == 1:
        return option.report_applied()
    if gradients.plugin_kwargs.get("sync_each_batch"):
        return option.report_applied(
            "gradients are reduced in every micro-batch, so no unsharded gradients are kept"
        )
    return option.report_applied(
        f"unsharded gradients are kept until the end of a window: {show_bytes(more)} on each process; "
        "GradientAccumulationPlugin(sync_each_batch=True) takes none of it"
    )


def _adjust_scheduler_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    return option.report_not_applied(
        "a schedule advances with the optimizer, whatever it says", matters=False
    )


def _accumulation_field_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    value = run.runtime.gradients.plugin_kwargs.get(option.name)
    return option.report_unless("" if value == option.value else f"it is {value} now")


def _tracker_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    if any(tracker.name == option.value for tracker in run.tracker_set.trackers):
        return option.report_applied()
    if run.has_stepped and run.runtime.world.rank == 0:
        return option.report_not_applied("the first step was taken and init_trackers() has not been called")
    return option.report_pending("init_trackers() starts it, on process 0")


# --- the loaders


def _loader_read_back(
    look: Callable[[RequestedOption, Any], OptionStatus], alone: str = ""
) -> Callable[[RequestedOption, ReportedRun], OptionStatus]:
    """Return the function that reads an option back from all prepared loaders, by ``look`` at each.

    The worst status counts; a warning is worse than a note.

    Args:
        look: reads it back from one loader.
        alone: why it has no effect with one process; empty where it has.
    """

    def read_back(option: RequestedOption, run: ReportedRun) -> OptionStatus:
        if alone and run.runtime.strategy.data_shard.count == 1:
            return option.report_not_applied(alone, matters=False)
        if not run.prepared.loaders:
            return option.report_pending("no loader is prepared")
        statuses = [look(option, loader) for loader in run.prepared.loaders]
        failed = [status for status in statuses if status.is_failure]
        if not failed and all(status.not_applied for status in statuses):
            failed = statuses
        return failed[0] if failed else option.report_applied()

    return read_back


def _find_sharing_object(loader: Any) -> Any:
    """Return the object that shards a loader's data and has the options as attributes, or None."""
    if isinstance(loader, DataLoaderDispatcher):
        return loader
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base.dataset, IterableDatasetShard):
        return base.dataset
    return find_shard(base)


def _sharing_status(option: RequestedOption, loader: Any) -> OptionStatus:
    holder = _find_sharing_object(loader)
    if holder is None:
        return option.report_not_applied("a loader is not sharded here: it is sharded already")
    value = getattr(holder, option.name)
    return option.report_unless("" if value == option.value else f"a loader was prepared with {value}")


def _dispatch_status(option: RequestedOption, loader: Any) -> OptionStatus:
    one_reads = isinstance(loader, DataLoaderDispatcher)
    reader = "rank 0" if one_reads else "every process for itself"
    return option.report_unless("" if one_reads == option.value else f"a loader is read by {reader}")


def _shard_status(option: RequestedOption, loader: Any) -> OptionStatus:
    shared = _find_sharing_object(loader) is not None
    return option.report_unless(
        "" if shared == option.value else f"a loader is {'' if shared else 'not '}sharded"
    )


def _sampler_status(option: RequestedOption, loader: Any) -> OptionStatus:
    sampler = get_sampler(getattr(loader, "base_dataloader", loader))
    if isinstance(sampler, SeedableRandomSampler):
        return option.report_applied()
    kind = type(sampler)
    reason = f"a loader has a {kind.__name__}, which draws no order of ours"
    # Sampler classes of programs have an order of their own, on purpose; those in order have no generator.
    is_of_torch = kind.__module__.startswith("torch.utils.data.")
    return option.report_not_applied(
        reason, matters=is_of_torch and getattr(sampler, "generator", sampler) is None
    )


def _non_blocking_status(option: RequestedOption, loader: Any) -> OptionStatus:
    device = getattr(loader, "device", None)
    if device is None or device.type == "cpu":
        return option.report_not_applied("batches stay on the host", matters=False)
    if not getattr(loader, "pin_memory", False):
        return option.report_not_applied(
            "copies wait unless memory is pinned: DataLoader(..., pin_memory=True)"
        )
    return option.report_unless("" if loader._non_blocking else "a loader was prepared without it")


def _attribute_status(option: RequestedOption, loader: Any) -> OptionStatus:
    same = getattr(loader, option.name, None) == option.value
    return option.report_unless("" if same else "a loader was prepared without it")


def _torch_numbers_status(option: RequestedOption, loader: Any) -> OptionStatus:
    sampler = get_sampler(getattr(loader, "base_dataloader", loader))
    given = loader.keeps_torch_numbers or getattr(sampler, "generator", None) is not None
    harmless = type(sampler) is not RandomSampler
    return option.report_unless("" if given or harmless else "a loader was prepared without it")


def added_field_status(option: RequestedOption, run: ReportedRun) -> OptionStatus:
    """Return the status of a field that only a subclass of the program has: the class makes use of it."""
    return option.report_applied("a field of the program's own class")


READ_BACKS: dict[str, ReadBack] = {
    "cpu": _device_status,
    "use_cpu": _device_status,
    "debug": _debug_status,
    "enable_cpu_affinity": _affinity_status,
    "backend": _group_status,
    "init_method": _group_status,
    "timeout": _group_status,
    "num_processes": _process_count_status,
    "num_cpu_threads_per_process": _thread_count_status,
    "gpu_ids": _gpu_ids_status,
    "mixed_precision": _precision_status,
    "split_batches": _loader_read_back(_sharing_status, alone="one process takes whole batches"),
    "even_batches": _loader_read_back(_sharing_status, alone="one process takes whatever there is"),
    "dispatch_batches": _loader_read_back(_dispatch_status, alone="one process reads for itself"),
    "shard": _loader_read_back(_shard_status, alone="one process takes everything"),
    "rng_types": _loader_read_back(
        _attribute_status, alone="one process has no other rank to take random states from"
    ),
    "use_seedable_sampler": _loader_read_back(_sampler_status),
    "data_seed": _loader_read_back(_sampler_status),
    "non_blocking": _loader_read_back(_non_blocking_status),
    "use_stateful_dataloader": _loader_read_back(_attribute_status),
    "legacy_random_numbers": _loader_read_back(_torch_numbers_status),
    "gradient_accumulation_steps": _accumulation_status,
    "num_steps": _accumulation_status,
    "adjust_scheduler": _adjust_scheduler_status,
    "sync_with_dataloader": _accumulation_field_status,
    "sync_each_batch": _accumulation_field_status,
    "step_scheduler_once": _accumulation_field_status,
    "log_with": _tracker_status,
}
