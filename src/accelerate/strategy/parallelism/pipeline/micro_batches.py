"""Batches in micro-batches, the plans of their calls, and the check that all stages get the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accelerate import device as devices
from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.stages.split import padded_rows, unflatten_tree
from accelerate.strategy.parallelism.pipeline.forward_trace import PipelineForwardTrace


@dataclass
class PipelineBatch:
    """The arguments of a call, split into micro-batches.

    Attributes:
        form: of (args, kwargs, more); ``tensors`` are theirs, on the device.
        size: samples.
        rows: samples of a micro-batch; the last one may be padded with the last sample.
    """

    form: Any
    tensors: list[torch.Tensor]
    size: int
    rows: int
    batched: tuple[bool, ...]

    def all_samples(self) -> tuple[Any, Any, Any]:
        """Return (args, kwargs, {"target": ...}) of all samples."""
        return unflatten_tree(self.form, self.tensors)

    def chunk(self, number: int) -> tuple[Any, Any, Any]:
        """Return (args, kwargs, {"target": ...}) of one micro-batch."""
        begin, pairs = number * self.rows, zip(self.tensors, self.batched, strict=True)
        return unflatten_tree(self.form, [padded_rows(t, begin, self.rows) if b else t for t, b in pairs])


@dataclass
class PipelineExecutionPlan:
    """The plan by which calls of one shape run.

    Attributes:
        chunk_trace: the forward trace of a micro-batch.
        batch_trace: the forward trace of a batch; None where nothing runs over a full batch.
        rows_per_sample: the length of dimension 0 for one sample, for each result input; 0: there is one
            micro-batch.
        idle_schedules: schedules that wait for a call, each with memory for what its stages receive.
        numbers: the plain numbers among the arguments, by their paths.
        family: equal for the plans of calls that differ in such numbers only.
    """

    chunk_trace: PipelineForwardTrace
    batch_trace: PipelineForwardTrace | None = None
    rows_per_sample: list[int] = field(default_factory=list)
    idle_schedules: list[Any] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    family: str = ""


def plain_numbers(form: Any) -> dict[str, float]:
    """Return the plain numbers in the form of a call, by their paths: ``kwargs['scale']``."""
    names = {"[0]": "args", "[1]": "kwargs"}
    leaves = ((names.get(path[:3], "") + path[3:], leaf) for path, leaf in tree.iterate_leaves(form))
    return {path: leaf for path, leaf in leaves if type(leaf) in (int, float)}


def without_numbers(form: Any) -> Any:
    """Return the form of a call with the type of each plain number in its place."""
    return tree.map_tree(lambda leaf: type(leaf) if type(leaf) in (int, float) else leaf, form)


# Calls of a pipeline whose check the host waits for; mistakes in the loop show in the first ones.
_CHECKED_AT_ONCE = 3


class CallCheck:
    """The check that all stages make the same calls.

    The result lies on the device. Reading it at once would wait for all work that is queued there, so that of
    a later call is read in the call after it, on devices that copy to the host asynchronously.

    Args:
        group: the processes that have the stages.
        device: of this process.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self._calls = 0
        # The description, the fingerprints on the host, and the event after which they are there.
        self._unread: tuple[str, torch.Tensor, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CallCheck:
        """Return a check of a copied model: no event can be copied."""
        return CallCheck(self.group, self.device)

    def check(self, description: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse calls that differ between the stages: this one, or the one before.

        Args:
            description: what must be equal: shapes, types and modes of the call.
            tensors: its arguments, whose values must be equal too.

        Raises:
            PrepareError: on all of them.
        """
        self._read()
        self._calls += 1
        fingerprint = _make_fingerprint(description, tensors, self.device)
        fingerprints = fingerprint.new_empty((dist.get_world_size(self.group), *fingerprint.shape))
        dist.all_gather(list(fingerprints), fingerprint, group=self.group)
        hardware = devices.get(self.device.type)
        if self._calls <= _CHECKED_AT_ONCE or not hardware.pins_memory:
            _compare(description, fingerprints)
            return
        memory = hardware.host_memory(fingerprints.nbytes).view(fingerprints.dtype)
        host = memory.view(fingerprints.shape).copy_(fingerprints, non_blocking=True)
        event = hardware.record_event(hardware.current_stream(self.device.index))
        self._unread = description, host, event

    def _read(self) -> None:
        unread, self._unread = self._unread, None
        if unread is not None:
            description, fingerprints, event = unread
            event.synchronize()
            _compare(description, fingerprints)


def _make_fingerprint(
    description: str, tensors: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return (digest of the description, weighted sum of the values) on the device."""
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:6], "big")
    total = torch.zeros((), dtype=torch.float64)
    for place, tensor in enumerate(tensors, 1):
        total = total.to(tensor.device) + place * torch.nan_to_num(tensor.detach().double()).sum()
    total = total.to(device, non_blocking=True)
    return torch.stack([torch.full_like(total, digest), total])


def _compare(description: str, fingerprints: torch.Tensor) -> None:
    table = fingerprints.tolist()
    if any(row[0] != table[0][0] for row in table):
        raise PrepareError(
            "the stages of a pipeline were called in different ways",
            why=f"arguments, shapes and modes must be equal on all of them; here: {description[:300]}",
            fix="give all processes of a pipeline the same batch: prepare the loader",
        )
    if any(row[1] != table[0][1] for row in table):
        raise PrepareError(
            "the stages of a pipeline were given different values",
            why="each reads of the batch what it needs, so all must have the same one",
            fix="prepare the loader; what is drawn at random in the loop, draw on one process and send "
            "to the others (accelerate.utils.broadcast)",
        )


def cast_floats(given: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a tree to a dtype."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree.map_tree(cast, given)
