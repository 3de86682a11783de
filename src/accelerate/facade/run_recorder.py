"""The record of a run, for ``accelerate report``: each rank writes its steps to a file of its own."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate import track
from accelerate.checkpoint.state_dict_files import is_distributed
from accelerate.core.errors import warn_user
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.data.batches import FetchedBatch
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.runtime import Runtime
from accelerate.report.records import SLOW_STEPS, find_stragglers
from accelerate.track.base import GeneralTracker, to_json_config
from accelerate.track.protocol.json_lines import JSONLinesFile, TrackerFileError
from accelerate.world import watchdog
from accelerate.world.process_group import StoreClient
from accelerate.world.world import World

# Steps of other optimizers without one of the optimizer whose steps are counted, before another is counted: a
# critic may step several times for one step of its generator.
IDLE_STEPS = 10
_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class StepCounter:
    """Counts the steps of a training: those of the first optimizer, or of another where it steps no more.

    Attributes:
        count: the steps that have ended.
        on_step: are called with the optimizer after each of them.
    """

    def __init__(self) -> None:
        self.count, self._idle_steps = 0, 0
        self.on_step: list[Callable[[torch.optim.Optimizer], None]] = []
        # Weak, as the counter of a recorder outlives every training.
        self._owners: list[weakref.ref[PreparedObjects]] = []
        self._counted: Callable[[], Any] = lambda: None
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()  # a kept optimizer may be prepared again

    def follow(self, prepared: PreparedObjects) -> None:
        """Watch the optimizers that are prepared from now on."""
        self._owners.append(weakref.ref(prepared))
        prepared.on_add.append(self._watch)

    def _watch(self, kind: str, item: Any) -> None:
        # An engine's optimizer may have no hooks, and one that is no torch.optim.Optimizer.
        has_hooks = kind == "optimizer" and hasattr(item.optimizer, "register_step_post_hook")
        if has_hooks and item.optimizer not in self._watched:
            self._watched.add(item.optimizer)
            item.optimizer.register_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        owners = [prepared for owner in self._owners if (prepared := owner()) is not None]
        items = [each.optimizer for prepared in owners for each in prepared.optimizers]
        live = [each for each in items if each in self._watched]  # the others never tell of a step
        counted = self._counted()
        if not any(each is counted for each in live):
            counted = live[0] if live else optimizer
        if optimizer is not counted and self._idle_steps < IDLE_STEPS:
            self._idle_steps += 1
            return
        self._counted, self._idle_steps = weakref.ref(optimizer), 0
        self.count += 1
        for react in self.on_step:
            react(optimizer)


class RunRecorder(GeneralTracker):
    """Appends the steps of one rank to ``folder/rank_N.jsonl``; the ranks exchange the id of the run.

    Beside the records of ``accelerate.tracking.JSONLTracker``:

        {"start": "rank_N", "run": id}                           the same id on all ranks
        {"environment": {title: {name: value}}}                  rank 0, once
        {"optimizer_step": n, "seconds": s, "data_wait": s, "forward": s, "samples": n, "tokens": n,
         "memory": bytes, "lr": [...]}
        {"checkpoint": path, "seconds": s, "bytes": n, "step": n}    rank 0
        {"model": {"parameters": n, "trained": n, "format": text, "peak_flops": n or null, ...}}    rank 0
        {"numerics": kind, "step": n, "what": text, "where": text, "samples": [...]}    --check_numerics

    ``seconds`` are from the end of the step before, ``data_wait`` those of them in which the loop waited for
    a batch of a prepared loader, and ``forward`` those from a batch to its backward: under DDP no rank waits
    there for another. On an accelerator that is the time in which the host launches it. ``samples`` are
    those of all ranks; ``tokens`` are the elements of ``input_ids`` in this rank's batches, divided among the
    ranks that read the same data, and null where batches have none. ``memory`` is the most that was
    allocated on the device; of a CPU, the most that the process had resident. No step waits for a device.

    Args:
        folder: of the run; on several machines without a shared file system, each has its own.
        world: the ranks, and the device of this one.

    Attributes:
        steps: numbers the steps.
    """

    name = "record"
    requires_logging_directory = True
    main_process_only = False

    def __init__(self, folder: Path, world: World) -> None:
        super().__init__()
        self.run_name = f"rank_{world.rank}"
        self._file = JSONLinesFile(folder / f"{self.run_name}.jsonl")
        self._world = world
        self.steps = StepCounter()
        self.steps.on_step.append(self._record_step)
        self._samples = 0
        self._tokens: float | None = None
        self._waited = self._forward = self._batch_start = 0.0
        self._step_end = 0.0
        self._peak: int | None = None
        self._next_lookup = 0.0
        self._has_failed = False
        self._pace: PaceExchange | None = None

    def start(self) -> None:
        """Open the file; on rank 0, write what the run stands on."""
        self._file.open()
        self._write(start=self.run_name, run=self._choose_run_id())
        if self._world.rank == 0:
            stands_on = {
                "command": " ".join(sys.argv),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "platform": platform.platform(),
                "processes": self._world.size,
                "device": str(self._world.device),
            }
            self._write(environment={"Environment": stands_on})

    def _choose_run_id(self) -> str | None:
        """Return an id that all ranks write: that of the first to come. None where they share no store."""
        own_id, watch = uuid.uuid4().hex, watchdog.current()
        if watch is None:
            return own_id if self._world.size == 1 else None
        return watch.store.put_if_absent("recorded_run", own_id)  # a process records one

    def record_options(self, launched: Iterable[RequestedOption], statuses: Iterable[OptionStatus]) -> None:
        """Write on rank 0 what the launcher was asked for, and the status of every requested option."""
        if self._world.rank != 0:
            return
        effects = {True: "applied", False: "not applied", None: "not yet"}
        rows = [
            {
                "option": status.option,
                "value": status.value_text or str(status.value),
                "asked by": status.where,
                "effect": effects[status.applied],
                "why": status.why,
            }
            for status in statuses
        ]
        settings = [{"setting": each.name, "value": each.value, "from": each.where} for each in launched]
        self._write(environment={"Settings of the launch": settings, "Requested options": rows})

    @property
    def tracker(self) -> Path:
        """The file."""
        return self._file.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration; what JSON has no type for is written as text."""
        self._write(config=to_json_config(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write what the script logs."""
        self._write(step=step, values=values)

    def finish(self) -> None:
        """Close the file."""
        if self._file.is_open:
            self._write(end="failed" if self.failed else "finished")
            self._file.close()

    def watch(self, kind: str, item: Any) -> None:
        """Begin to record a prepared loader."""
        if kind == "loader" and hasattr(item, "time_fetches"):
            item.time_fetches = partial(self._time_fetches, item)

    def _time_fetches(
        self, loader: Any, batches: Iterator[FetchedBatch], samples: int
    ) -> Iterator[FetchedBatch]:
        """Yield the batches; ``samples`` is of a batch of all ranks that does not tell."""
        shard = getattr(loader, "data_shard", None)
        share = 1.0 if shard is None else shard.count / self._world.size
        while True:
            start = time.perf_counter()
            self._step_end = self._step_end or start  # the first step begins with its batch
            fetched = next(batches, None)
            self._waited += time.perf_counter() - start
            if fetched is None:
                return
            self._samples += samples if fetched.samples is None else fetched.samples
            if (tokens := _count_tokens(fetched.batch)) is not None:
                self._tokens = (self._tokens or 0.0) + share * tokens
            self._batch_start = time.perf_counter()
            yield fetched

    def begin_backward(self) -> None:
        """Note that the rank has done its own work on a batch: the first backward of it begins."""
        if self._batch_start:
            self._forward += time.perf_counter() - self._batch_start
            self._batch_start = 0.0

    def compare_ranks(self) -> None:
        """Begin to warn, on rank 0, of a rank that is slower than the others for 20 steps."""
        watchdog_of_run = watchdog.current()
        if watchdog_of_run is not None:
            self._pace = PaceExchange(watchdog_of_run.store.open_prefix("pace"), self._world)

    def _record_step(self, optimizer: torch.optim.Optimizer) -> None:
        now = time.perf_counter()
        rates = [float(group["lr"]) for group in optimizer.param_groups if _is_host_number(group.get("lr"))]
        self._write(
            optimizer_step=self.steps.count,
            seconds=now - (self._step_end or now),
            data_wait=self._waited,
            forward=self._forward,
            samples=self._samples,
            tokens=self._tokens,
            memory=self._peak_memory(now),
            lr=rates,
        )
        if self._pace is not None:
            self._pace.add(self._waited + self._forward)
        self._step_end, self._tokens = time.perf_counter(), None
        self._waited, self._forward, self._samples = 0.0, 0.0, 0

    def _peak_memory(self, now: float) -> int | None:
        """Return the peak, looked up once in a second: a lookup on a CPU takes longer than a small step."""
        if now >= self._next_lookup:
            self._next_lookup, self._peak = now + 1, self._world.hardware.max_memory_allocated()
        return self._peak

    def _write(self, **record: Any) -> None:
        """Write a line; a disk that is full ends the record, not the training."""
        if self._has_failed:
            return
        try:
            self._file.write(**record)
        except TrackerFileError as error:
            self._has_failed = True
            warn_user(f"the run is not recorded any more, and the training goes on: {error}")

    def record_event(self, event: dict[str, Any]) -> None:
        """Write what a watch on the numbers of this rank has noticed."""
        self._write(**event)

    def record_checkpoint(self, path: Path | str, seconds: float) -> None:
        """Write one save; of a save in the background, ``seconds`` are those that the training waited."""
        if self._world.rank == 0:
            files = list(os.walk(path)) if isinstance(path, Path) else []
            size = sum(os.path.getsize(Path(folder, name)) for folder, _, names in files for name in names)
            self._write(checkpoint=str(path), seconds=seconds, bytes=size or None, step=self.steps.count)


def describe_model(runtime: Runtime, model: nn.Module) -> dict[str, Any]:
    """Return the parameters of a prepared model, the format of its products and the peak of the device in it.

    A report turns tokens into floating point operations by them.

    Nothing where this rank does not see the whole model: a stage of a pipeline, flat parameters of FSDP1, the
    partitions of an engine.
    """
    strategy = runtime.strategy
    params = list(model.parameters())
    is_sharded = any(is_distributed(p) for p in params)
    has_stages = strategy.mesh is not None and "pp" in (strategy.mesh.mesh_dim_names or ())
    if strategy.owns_step or has_stages or (strategy.shards_params and not is_sharded):
        return {}
    total = sum(p.numel() for p in params)
    weights = {_SHORT_NAMES.get(p.dtype, str(p.dtype)) for p in params}
    dtype = runtime.precision.name
    if dtype == "no":
        dtype = weights.pop() if len(weights) == 1 else "mixed"
    hardware, index = runtime.world.hardware, runtime.world.device.index
    return {
        "parameters": total,
        "trained": sum(p.numel() for p in params if p.requires_grad),
        "format": dtype,
        "device": hardware.name(index),
        "peak_flops": hardware.find_peak_flops(dtype, index),
        "processes": runtime.world.size,
    }


def _count_tokens(batch: Any) -> int | None:
    """Return the elements of ``input_ids``, padding too; None where a batch has none, or two sequences."""
    if not isinstance(batch, Mapping) or "decoder_input_ids" in batch:
        return None
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else None


class PaceExchange:
    """Compares the ranks' own time in a step; each writes its last steps to the store of the process group.

    Args:
        store: for this purpose alone.
        world: the ranks.
    """

    def __init__(self, store: StoreClient, world: World) -> None:
        self._store, self._world = store, world
        self._times: list[float] = []
        self._block = 0
        self._named = set[int]()

    def add(self, seconds: float) -> None:
        """Take the time of the next step."""
        self._times.append(seconds)
        if len(self._times) == SLOW_STEPS:
            self._store.put(f"{self._world.rank}/{self._block}", json.dumps(self._times))
            if self._world.rank == 0 and self._block:
                self._compare(self._block - 1)  # of this block another rank may still be in the last step
            if self._block > 2:
                self._store.delete(f"{self._world.rank}/{self._block - 3}")
            self._times, self._block = [], self._block + 1

    def _compare(self, block: int) -> None:
        keys = {f"{rank}/{block}": rank for rank in range(self._world.size)}
        times = {keys[key]: json.loads(text) for key, text in self._store.read(list(keys)).items()}
        for rank, straggler in find_stragglers(times).items():
            if rank not in self._named:
                self._named.add(rank)
                first = block * SLOW_STEPS + straggler.first + 1
                warn_user(
                    f"rank {rank} is slow, and the others wait for it: reading its data and its forward took "
                    f"{straggler.describe(first)}"
                )


def _is_host_number(value: Any) -> bool:
    """Return whether a learning rate can be read without waiting for a device."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.device.type == "cpu")


def start_recorder(folder: str, world: World) -> RunRecorder:
    """Return the recorder of this process, open; several ``Accelerator`` of a process share one.

    Raises:
        TrackerFileError: its file cannot be made.
    """
    for tracker in track.open_trackers():
        if isinstance(tracker, RunRecorder):
            return tracker
    recorder = RunRecorder(Path(folder), world)
    track.start_run(recorder)
    return recorder
